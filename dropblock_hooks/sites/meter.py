"""The meter: what compiled code counts into."""

import math
import sys
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.gradients import Clipped
from ..functional.masks import wide_dtype
from .norms import NormBins

Counted = Clipped | Tensor | int | None
"""How many elements were dropped or changed; of a gradient with a bound, the norms before too."""
Sizes = tuple[tuple[int, ...], tuple[int, ...]]
"""The smallest and the largest map seen, per axis."""

CALLS, ACTIVE, AFFECTED, TOTAL, EXPECTED, MODE, RESUMED, LOW = range(8)
_TRAINED, _EVALUATED = 1, 2  # what the cell of the mode holds; 0 before any training
NOTHING = [0.0] * LOW


class Meter:
    """What compiled code counts into: one tensor, allocated before, so that nothing is guarded.

    Its numbers only grow, and are read when someone asks; where nothing was compiled, never. In
    float64 they are exact up to 2**53. A flag that says whether it was used would be a side effect,
    which the compiler does not allow inside a checkpoint. Norms of gradients have bins of their
    own, where eager mode counts them too.
    """

    def __init__(self, spatial: int | None, device: torch.device, gradients: bool = False) -> None:
        self.norms = NormBins(device) if gradients else None
        self.spatial = spatial or 0
        self._loaded = False
        counts = [0.0] * LOW + [math.inf] * self.spatial + [0.0] * self.spatial
        with torch.inference_mode(False):
            # not where `with torch.device(...)` says: from meta nothing comes back
            self.counts = torch.tensor(counts, dtype=wide_dtype(device), device=device)

    def to(self, device: torch.device) -> None:
        """Follow the activations to their device."""
        if self.norms is not None:
            self.norms.to(device)
        if self.counts.device == device or device.type == "meta":
            return  # on meta, what was counted would be lost
        moved = self.counts.to(device, wide_dtype(device), non_blocking=True)
        if moved.is_inference():
            with torch.inference_mode(False):
                moved = moved.clone()
        self.counts = moved

    def home(self, layer: nn.Module, model_at: torch.device | None) -> torch.device | None:
        """Where a layer is; one without tensors is where the model is, until compiled code ran."""
        own = device_of(layer)
        return model_at if own is None and self.counts.device.type == "cpu" else own

    def add_call(self) -> None:
        """One more call of the layer."""
        self.counts[CALLS].add_(1)

    def add_active(self, affected: Counted, total: int, rate: Tensor | float) -> None:
        """One more call in which the regularizer was on, and what it did."""
        self.counts[ACTIVE].add_(1)
        changed = affected.changed if isinstance(affected, Clipped) else affected
        if changed is None or (isinstance(changed, Tensor) and changed.is_meta):
            return
        if self.norms is not None and isinstance(affected, Clipped):
            self.norms.add(affected.met)
        self.counts[AFFECTED].add_(changed)
        self.counts[TOTAL].add_(total)
        self.counts[EXPECTED].add_(rate * total)

    def see_map(self, size: tuple[int, ...]) -> None:
        """Widen the range of map sizes."""
        for axis, edge in enumerate(size):
            self.counts[LOW + axis].clamp_(max=edge)
            self.counts[LOW + self.spatial + axis].clamp_(min=edge)

    @staticmethod
    def maps(numbers: list[float]) -> Sizes | None:
        """The smallest and the largest map in what the meter has shown."""
        half = (len(numbers) - LOW) // 2
        low, high = numbers[LOW : LOW + half], numbers[LOW + half :]
        return (tuple(map(int, low)), tuple(map(int, high))) if high and high[0] else None

    def see_mode(self, training: bool) -> None:
        """Count how often training has resumed after an evaluation."""
        mode = self.counts[MODE]
        if training:
            self.counts[RESUMED].add_(mode == _EVALUATED)
            mode.fill_(_TRAINED)
        else:
            mode.add_(mode == _TRAINED)

    @property
    def is_used(self) -> bool:
        """Whether there may be something to read; without waiting for the device."""
        real = type(self.counts) is Tensor and not self.counts.is_meta  # no fake one
        return real and (self._loaded or "torch._dynamo" in sys.modules)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _loaded=True)  # where it was saved, something may have compiled

    def copied(self) -> Tensor | None:
        """The numbers of now, to be read later."""
        if not self.is_used:
            return None
        with torch.inference_mode(False):
            return self.counts.clone()


def device_of(module: nn.Module) -> torch.device | None:
    """Where the first tensor of a module is."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return None if first is None else first.device
