"""Seeds of masks: random numbers that are drawn again.

In a block of `Attachment.same_masks` each call of a site draws a number from torch's generator of
the CPU. The number of its first call is the seed of the site in this block. Every call runs with
generators that begin at this seed. The function `act` asks `Seeds.seed_of` for it.

A checkpoint restores the generator when it runs a forward again, perhaps after the block. So the
repeated call draws the same number, and this number finds the seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import generator_of

_SEEDS = 2**62
_MOST_NOTED = 2**16  # calls that may be run again


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of a device within a ``with`` block."""
    generators = [torch.default_generator]
    if device.type not in ("cpu", "meta"):
        generators.append(generator_of(device))
    states = [generator.get_state() for generator in generators]

    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class Drawn(NamedTuple):
    """The seed of a site in a block, with the facts about its first tensor that decide the mask."""

    seed: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]
    rates: dict[str, float]

    @classmethod
    def of(cls, seed: int, x: Tensor, rates: dict[str, float]) -> Drawn:
        """Describe a call with a tensor and rates."""
        # on a GPU, dropout draws elements in the memory order of its result, with these strides
        strides = torch.empty_like(x, device="meta").stride()
        return cls(seed, tuple(x.shape), x.dtype, x.device, strides, rates)

    def difference(self, other: Drawn) -> str:
        """Describe the first difference to another call that changes the mask; ``""`` if none."""
        for name in ("shape", "dtype", "device", "strides", "rates"):
            first = getattr(self, name)
            now = getattr(other, name)
            if first != now:
                return f"{name} {now}, and the first call in the block had {first}"
        return ""


class Seeds:
    """The seeds of the sites of an attachment.

    Attributes:
        is_open: whether a block of `Attachment.same_masks` is open.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._drawn: dict[int, Drawn] = {}  # in the open block, by the number of the site
        self._noted: dict[tuple[int, int], int] = {}  # seeds, by site and the number that it drew

    @contextmanager
    def block(self) -> Iterator[None]:
        """Let each site draw one mask within a ``with`` block; a block inside begins anew."""
        outside = self.is_open, self._drawn
        self.is_open = True
        self._drawn = {}
        try:
            yield
        finally:
            self.is_open, self._drawn = outside

    def seed_of(self, site: Any, x: Tensor, recomputes: bool) -> int | None:
        """Return the seed of a call; None if the call draws nothing, or is in no block.

        A recomputation gets the seed of its first run, also after the block.

        Raises:
            SiteError: if the tensor or the rates do not fit the mask of the first call in the
                block.
        """
        if not site.draws:
            return None
        if recomputes:
            return self._noted_seed(site)
        if not self.is_open:
            return None

        number = _draw()
        now = Drawn.of(number, x, site.values)
        first = self._drawn.setdefault(site.order, now)
        difference = first.difference(now)
        if difference:
            raise site.error(f"same_masks() has no mask for {difference}")

        self._noted[site.order, number] = first.seed
        if len(self._noted) > _MOST_NOTED:
            oldest = next(iter(self._noted))
            del self._noted[oldest]
        return first.seed

    def _noted_seed(self, site: Any) -> int | None:
        """Return the seed of a repeated call, which draws the same number as the first time."""
        if not self._noted:
            return None
        before = torch.default_generator.get_state()
        # a call outside of all blocks drew no number in its first run, so it must draw none now
        seed = self._noted.get((site.order, _draw()))
        if seed is None:
            torch.default_generator.set_state(before)
        return seed


def _draw() -> int:
    """Draw a number from torch's generator of the CPU."""
    return int(torch.randint(_SEEDS, (), device="cpu"))
