"""Other implementations of DropBlock, each at the rate that it really drops.

At equal nominal rates the peers drop different shares. `nominal` finds the rate to give to
a peer, by bisection on the measured share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torchvision
from timm.layers.drop import drop_block_2d
from torch import Tensor

ELEMENTS = 4_000_000  # elements on which a share is measured, with an error of about 1 %
HALVINGS = 12
CPU = torch.device("cpu")

PEERS: dict[str, Callable[[Tensor, float, int], Tensor]] = {
    "torchvision": torchvision.ops.drop_block2d,
    "timm": lambda x, p, block_size: drop_block_2d(x, p, block_size, couple_channels=False),
    "timm shared": lambda x, p, block_size: drop_block_2d(x, p, block_size),
}
"""Functions of activation, rate and block size. "shared" has one mask for all channels."""


@cache
def nominal(
    name: str,
    map_size: tuple[int, int],
    block_size: int,
    rate: float,
    device: torch.device = CPU,
) -> float:
    """Return the rate at which a peer drops the share `rate` of maps of this size.

    The search is faster on a GPU.

    Raises:
        ValueError: if the peer can't drop that much.
    """
    if realized(name, 1.0, map_size, block_size, device) < rate:
        raise ValueError(f"{name} can't drop {rate:g} of a {map_size} map, block {block_size}")
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if realized(name, middle, map_size, block_size, device) < rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def realized(
    name: str,
    p: float,
    map_size: tuple[int, int],
    block_size: int,
    device: torch.device = CPU,
) -> float:
    """Measure the share of elements that a peer drops in maps with a single channel."""
    samples = max(1, ELEMENTS // (map_size[0] * map_size[1]))
    ones = torch.ones(samples, 1, *map_size, device=device)
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), torch.no_grad():
        torch.manual_seed(0)
        y = PEERS[name](ones, p, block_size)
    return 1 - int(y.count_nonzero()) / y.numel()
