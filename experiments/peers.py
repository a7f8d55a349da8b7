"""Other implementations of DropBlock, each at the rate that it really drops.

At equal nominal p the peers drop different shares, so `nominal` finds, by bisection on the share
that a peer was measured to drop, what it has to be asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import torch
import torchvision
from timm.layers.drop import drop_block_2d
from torch import Tensor

Peer = Callable[[Tensor, float, int], Tensor]

ELEMENTS = 4_000_000  # of which the share is measured: to about 1 % of itself
HALVINGS = 12


def _torchvision(x: Tensor, p: float, block_size: int) -> Tensor:
    return torchvision.ops.drop_block2d(x, p, block_size)


def _timm(x: Tensor, p: float, block_size: int) -> Tensor:
    return drop_block_2d(x, p, block_size, couple_channels=False)


def _timm_shared(x: Tensor, p: float, block_size: int) -> Tensor:
    return drop_block_2d(x, p, block_size)


def _dropblock(x: Tensor, p: float, block_size: int) -> Tensor:
    from dropblock import DropBlock2D

    return DropBlock2D(p, block_size)(x)


PEERS: dict[str, Peer] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "timm shared": _timm_shared,
    "dropblock shared": _dropblock,
}


def installed() -> list[str]:
    """The peers that are there; the package `dropblock` need not be."""
    has_dropblock = importlib.util.find_spec("dropblock") is not None
    return [name for name in PEERS if has_dropblock or name != "dropblock shared"]


@cache
def nominal(name: str, map_size: tuple[int, int], block_size: int, rate: float) -> float:
    """The p at which a peer drops `rate` of maps of this size.

    Example:
        >>> 0.04 < nominal("timm", (14, 14), 7, 0.1) < 0.05
        True

    Raises:
        ValueError: if the peer can't drop that much.
    """
    peer = PEERS[name]
    if realized(peer, 1.0, map_size, block_size) < rate:
        raise ValueError(f"{name} can't drop {rate:g} of a {map_size} map, block {block_size}")
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if realized(peer, middle, map_size, block_size) < rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def realized(
    peer: Peer, p: float, map_size: tuple[int, int], block_size: int, seed: int = 0
) -> float:
    """The share of single-channel maps of ones that a peer drops."""
    samples = max(1, ELEMENTS // (map_size[0] * map_size[1]))
    ones = torch.ones(samples, 1, *map_size)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        y = peer(ones, p, block_size)
    return 1 - int(y.count_nonzero()) / y.numel()
