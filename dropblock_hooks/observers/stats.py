"""Observers of statistics: of activations, of gradients and of parameters, by epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..checks import as_count, as_number
from ..quoting import shown
from ..registry import register
from ..selectors.wrappers import shard_refusal
from ..tables import Columns, Forms
from .base import Observer, Seen, State, on_device
from .batch_norm import add_batch, is_batch_norm, look_at_running, shifts
from .moments import (
    BINS,
    COUNT,
    KEPT,
    NONFINITE,
    NORMS,
    SQUARES,
    SUM,
    ZEROS,
    add_moments,
    add_shares,
    new_moments,
    octaves,
)
from .units import add_units, bounds_of, new_units, padded


@dataclass(frozen=True)
class Statistics:
    """What was seen in an epoch. None where there is nothing to compute it from.

    Attributes:
        calls: the number of calls; of `WeightStats`, of parameters.
        left_out: calls with a value that is not finite. They are left out of the values up to
            `norm`.
        values: the number of values.
        mean, std, rms: of all values; the deviation is that of the population, and rough below
            1e-4 of the mean.
        largest: the largest magnitude.
        norm: the norm of one call, its mean over the calls; of `WeightStats`, that of all values.
        looked: the number of values in the calls of which the following was taken (``every``).
        zeros: the share of values that are exactly zero.
        nonfinite: the share that is NaN or infinite.
        histogram: the number of magnitudes below the first of the observer's ``edges``, between
            each two edges, and from the last edge on; of values that are finite and not zero.
        channels: the number of channels; None where it is not known which axis they are on.
        dead: channels that were exactly zero in every call.
        saturated: channels whose values were all near the bounds of the activation in every call;
            None where the layer has no known bounds.
        mean_shift: of a BatchNorm, the distance of its running mean from the mean of the batches
            that were looked at, in running standard deviations; the mean over its channels.
        variance_shift: the logarithm of the ratio of both variances, without its sign; the mean
            over its channels. To each variance the layer's eps is added.
        change: of `WeightStats`, the norm divided by that at the start of the epoch, minus 1.
    """

    calls: int
    left_out: int
    values: int
    looked: int
    histogram: tuple[int, ...]
    mean: float | None = None
    std: float | None = None
    rms: float | None = None
    largest: float | None = None
    norm: float | None = None
    zeros: float | None = None
    nonfinite: float | None = None
    channels: int | None = None
    dead: int | None = None
    saturated: int | None = None
    mean_shift: float | None = None
    variance_shift: float | None = None
    change: float | None = None

    def scalars(self) -> dict[str, float]:
        """Return what is logged, by name."""
        counted = ("left_out", "dead", "saturated")
        return {
            name: value
            for name, value in asdict(self).items()
            if isinstance(value, float) or (name in counted and value is not None)
        }


class Moments(Observer):
    """Base: the sums of a window, which are told as `Statistics`."""

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of the bins of the histogram, rising."""
        return octaves(1e-8, 1e4)

    def start(self) -> State:
        return new_moments(self.edges)

    def compute(self, state: State) -> Statistics:
        sums, calls, looked = state["sums"].tolist(), state["calls"], state["looked"]
        values = int(sums[COUNT])
        mean, square = sums[SUM] / max(values, 1), sums[SQUARES] / max(values, 1)
        return Statistics(
            calls=calls,
            left_out=calls - int(sums[KEPT]),
            values=values,
            looked=looked,
            histogram=tuple(map(int, sums[BINS:])),
            mean=mean if values else None,
            std=math.sqrt(max(square - mean * mean, 0.0)) if values else None,
            rms=math.sqrt(square) if values else None,
            largest=state["largest"].item() if values else None,
            norm=sums[NORMS] / sums[KEPT] if sums[KEPT] else None,
            zeros=sums[ZEROS] / looked if looked else None,
            nonfinite=sums[NONFINITE] / looked if looked else None,
        )


@dataclass(frozen=True, repr=False)
class Measuring(Moments):
    """Moments at every call; shares of zeros and a histogram of magnitudes at every n-th call.

    Args:
        every: zeros, values that are not finite and the histogram are counted at each n-th call of
            an epoch, the first included.
        low, high: the bounds of the histogram of magnitudes, from 1e-30 to 1e30. Its bins are
            octaves: the bounds are rounded down and up to powers of 2.
    """

    every: int = 10
    low: float = 1e-8
    high: float = 1e4

    def check(self, values: Mapping[str, float]) -> None:
        super().check(values)
        as_count("every", self.every)
        if not 1e-30 <= as_number("low", self.low) < as_number("high", self.high) <= 1e30:
            raise ValueError(
                "the bounds of the histogram must be 1e-30 <= low < high <= 1e30, got "
                f"low={shown(self.low)}, high={shown(self.high)}"
            )

    @property
    def edges(self) -> tuple[float, ...]:
        return octaves(self.low, self.high)

    def update(self, state: State, seen: Seen) -> None:
        add_moments(state, seen.tensor, seen.scale)
        if state["calls"] % self.every == 0:
            add_shares(state, seen.tensor, self.edges, seen.scale)

    def merge(self, a: State, b: State) -> State:
        return {**super().merge(a, b), "largest": torch.maximum(a["largest"], b["largest"])}

    def headings(self) -> tuple[str, Columns[Any]]:
        return f"{self.label}: this epoch; zeros, nan/inf: 1 call in {self.every}", dict(_MOMENTS)


@register
class ActivationStats(Measuring):
    """Mean, deviation, largest magnitude and norm of what a layer gives, by epoch; dead channels.

    Nothing waits for the device until the report is asked for. A call with a value that is not
    finite is counted, but left out of the moments.

    A channel is dead if it was exactly zero in every call of the epoch. It is saturated if all its
    values were within 1 % of the bounds of Sigmoid, Tanh, Hardsigmoid, Softsign, Hardtanh or ReLU6.
    If a regularizer of this layer changes these values (Dropout, say), use ``when="before"``.

    For a BatchNorm, its running mean and variance are compared with those of the batches that were
    looked at (``every``).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from dropblock_hooks import ActivationStats, attach
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> attached = attach(model, {"1": ActivationStats()})
        >>> y = model(torch.zeros(4, 2))
        >>> seen = attached.report()[0].observed
        >>> seen.values, seen.channels
        (12, 3)
    """

    channelwise: ClassVar[bool] = True

    def start(self) -> State:
        return {**super().start(), **new_units(), "bounds": None}

    def reads_given(self, module: nn.Module) -> bool:
        return is_batch_norm(module)

    def look(self, state: State, module: nn.Module, parameter: str | None) -> None:
        state["bounds"] = bounds_of(module) if self.at == "output" else None
        look_at_running(state, module)

    def update(self, state: State, seen: Seen) -> None:
        super().update(state, seen)
        mapped = seen.channels_first()
        if mapped is not None:
            add_units(state, mapped, state["bounds"])
        if seen.given and seen.training and state["calls"] % self.every == 0:
            add_batch(state, seen.given[0])

    def merge(self, a: State, b: State) -> State:
        size = max(len(a["alive"]), len(b["alive"]))
        a, b = (
            {**each, **{name: padded(each[name], size) for name in ("alive", "moved")}}
            for each in (a, b)
        )
        kept: State = {name: a[name] for name in ("running", "eps") if name in a}
        return {**super().merge(a, b), **kept}

    def compute(self, state: State) -> Statistics:
        found = replace(super().compute(state), **shifts(state))
        channels = len(state["alive"])
        if not channels:
            return found
        return replace(
            found,
            channels=channels,
            dead=int((~state["alive"]).sum()),
            saturated=int((~state["moved"]).sum()) if state["bounds"] else None,
        )

    def headings(self) -> tuple[str, Columns[Any]]:
        note, columns = super().headings()
        return f"{note}; dead, saturated: channels, always so", {**columns, **_UNITS}


@register
class GradientStats(Measuring):
    """Mean, deviation, largest magnitude and norm of the gradient at a layer's output, by epoch.

    In the unit of the unscaled loss, after the bounds of its layer; ``when="before"`` as it
    arrived. On ``param:`` selectors, of the gradients of parameters, as each backward brings them:
    what has accumulated, and what acts on it when the optimizer steps, comes later than any `when`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from dropblock_hooks import GradientStats, attach
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> attached = attach(model, {"0": GradientStats()})
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> attached.report()[0].observed.values
        12
    """

    low: float = 1e-12

    acts_on: ClassVar[Literal["activation", "gradient"]] = "gradient"
    sees_values: ClassVar[bool] = False
    sees_gradients: ClassVar[bool] = True
    reads_grad_scale: ClassVar[bool] = True


@register
class WeightStats(Moments):
    """Mean, deviation, largest magnitude and norm of a layer's own parameters, all taken together.

    They are read when the epoch ends and when the report is asked for: a forward costs nothing, and
    the layer need not be called. On ``param:`` selectors, of one parameter alone. Parameters that
    FSDP shards are not read, because a process holds them whole only now and then.

    Example:
        >>> from torch import nn
        >>> from dropblock_hooks import WeightStats, attach
        >>> attached = attach(nn.Sequential(nn.Linear(2, 3)), {"0": WeightStats()})
        >>> attached.report()[0].observed.values
        9
    """

    acts_on: ClassVar[Literal["activation", "gradient"]] = "gradient"  # as what parameters take
    sees_values: ClassVar[bool] = False
    needs_calls: ClassVar[bool] = False

    def look(self, state: State, module: nn.Module, parameter: str | None) -> None:
        parameters = _parameters(module, parameter)
        state.update(new_moments(self.edges), calls=len(parameters))
        for each in parameters:
            state.update(on_device(state, each.device))
            add_moments(state, each.detach())
            add_shares(state, each.detach(), self.edges)
        kept, *_, square = state["sums"][: SQUARES + 1].tolist()
        state["square"] = square if kept == len(parameters) else math.nan
        state.setdefault("begun", state["square"])

    def is_empty(self, state: State) -> bool:
        return not state["calls"] or bool(state["square"] == state["begun"])

    def compute(self, state: State) -> Statistics:
        square, begun = state["square"], state["begun"]
        known = begun > 0 and math.isfinite(square)
        change = math.sqrt(square / begun) - 1 if known else None
        total = state["sums"][SQUARES].item()
        norm = math.sqrt(total) if state["sums"][KEPT] else None
        return replace(super().compute(state), norm=norm, change=change)

    def merge(self, a: State, b: State) -> State:
        """Ranks hold the same parameters: return the state of the first one."""
        return a

    def headings(self) -> tuple[str, Columns[Any]]:
        note = f"{self.label}: of now; change: of the norm in this epoch, relative"
        return note, {**_MOMENTS, "change": lambda s: _short(s.change)}


def _parameters(module: nn.Module, name: str | None) -> list[Tensor]:
    """The layer's own parameters, or the one of this name, as far as they hold numbers."""
    if shard_refusal(module) is not None:
        return []
    own = module._parameters if name is None else {name: module._parameters[name]}
    plain = [p for p in own.values() if p is not None and type(p) in (Tensor, nn.Parameter)]
    return [p for p in plain if p.is_floating_point() and not p.is_meta]


def _short(value: float | None) -> str | None:
    """A number in three digits: there are many in a row."""
    return None if value is None else f"{value:.3g}"


def _share(count: int | None, s: Statistics) -> Any:
    return None if count is None else Forms((f"{count} of {s.channels}", str(count)))


def _running(s: Statistics) -> str:
    return "" if s.mean_shift is None else f"{s.mean_shift:.2g}, {s.variance_shift:.2g}"


_MOMENTS: Columns[Any] = {
    "mean": lambda s: _short(s.mean),
    "std": lambda s: _short(s.std),
    "largest": lambda s: _short(s.largest),
    "norm": lambda s: _short(s.norm),
    "zeros": lambda s: _short(s.zeros),
    "nan/inf": lambda s: _short(s.nonfinite),
}
_UNITS: Columns[Any] = {
    "dead": lambda s: _share(s.dead, s),
    "saturated": lambda s: _share(s.saturated, s),
    "running": _running,
}
