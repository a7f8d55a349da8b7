"""Other implementations of DropBlock, each at the rate that it really drops.

At equal nominal p the peers drop different shares, so `nominal` finds, by bisection on the share
that a peer was measured to drop, what it has to be asked for. `PeerDropBlock2d` puts a peer on
layers by name, also from a study's YAML.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import ClassVar

import torch
import torchvision
from timm.layers.drop import drop_block_2d
from torch import Tensor

from dropblock_hooks import Now, Probability, Regularizer, register
from experiments.field_checks import closest, require

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


@register
class PeerDropBlock2d(Regularizer):
    """A peer's DropBlock of feature maps, as it is, with the share that it drops counted.

    Peers multiply by mask and scale; both are read from what becomes of ones.

    Example:
        >>> PeerDropBlock2d("timm", p=0.1, block_size=3)
        PeerDropBlock2d(peer='timm', p=0.1, block_size=3)

    Args:
        peer: torchvision, timm (a mask for each channel), "timm shared" (one for all, its default)
            or "dropblock shared" (the package of miguelvr, if it is installed).
        p: asked of the peer; what it drops is another share.
        block_size: edge of the block, in elements.

    Raises:
        ValueError: for a peer that is not known, or not installed.
    """

    peer: str
    p: Probability
    block_size: int = 7
    traceable: ClassVar[bool] = False
    idle_at_zero: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = isinstance(self.block_size, int) and self.block_size >= 1
        require(whole, "block_size", "an integer >= 1", self.block_size)
        if self.peer not in PEERS:
            hint = closest(self.peer, PEERS) or f"; installed: {', '.join(installed())}"
            raise ValueError(f"unknown peer {self.peer!r}{hint}")
        if self.peer not in installed():
            raise ValueError(f"peer {self.peer!r} is not installed: pip install dropblock")

    def apply(self, x: Tensor, now: Now) -> tuple[Tensor, Tensor]:
        scaled_mask = PEERS[self.peer](torch.ones_like(x), float(now.p), self.block_size)
        return x * scaled_mask, (scaled_mask == 0).expand_as(x).sum()
