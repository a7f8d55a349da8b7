"""The state of the sites of a `Watchdog`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.masks import wide_dtype
from .base import Seen
from .channels import NEAR, add_units, bounds_of

_MOST_UNREAD = 4096
_INF = math.inf
_ZERO = 1e-12  # the largest magnitude of a channel that counts as zero
_CAN_DIE = {"relu", "relu6", "threshold", "hardswish", "gelu", "silu", "swish", "mish"}


@dataclass
class Clock:
    """What all sites of an attachment share.

    Attributes:
        time: the number of calls and gradients that all sites have seen. It orders them.
        forwards, steps: training forwards, and calls of ``step``, since attaching.
        alerts: the findings that still hold, by site and rule.
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
    """The counts of a site of a `Watchdog` since the last look. Times are times of the `Clock`.

    Numbers on the CPU are read at once, numbers on other devices at the next look.

    Attributes:
        at: the time of the last call.
        can_die: whether the rule ``dead`` looks at this layer.
        bounds: the bounds of the activation, if the rule ``saturated`` looks at this layer.
        bad: the time of the first output with NaN or Inf; inf for never.
        made: the time of the first such output of a finite input.
        grad_bad: the time of the first gradient with NaN or Inf.
        calls, bad_calls: the number of calls, and of outputs with NaN or Inf.
        grads: the number of gradients.
        norm: the sum of the finite gradient norms, in units of the unscaled loss.
        first, last: the first and the last of these norms, without zeros; 0 before any.
        near: the sum over calls of the share of values at the bounds.
        units: the flags of `add_units`.
    """

    def __init__(self) -> None:
        self.at = 0
        self.can_die = False
        self.bounds: tuple[float, float] | None = None
        self._unread: list[tuple[bool, int, tuple[Tensor, ...]]] = []
        self.forget(statistics=True)

    def forget(self, statistics: bool) -> None:
        """Forget values that were not finite, and with `statistics` all counts and sums."""
        self.bad = self.made = self.grad_bad = _INF
        if statistics:
            self.calls = self.bad_calls = self.grads = 0
            self.norm = self.first = self.last = 0.0
            self.near: Tensor | float = 0.0
            with torch.device("cpu"):
                self.units = {"alive": torch.zeros(0, dtype=torch.bool)}

    def look(self, module: nn.Module, rules: Sequence[str]) -> None:
        """Find out which rules look at this layer."""
        name = type(module).__name__.lower()
        self.can_die = "dead" in rules and name in _CAN_DIE
        # the bound of a ReLU6 at 0 is where its dead channels are
        relu = name == "relu6" or (isinstance(module, nn.Hardtanh) and name != "hardtanh")
        self.bounds = bounds_of(module) if "saturated" in rules and not relu else None

    def see(self, seen: Seen) -> None:
        """Add one call of the layer."""
        time = self.at = Clock.of(seen.shared).tick()
        self.calls += 1
        worst = _largest_norm(seen.tensors)
        if worst is None:
            return
        if worst.device.type != "cpu" or not worst < _INF:  # otherwise there is nothing to note
            # -inf counts in the first argument only: masks of attention hold it
            masks = [x.float().amax().clamp(min=0) for x in seen.given[1:] if x.numel()]
            given = _largest_norm([*seen.given[:1], *masks])
            self._note(False, time, worst, *([] if given is None else [given.to(worst.device)]))
        x = seen.tensor
        if self.can_die and x.ndim > 1 and x.numel():
            mapped = seen.channels_first()
            mapped = x.movedim(-1 if x.ndim != 4 else 1, 1) if mapped is None else mapped
            add_units(self.units, mapped, None, _ZERO)
        if self.bounds is not None and x.numel():
            lower, upper = self.bounds
            edge = NEAR * (upper - lower)
            at_bounds = (x < lower + edge) | (x > upper - edge)
            self.near = self.near + at_bounds.mean(dtype=torch.float32)

    def see_gradient(self, seen: Seen) -> None:
        """Add one gradient."""
        if seen.tensor.numel():
            self.grads += 1
            time = Clock.of(seen.shared).tick()
            self._note(True, time, _norm(seen.tensor) / seen.scale)

    def _note(self, gradient: bool, time: int, *numbers: Tensor) -> None:
        """Note the largest norms of an output and of its input, or the norm of a gradient."""
        self._unread.append((gradient, time, numbers))
        if numbers[0].device.type == "cpu" or len(self._unread) >= _MOST_UNREAD:
            self.read()

    def read(self) -> None:
        """Count what was noted. A device is waited for."""
        unread, self._unread = self._unread, []
        flat = [x.to(wide_dtype(x.device)) for *_, numbers in unread for x in numbers]
        # reading two numbers is faster than stacking them
        values = iter(torch.stack(flat).tolist() if len(flat) > 2 else map(float, flat))
        for gradient, time, numbers in unread:
            number, *given = [next(values) for _ in numbers]
            if gradient and number < _INF:
                self.norm += number
                self.first, self.last = self.first or number, number or self.last
            elif gradient:
                self.grad_bad = min(self.grad_bad, time)
            elif not number < _INF:
                self.bad_calls += 1
                self.bad = min(self.bad, time)
                if not given or given[0] < _INF:
                    self.made = min(self.made, time)


def _largest_norm(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a number that is finite if all values are; None of no values."""
    norms = [_norm(x) for x in tensors if x.numel()]
    return torch.stack([norm.to(norms[0]) for norm in norms]).amax() if norms else None


def _norm(x: Tensor) -> Tensor:
    """Return the norm; it is finite if all values are, whose squares may not fit into float32."""
    x = x.float() if x.element_size() == 1 else x
    norm: Tensor
    if x.device.type == "cpu" and x.dtype is not torch.float64:
        norm = torch.linalg.vector_norm(x, dtype=torch.float32)  # several times as fast
        if norm < _INF:
            return norm
    norm = torch.linalg.vector_norm(x, dtype=wide_dtype(x.device))
    return norm
