"""Observers of statistics: of activations, of gradients and of parameters, by epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
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
)
from .units import CAPACITY, add_units, new_units, padded, zone_of


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
        histogram: the number of magnitudes below the first edge, between each two edges, and from
            the last edge on; of values that are finite and not zero.
        channels: the number of channels, where they are known.
        dead: channels that were exactly zero in every call.
        saturated: channels that were flat in every call.
        unwatched: why there is no `dead`, or no `saturated`.
        mean_shift: of a BatchNorm, the distance of its running mean from the mean of the batches
            that were looked at, in running standard deviations; the mean over its channels.
        variance_shift: the logarithm of the ratio of both variances, without its sign; the mean
            over its channels. To each variance the layer's eps is added.
        change: of `WeightStats`, the norm divided by that at the start of the epoch, minus 1.
    """

    calls: int = 0
    left_out: int = 0
    values: int = 0
    mean: float | None = None
    std: float | None = None
    rms: float | None = None
    largest: float | None = None
    norm: float | None = None
    looked: int = 0
    zeros: float | None = None
    nonfinite: float | None = None
    histogram: tuple[int, ...] = ()
    channels: int | None = None
    dead: int | None = None
    saturated: int | None = None
    unwatched: str = ""
    mean_shift: float | None = None
    variance_shift: float | None = None
    change: float | None = None

    def scalars(self) -> dict[str, float]:
        """Return what is logged, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        counted = ("left_out", "dead", "saturated")
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, float) or (name in counted and value is not None)
        }


def statistics_of(state: State, **others: Any) -> Statistics:
    """Return the sums of a state as `Statistics`; `others` are fields of it."""
    sums, calls, looked = state["sums"].tolist(), state["calls"], state["looked"]
    values = int(sums[COUNT])
    mean = std = rms = norm = None
    if values:
        mean, square = sums[SUM] / values, sums[SQUARES] / values
        rms, std = math.sqrt(square), math.sqrt(max(square - mean * mean, 0.0))
    if sums[KEPT]:
        norm = sums[NORMS] / sums[KEPT]
    found = {
        "calls": calls,
        "left_out": calls - int(sums[KEPT]),
        "values": values,
        "mean": mean,
        "std": std,
        "rms": rms,
        "largest": state["largest"].item() if values else None,
        "norm": norm,
        "looked": looked,
        "zeros": sums[ZEROS] / looked if looked else None,
        "nonfinite": sums[NONFINITE] / looked if looked else None,
        "histogram": tuple(map(int, sums[BINS:])),
    }
    return Statistics(**{**found, **others})


@dataclass(frozen=True, repr=False)
class Measuring(Observer):
    """Moments at every call; shares of zeros and a histogram of magnitudes at every n-th call.

    Args:
        every: zeros, values that are not finite and the histogram are counted at each n-th call of
            an epoch, the first included.
        low, high: the bounds of the histogram of magnitudes, from 1e-30 to 1e30. Its bins are
            octaves: the bounds are rounded down and up to powers of 2. Magnitudes below and beyond
            them are counted in two more bins.
    """

    every: int = 10
    low: float = 1e-8
    high: float = 1e4

    def check(self, values: Mapping[str, float]) -> None:
        super().check(values)
        as_count("every", self.every)
        low, high = as_number("low", self.low), as_number("high", self.high)
        if not 1e-30 <= low < high <= 1e30:
            raise ValueError(
                "the bounds of the histogram must be 1e-30 <= low < high <= 1e30, got "
                f"low={shown(self.low)}, high={shown(self.high)}"
            )

    @property
    def octaves(self) -> tuple[int, int]:
        """The first and the last of `edges`, as powers of 2."""
        return math.floor(math.log2(self.low)), math.ceil(math.log2(self.high))

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of the bins, rising."""
        first, last = self.octaves
        return tuple(2.0**octave for octave in range(first, last + 1))

    def start(self) -> State:
        return new_moments(self.octaves)

    def update(self, state: State, seen: Seen) -> None:
        x = seen.tensor.to_dense() if seen.tensor.is_sparse else seen.tensor
        add_moments(state, x, seen.scale)
        if state["calls"] % self.every == 0:
            add_shares(state, x, self.octaves, seen.scale)

    def compute(self, state: State) -> Any:
        return statistics_of(state)

    def merge(self, a: State, b: State) -> State:
        return {**super().merge(a, b), "largest": torch.maximum(a["largest"], b["largest"])}

    def headings(self) -> tuple[str, Columns[Any]]:
        return self.note(), dict(_MOMENTS)

    def note(self) -> str:
        """Return the line above the rows: what the columns are taken from."""
        every = "" if self.every == 1 else f"{_ordinal(self.every)} "
        return f"{self.label}: this epoch; zeros, nan/inf: every {every}call"


@register
class ActivationStats(Measuring):
    """Mean, deviation, largest magnitude and norm of what a layer gives, by epoch; dead channels.

    Nothing waits for the device until the report is asked for. A call with a value that is not
    finite is counted, but left out of the moments.

    A channel is dead if it was exactly zero in every call of the epoch. It is saturated if all its
    values were flat: within 1 % of the bounds of Sigmoid, Tanh, Hardsigmoid, Softsign, Hardtanh or
    ReLU6, or on the flat negative side of Hardswish. If a regularizer of this layer changes these
    values (Dropout, say), use ``when="before"``.

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
        return {**super().start(), **new_units(), "zone": None, "unwatched": ""}

    def reads_given(self, module: nn.Module) -> bool:
        return is_batch_norm(module)

    def look(self, state: State, module: nn.Module, parameter: str | None) -> None:
        zone = state["zone"] = zone_of(module) if self.at == "output" else None
        kind = type(module).__name__
        of = kind if self.at == "output" else f"what {kind} is given"
        state["unwatched"] = "" if zone else f"{of} has no known bounds"
        if is_batch_norm(module):
            look_at_running(state, module)

    def update(self, state: State, seen: Seen) -> None:
        super().update(state, seen)
        mapped = seen.channels_first()
        if mapped is not None:
            add_units(state, mapped, state["zone"])
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
        alive, moved, channels = state["alive"], state["moved"], len(state["alive"])
        mean_shift, variance_shift = shifts(state)
        shifted = {"mean_shift": mean_shift, "variance_shift": variance_shift}
        if not 0 < channels <= CAPACITY:
            more = f"its channels are {channels}, more than {CAPACITY}"
            unwatched = more if channels else "its channels are not known"
            return statistics_of(state, unwatched=unwatched, **shifted)
        return statistics_of(
            state,
            channels=channels,
            dead=int((~alive).sum()),
            saturated=int((~moved).sum()) if state["zone"] else None,
            unwatched=state["unwatched"],
            **shifted,
        )

    def headings(self) -> tuple[str, Columns[Any]]:
        return f"{self.note()}; dead, saturated: channels, always so", {**_MOMENTS, **_UNITS}


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
class WeightStats(Observer):
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

    octaves: ClassVar[tuple[int, int]] = (-27, 14)
    edges: ClassVar[tuple[float, ...]] = tuple(2.0**octave for octave in range(-27, 15))
    """The edges of the bins of its histogram."""

    def start(self) -> State:
        return new_moments(self.octaves)

    def look(self, state: State, module: nn.Module, parameter: str | None) -> None:
        parameters = list(_parameters(module, parameter))
        state.update(new_moments(self.octaves), calls=len(parameters))
        for each in parameters:
            state.update(on_device(state, each.device))
            add_moments(state, each.detach())
            add_shares(state, each.detach(), self.octaves)
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
        return statistics_of(state, norm=norm, change=change)

    def merge(self, a: State, b: State) -> State:
        """Ranks hold the same parameters: return the state of the first one."""
        return a

    def headings(self) -> tuple[str, Columns[Any]]:
        note = f"{self.label}: of now; change: of the norm in this epoch, relative"
        return note, {**_MOMENTS, "change": lambda s: _short(s.change)}


def _parameters(module: nn.Module, name: str | None) -> Iterator[Tensor]:
    """The layer's own parameters, or the one of this name, as far as they hold numbers."""
    if shard_refusal(module) is not None:
        return
    for key, each in module._parameters.items():
        if each is None or type(each) not in (Tensor, nn.Parameter) or each.is_meta:
            continue
        if key == (name or key) and each.is_floating_point():
            yield each


def _ordinal(n: int) -> str:
    """As in ``3rd``."""
    teen = n // 10 % 10 == 1
    return f"{n}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def _short(value: float | None) -> str | None:
    """A number in three digits: there are many in a row."""
    return None if value is None else f"{value:.3g}"


def _share(count: int | None, s: Statistics) -> Any:
    if count is None:
        return Forms((f"- ({s.unwatched})", "-")) if s.unwatched else None
    return Forms((f"{count} of {s.channels}", str(count)))


def _running(s: Statistics) -> str:
    if s.mean_shift is None or s.variance_shift is None:
        return ""
    return f"{s.mean_shift:.2g}, {s.variance_shift:.2g}"


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
