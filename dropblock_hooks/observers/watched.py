"""What the sites of a `Watchdog` keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.masks import wide_dtype
from .base import Seen
from .units import NEAR, bounds_of

_MOST_UNREAD = 4096
_INF = math.inf
_HUGE = 1e30  # a norm beyond it counts as this: its squares may not fit


@dataclass
class Numbers:
    """What a site has counted since the last look. Times are those of the `Clock`.

    Attributes:
        bad: when its output was first not finite; inf for never.
        made: the same, of a call in which its input was finite.
        at: when it was last called.
        calls: its calls.
        differentiable: calls whose output may get a gradient.
        bad_calls: calls whose output was not finite.
        grad_bad: when a gradient that is not finite first came to its output; inf for never.
        grads: gradients that have come.
        norm: the sum of their norms, of the unscaled loss; without those that are not finite.
        near: the sum over calls of the share of values at the bounds of an activation.
    """

    bad: float = _INF
    made: float = _INF
    at: int = 0
    calls: int = 0
    differentiable: int = 0
    bad_calls: int = 0
    grad_bad: float = _INF
    grads: int = 0
    norm: float = 0.0
    near: float = 0.0


@dataclass
class Clock:
    """What all sites of an attachment share.

    Attributes:
        time: the number of calls and gradients that all sites have seen, so that these are ordered.
        forwards: training forwards since the last look.
        steps: calls of ``step`` since the last look.
        alerts: what the last looks have found, by layer and rule.
    """

    time: int = 0
    forwards: int = 0
    steps: int = 0
    alerts: dict[tuple[str, str], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, shared: dict[str, Any]) -> Clock:
        """Return the clock of an attachment."""
        clock: Clock = shared.setdefault("Watchdog", cls())
        return clock

    def tick(self) -> int:
        """Return the time of a new event."""
        self.time += 1
        return self.time


class Watched:
    """The state of one site of a `Watchdog`.

    A number on the CPU is read at once. A number on another device is read at the next look, so
    that no device is waited for in between.

    Attributes:
        kept: what was counted.
        peaks: the largest magnitude of each channel, of an activation that can die.
        can_die: whether the layer is such an activation, and the rule ``dead`` is on.
        bounds: those of the activation, if the rule ``saturated`` is on.
    """

    def __init__(self) -> None:
        self.kept = Numbers()
        self.peaks = torch.zeros(0, device="cpu")
        self.can_die = False
        self.bounds: tuple[float, float] | None = None
        self._unread: list[tuple[Callable[..., None], int, tuple[Tensor, ...]]] = []

    def see(self, seen: Seen) -> None:
        """Add one call of the layer."""
        time = self.kept.at = Clock.of(seen.shared).tick()
        self.kept.calls += 1
        self.kept.differentiable += seen.differentiable
        worst = _magnitude(seen.tensors)
        if worst is None:
            return
        given = None
        if worst.device.type != "cpu" or not worst < _INF:  # otherwise its input does not matter
            given = _magnitude_given(seen.given)
        self._add(self._add_output, time, worst, *([] if given is None else [given]))
        x = seen.tensor
        if self.can_die and x.ndim > 1 and x.numel():
            self._see_channels(seen, x)
        if self.bounds is not None and x.numel():
            lower, upper = self.bounds
            edge = NEAR * (upper - lower)
            at_bounds = (x < lower + edge) | (x > upper - edge)
            self._add(self._add_share, time, at_bounds.mean(dtype=torch.float32))

    def _see_channels(self, seen: Seen, x: Tensor) -> None:
        """Raise the peaks of the channels."""
        mapped = seen.channels_first()
        if mapped is None:
            mapped = x.movedim(-1 if x.ndim != 4 else 1, 1)
        more = mapped.shape[1] - len(self.peaks)
        if more > 0:
            self.peaks = torch.cat((self.peaks.to(x.device), torch.zeros(more, device=x.device)))
        elif x.device.type == "cpu" and bool(self.peaks.all()):
            return  # none can be dead any more
        others = [axis for axis in range(mapped.ndim) if axis != 1]
        peaks = self.peaks[: mapped.shape[1]]
        torch.maximum(peaks, mapped.abs().amax(others).to(peaks), out=peaks)

    def see_gradient(self, seen: Seen) -> None:
        """Add one gradient."""
        if seen.tensor.numel():
            self.kept.grads += 1
            time = Clock.of(seen.shared).tick()
            self._add(self._add_norm, time, _norm(seen.tensor) / seen.scale)

    def _add(self, add: Callable[..., None], time: int, *numbers: Tensor) -> None:
        """Call `add` with numbers now, if they are on the CPU, or at the next look."""
        if all(number.device.type == "cpu" for number in numbers):
            add(time, *map(float, numbers))
            return
        self._unread.append((add, time, numbers))
        if len(self._unread) >= _MOST_UNREAD:
            self.read()

    def read(self) -> None:
        """Add the numbers that are on a device. It is waited for."""
        flat = [
            number.to(wide_dtype(number.device))
            for _, _, numbers in self._unread
            for number in numbers
        ]
        values = iter(torch.stack(flat).tolist() if flat else ())
        for add, time, numbers in self._unread:
            add(time, *[next(values) for _ in numbers])
        self._unread = []

    def _add_output(self, time: int, worst: float, given: float = 0.0) -> None:
        if not worst < _INF:
            self.kept.bad_calls += 1
            self.kept.bad = min(self.kept.bad, time)
            if given < _INF:
                self.kept.made = min(self.kept.made, time)

    def _add_share(self, time: int, share: float) -> None:
        self.kept.near += share

    def _add_norm(self, time: int, norm: float) -> None:
        if norm < _INF:
            self.kept.norm += min(norm, _HUGE)
        else:
            self.kept.grad_bad = min(self.kept.grad_bad, time)

    def forget(self, statistics: bool) -> None:
        """Begin anew.

        Args:
            statistics: forget these too, not only what was not finite.
        """
        if statistics:
            self.kept = Numbers(at=self.kept.at)
            self.peaks = self.peaks[:0]
        else:
            self.kept.bad = self.kept.made = self.kept.grad_bad = _INF


_CAN_DIE = {"relu", "relu6", "threshold", "hardswish", "gelu", "silu", "swish", "mish"}


def can_die(module: nn.Module) -> bool:
    """Whether the layer is an activation that is zero on one side."""
    return type(module).__name__.lower() in _CAN_DIE


def bounded(module: nn.Module) -> tuple[float, float] | None:
    """Return the bounds of an activation; None for a ReLU6, whose zeros mean dead or alive."""
    name = type(module).__name__.lower()
    if name == "relu6" or (isinstance(module, nn.Hardtanh) and name != "hardtanh"):
        return None
    return bounds_of(module)


def _magnitude(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a number that is finite if all values are; None of no values."""
    worst = None
    for x in map(_readable, tensors):
        if x.numel():
            number = _sum_or_largest(x).abs()
            worst = number if worst is None else torch.maximum(worst, number.to(worst))
    return worst


def _sum_or_largest(x: Tensor) -> Tensor:
    """Return the sum on the CPU, which is faster; where it overflows, the largest magnitude."""
    if x.device.type == "cpu":
        total = x.sum(dtype=torch.float32)
        if math.isfinite(total):
            return total
    low, high = x.aminmax()
    return torch.maximum(high, -low)


def _magnitude_given(tensors: Sequence[Tensor]) -> Tensor | None:
    """The same of arguments; -inf counts in the first one only: masks of attention hold it."""
    worst = _magnitude(tensors[:1])
    for x in tensors[1:]:
        if x.numel():
            high = _readable(x).amax()
            worst = high if worst is None else torch.maximum(worst, high.to(worst))
    return worst


def _norm(grad: Tensor) -> Tensor:
    """Return the norm; it is finite if all values are, whose squares may not fit into float32."""
    norm: Tensor
    if grad.device.type == "cpu" and grad.dtype is not torch.float64:
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)  # several times as fast
        if norm < _INF:
            return norm
    norm = torch.linalg.vector_norm(grad, dtype=wide_dtype(grad.device))
    return norm


def _readable(x: Tensor) -> Tensor:
    """Types of 8 bits have no order: return them as float32."""
    return x.float() if x.element_size() == 1 else x
