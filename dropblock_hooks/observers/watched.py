"""What the sites of a `Watchdog` keep, on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional.masks import wide_dtype
from .base import Seen, Watch
from .saturation import NEAR, bounds_of

CHANNELS = 4096
"""Channels beyond this number are not looked at."""
_INF = math.inf
_HUGE = 1e30  # a norm beyond it counts as this: its squares may not fit


class Numbers(NamedTuple):
    """What a site has kept since the last look; times are those of the `Clock`, inf for never.

    Forwards and backwards have a time each.

    Attributes:
        given: the largest magnitude of what the layer was given in its last call.
        bad: when it first gave a number that is not finite.
        made: the same, of a call that was given finite ones.
        after: the time of backwards when it first gave a number that is not finite.
        at: when it was last called.
        calls: its calls.
        bad_calls: those that gave numbers that are not finite.
        grad_bad: when a gradient that is not finite first came to what it gave.
        handed_bad: when it first handed one on to what it was given.
        grads: gradients that have come.
        norm: the sum of their norms, of the unscaled loss; without those that are not finite.
        run: bad gradients in a row until now, of those that came, under a GradScaler.
        longest: the longest such run.
        scale: that of the GradScaler when the last bad gradient came.
        scales: how many scales in a row have given bad gradients, until now.
        most_scales: the largest such number.
        near: the sum of the shares of values at the bounds of an activation.
        channels: of its values; 0 where they were not looked at.
    """

    given: float = 0.0
    bad: float = _INF
    made: float = _INF
    after: float = _INF
    at: float = 0.0
    calls: float = 0.0
    bad_calls: float = 0.0
    grad_bad: float = _INF
    handed_bad: float = _INF
    grads: float = 0.0
    norm: float = 0.0
    run: float = 0.0
    longest: float = 0.0
    scale: float = 0.0
    scales: float = 0.0
    most_scales: float = 0.0
    near: float = 0.0
    channels: float = 0.0


_OF_RUNS = ("run", "longest", "scale", "scales", "most_scales")
_OF_BACKWARD = ("grad_bad", "handed_bad", "grads", "norm", *_OF_RUNS)
_AT = {
    name: at
    for group in (_OF_BACKWARD, [name for name in Numbers._fields if name not in _OF_BACKWARD])
    for at, name in enumerate(group)
}


class Clock:
    """What all sites share: numbers that grow with every event, so that these have an order.

    They are two, as compiled code can't write in a backward what a later forward has written.

    Attributes:
        time: the events of forwards, on the device.
        back: those of backwards.
        forwards: training forwards since the last look.
        steps: how often time has moved since then.
        calls: all training forwards that were seen, and `samples` the samples in them.
        rescaled: whether the scale of the GradScaler was seen to move.
        alerts: what the last looks have found, by layer and rule.
    """

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.time = torch.zeros((), dtype=torch.float64, device="cpu")
            self.back = torch.zeros((), dtype=torch.float64, device="cpu")
        self.forwards = self.steps = 0
        self.calls = self.samples = 0
        self.rescaled = False
        self.alerts: dict[tuple[str, str], Any] = {}

    @classmethod
    def of(cls, shared: dict[str, Any]) -> Clock:
        """The one of an Attachment."""
        clock: Clock = shared.setdefault("Watchdog", cls())
        return clock

    def to(self, device: torch.device) -> None:
        """Follow the model; of several devices to the first."""
        if self.time.device.type == "cpu" != device.type != "meta":
            self.time = self.time.to(device, wide_dtype(device))
            self.back = self.back.to(device, wide_dtype(device))

    def tick(self, device: torch.device, backward: bool) -> Tensor:
        """The time of an event."""
        return (self.back if backward else self.time).add_(1).to(device, non_blocking=True)


class Watched(Watch):
    """What one site has kept.

    Attributes:
        kept: the `Numbers` of forwards, on the device.
        back: those of backwards: compiled code writes them in its backward alone.
        peaks: of each channel, the largest magnitude.
        frozen: calls in which it had no trained parameters; in compiled code they are not known.
    """

    def __init__(self, watches_dead: bool, watches_near: bool) -> None:
        self.watches_dead = watches_dead
        self.watches_near = watches_near
        self.clock = Clock()
        self.frozen = 0
        with torch.inference_mode(False):
            self.kept, self.back = (
                torch.tensor(
                    [
                        value
                        for name, value in Numbers._field_defaults.items()
                        if (name in _OF_BACKWARD) == backward
                    ],
                    dtype=torch.float64,
                    device="cpu",
                )
                for backward in (False, True)
            )
            size = CHANNELS if self.watches_dead else 0
            self.peaks = torch.zeros(size, dtype=torch.float32, device="cpu")

    def join(self, shared: dict[str, Any]) -> None:
        self.clock = Clock.of(shared)

    def to(self, device: torch.device) -> None:
        if self.kept.device != device and device.type != "meta":
            with torch.inference_mode(False):
                self.kept = self.kept.to(device, wide_dtype(device)).clone()
                self.back = self.back.to(device, wide_dtype(device)).clone()
                self.peaks = self.peaks.to(device).clone()
            self.clock.to(device)

    def _slot(self, name: str) -> Tensor:
        return (self.back if name in _OF_BACKWARD else self.kept)[_AT[name]]

    def give(self, tensors: Sequence[Tensor]) -> None:
        if tensors:
            self._follow(tensors[0].device)
        worst = _magnitude(tensors[:1], self.kept)
        for x in tensors[1:]:  # of a mask of attention, -inf is meant
            if x.numel():
                worst = torch.maximum(worst, x.amax().to(self.kept))
        self._slot("given").copy_(worst)

    def see(self, seen: Seen) -> None:
        self._follow(seen.tensors[0].device)
        now = self.clock.tick(self.kept.device, backward=False)
        bad = ~(_magnitude(seen.tensors, self.kept) < _INF)
        self._slot("bad").clamp_(max=torch.where(bad, now, _INF))
        back = self.clock.back.to(self.kept.device, non_blocking=True)
        self._slot("after").clamp_(max=torch.where(bad, back, _INF))
        made = bad & (self._slot("given") < _INF)
        self._slot("made").clamp_(max=torch.where(made, now, _INF))
        self._slot("at").copy_(now)
        self._slot("calls").add_(1)
        self._slot("bad_calls").add_(bad)
        x = seen.tensors[0]
        if not torch.compiler.is_compiling():
            self.frozen += not any(
                p is not None and p.requires_grad for p in seen.module._parameters.values()
            )
        self._see_activation(seen, x)

    def _see_activation(self, seen: Seen, x: Tensor) -> None:
        if self.watches_dead and can_die(seen.module) and x.ndim > 1 and x.numel():
            mapped = seen.channels_first(x)
            if mapped is None:
                mapped = x.movedim(-1 if x.ndim != 4 else 1, 1)
            mapped = mapped[:, :CHANNELS]
            others = tuple(axis for axis in range(mapped.ndim) if axis != 1)
            low, high = mapped.amin(others), mapped.amax(others)
            peaks = self.peaks[: mapped.shape[1]]
            peaks.copy_(torch.maximum(peaks, torch.maximum(high, -low).to(peaks)))
            self._slot("channels").clamp_(min=mapped.shape[1])
        bounds = _bounds(seen.module) if self.watches_near else None
        if bounds is not None and x.numel():
            lower, upper = bounds
            edge = NEAR * (upper - lower)
            at_bounds = (x < lower + edge) | (x > upper - edge)
            self._slot("near").add_(at_bounds.mean(dtype=torch.float32))
            self._slot("channels").clamp_(min=1)

    def see_gradient(self, grad: Tensor, at: int, scale: float | Tensor, ticket: Any) -> None:
        if not grad.numel():
            return
        bad = self._see_bad(grad, "grad_bad")
        if isinstance(scale, Tensor) or scale != 1.0:
            self._see_overflow(bad, scale)
        norm = torch.linalg.vector_norm(grad, dtype=_summed(grad)).to(self.back) / scale
        self._slot("grads").add_(1)
        self._slot("norm").add_(torch.where(bad, 0.0, norm.clamp(max=_HUGE)))

    def see_handed(self, grad: Tensor) -> None:
        if grad.numel():
            self._see_bad(grad, "handed_bad")

    def _see_bad(self, grad: Tensor, name: str) -> Tensor:
        """Note a gradient; whether it is bad."""
        now = self.clock.tick(self.back.device, backward=True)
        bad = ~(_magnitude([grad], self.back) < _INF)
        self._slot(name).clamp_(max=torch.where(bad, now, _INF))
        return bad

    def _see_overflow(self, bad: Tensor, scale: float | Tensor) -> None:
        """Count in a row: gradients, of which an update may have several, and scales."""
        self._slot("run").add_(1).mul_(bad)
        self._slot("longest").clamp_(min=self._slot("run"))
        last, scales = self._slot("scale"), self._slot("scales")
        other = last != scale
        scales.mul_(bad | ~other).add_(bad & other)
        last.copy_(torch.where(bad, scale, last))
        self._slot("most_scales").clamp_(min=scales)

    def _follow(self, device: torch.device) -> None:
        """Go where the activations are; compiled code can't."""
        if not torch.compiler.is_compiling():
            self.to(device)

    def tensors(self) -> list[Tensor]:
        return [self.kept, self.back, self.peaks]

    def read(self, numbers: Mapping[int, list[float]]) -> Any:
        """What was kept, and the peaks of the channels; not as rows of a report."""
        return None

    def kept_of(self, numbers: Mapping[int, list[float]]) -> tuple[Numbers, list[float]]:
        """What was kept, and the largest magnitudes of the channels."""
        tensors = {False: self.kept, True: self.back}
        kept = Numbers(
            *(numbers[id(tensors[name in _OF_BACKWARD])][_AT[name]] for name in Numbers._fields)
        )
        return kept, numbers[id(self.peaks)][: int(kept.channels)]

    def forget(self, statistics: bool) -> None:
        """Begin anew, without waiting for the device.

        Args:
            statistics: forget these too, not only what was not finite.
        """
        kept = {"run", "scale", "scales", "given"} if statistics else set(Numbers._fields) - _OF_BAD
        for name, value in Numbers._field_defaults.items():
            if name not in kept:
                self._slot(name).fill_(value)
        if statistics:
            self.peaks.zero_()
            self.frozen = 0


_OF_BAD = {"bad", "made", "after", "grad_bad", "handed_bad", "longest", "most_scales"}
_CAN_DIE = {"relu", "relu6", "threshold", "hardswish", "gelu", "silu", "swish", "mish"}


def can_die(module: nn.Module) -> bool:
    """Whether it is an activation that gives zeros on one side."""
    return type(module).__name__.lower() in _CAN_DIE


def _bounds(module: nn.Module) -> tuple[float, float] | None:
    """The bounds of an activation; of a ReLU6 none, as its zeros are what is dead or alive."""
    name = type(module).__name__.lower()
    if name == "relu6" or (isinstance(module, nn.Hardtanh) and name != "hardtanh"):
        return None
    return bounds_of(module)


def _magnitude(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """The largest magnitude, inf or NaN where any is; one read, in which no sum can overflow."""
    worst = torch.zeros((), dtype=like.dtype, device=like.device)
    for x in tensors:
        if x.numel():
            low, high = _readable(x).aminmax()
            worst = torch.maximum(worst, torch.maximum(high, -low).to(like))
    return worst


def _readable(x: Tensor) -> Tensor:
    """As a type that has an order: those of 8 bits have none."""
    return x.float() if x.element_size() == 1 else x


def _summed(x: Tensor) -> torch.dtype:
    """In which type squares are summed."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32
