"""Observers of statistics: of activations, of gradients and of parameters, by epoch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from .._torch import foreach_norm, parameters_of
from ..checks import Range, as_count, as_number
from ..functional.masks import wide_dtype
from ..functional.measures import (
    BINS,
    CALLS,
    COUNT,
    KEPT,
    LARGEST,
    LOOKED,
    NONFINITE,
    NORMS,
    SQUARES,
    SUM,
    SUMS,
    ZEROS,
    add_alive,
    add_batch,
    add_measured,
    add_moments,
    add_shares,
    alive_in_either,
    octaves,
)
from ..registry import register
from ..selectors.wrappers import shard_refusal
from ..tables import Columns, Short
from .base import Compiled, Observer, Seen, State, Unsaved, on_device

_BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


@dataclass(frozen=True)
class Statistics:
    """The statistics of an epoch. None without values to compute it from."""

    calls: int  # those that were measured; for `WeightStats`, the number of parameters
    left_out: int  # of them, those with NaN or Inf, which are not in `values` to `norm`
    values: int  # the number of values
    histogram: tuple[int, ...]  # the number of magnitudes below, between and above the ``edges``
    mean: float | None = None
    std: float | None = None  # of the population; rough below 1e-4 of the mean
    rms: float | None = None
    largest: float | None = None  # the largest magnitude
    norm: float | None = None  # the mean norm of a call; for `WeightStats`, of all values
    zeros: float | None = None  # the share of values that are zero in float32
    nonfinite: float | None = None  # the share of values that are NaN or Inf in float32
    channels: int | None = None  # their number, if their axis is known
    dead: int | None = None  # channels that were exactly zero in every measured call
    # of a BatchNorm, means over channels: |mean of batches - running mean| / running deviation,
    # and |log(variance of batches / running variance)|; with the eps of the layer
    mean_shift: float | None = None
    variance_shift: float | None = None
    norms: Mapping[str, float] = field(default_factory=dict)  # of `WeightStats`, by parameter
    # the norm of the change of each parameter since the epoch began, divided by its norm then
    updates: Mapping[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """Return the numbers for a logger, by name."""
        named = vars(self).items()
        found = {name: x for name, x in named if isinstance(x, float) or name == "left_out"}
        if self.dead is not None:
            found["dead"] = self.dead
        found |= {f"norm/{name}": norm for name, norm in self.norms.items()}
        return found | {f"update/{name}": update for name, update in self.updates.items()}


def _new_sums(edges: Sequence[float]) -> State:
    """Return an empty state, with a bin between each two edges and one beyond each end."""
    return {
        "sums": torch.zeros(BINS + len(edges) + 1, dtype=torch.float64),
        "largest": torch.zeros((), dtype=torch.float64),
        "looked": 0,  # the number of values in all measured calls
    }


def _statistics(state: State) -> Statistics:
    sums, calls, looked = state["sums"].tolist(), state["calls"], state["looked"]
    kept, values = int(sums[KEPT]), int(sums[COUNT])
    found = Statistics(calls, calls - kept, values, tuple(map(int, sums[BINS:])))
    if kept:
        found = replace(found, norm=sums[NORMS] / kept)
    if looked:
        found = replace(found, zeros=sums[ZEROS] / looked, nonfinite=sums[NONFINITE] / looked)
    if values:
        mean, square = sums[SUM] / values, sums[SQUARES] / values
        std, largest = math.sqrt(max(square - mean * mean, 0.0)), state["largest"].item()
        found = replace(found, mean=mean, std=std, rms=math.sqrt(square), largest=largest)
    return found


def _dead(s: Statistics) -> str | None:
    return None if s.dead is None else f"{s.dead} of {s.channels}"


def _running(s: Statistics) -> str:
    return "" if s.mean_shift is None else f"{s.mean_shift:.2g}, {s.variance_shift:.2g}"


def _updates(s: Statistics) -> Short:
    short = ", ".join(f"{update:.2g}" for update in s.updates.values())
    return Short(short, ", ".join(f"{name} {update:.2g}" for name, update in s.updates.items()))


_MOMENTS: Columns[Any] = {
    **{name: attrgetter(name) for name in ("mean", "std", "largest", "norm", "zeros")},
    "nan/inf": attrgetter("nonfinite"),
}


@dataclass(frozen=True, repr=False)
class Measuring(Observer):
    """Moments, shares of zeros and a histogram of magnitudes, of every n-th call.

    Args:
        every: measure each n-th call of an epoch, the first included; at least 1. In eager mode,
            the other calls start no operator of torch. 1 measures each call.
        low: lower bound of the histogram of magnitudes, at least 1e-30, rounded down to a power of
            2. Its bins are octaves.
        high: upper bound of the histogram, above `low`, at most 1e30; rounded up to a power of 2.
    """

    every: int = 10
    low: float = 1e-8
    high: float = 1e4

    columns: ClassVar[Columns[Any]] = _MOMENTS
    traced: ClassVar[bool] = True

    def check(self, values: Mapping[str, float]) -> None:
        super().check(values)
        as_count("every", self.every)
        low = as_number("low", self.low, allowed=Range(1e-30, 1e30))
        as_number("high", self.high, allowed=Range(low, 1e30, open_low=True))

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of the bins of the histogram, rising."""
        return octaves(*self.exponents)

    @property
    def exponents(self) -> tuple[int, int]:
        """The exponents of 2 where the histogram begins and ends."""
        return math.floor(math.log2(self.low)), math.ceil(math.log2(self.high))

    def start(self) -> State:
        return _new_sums(self.edges)

    def is_due(self, state: State, turn: int, training: bool, shared: dict[str, Any]) -> bool:
        return turn % self.every == 0

    def update(self, state: State, seen: Seen) -> None:
        add_measured(state, seen.tensor, seen.scale, self.exponents)

    def compute(self, state: State) -> Statistics:
        return _statistics(state)

    def merge(self, a: State, b: State) -> State:
        return {**super().merge(a, b), "largest": torch.maximum(a["largest"], b["largest"])}

    def start_compiled(self) -> list[float]:
        return [0.0] * (SUMS + BINS + len(self.edges) + 1)

    def compiled_numbers(self, state: State) -> list[int]:
        return [self.every, *self.exponents]

    def take_compiled(self, state: State, counted: Compiled) -> int:
        values = counted.values
        calls = round(values[CALLS])
        measured = math.ceil(calls / self.every)
        state["calls"] += measured
        state["looked"] += round(values[LOOKED])
        sums = state["sums"]
        sums += torch.tensor(values[SUMS:], dtype=sums.dtype, device=sums.device)
        state["largest"].clamp_(min=values[LARGEST])
        if counted.alive is not None:
            state["alive"] = alive_in_either(state.get("alive"), counted.alive)
        if counted.batches is not None:
            state["batches"] = counted.batches + state.get("batches", 0.0)
        return calls if self.sees_values else measured


@register
class ActivationStats(Measuring):
    """Mean, deviation, largest magnitude and norm of the output of a layer by epoch; dead channels.

    Use it on activation functions, norms and blocks. It measures each n-th call (`every`), and does
    not wait for the device. Calls with NaN or Inf are left out of the moments. A channel is dead if
    it was exactly zero in all measured calls. The running statistics of a BatchNorm are compared
    with the batches of these calls.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> attached = attach(model, {"1": ActivationStats()})
        >>> y = model(torch.zeros(4, 2))
        >>> seen = attached.report()[0].observed
        >>> seen.values, seen.channels
        (12, 3)
    """

    channelwise: ClassVar[bool] = True
    reads_given: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    columns: ClassVar[Columns[Any]] = {**_MOMENTS, "dead\nchannels": _dead, "running": _running}

    def look(self, state: State, module: nn.Module, parameter: str | None) -> None:
        layer: Any = module
        is_norm = isinstance(module, _BATCH_NORMS)
        if is_norm and type(layer.running_mean) is Tensor and not layer.running_mean.is_meta:
            given = layer.running_mean, layer.running_var
            mean, variance = (x.to("cpu", torch.float64, copy=True) for x in given)
            state["running"] = mean, variance + layer.eps, layer.eps

    def update(self, state: State, seen: Seen) -> None:
        super().update(state, seen)
        mapped = seen.channels_first()
        if mapped is not None:
            add_alive(state, mapped)
        if "running" in state and seen.training:
            batches = add_batch(state.get("batches", 0.0), seen.given[0])
            if isinstance(batches, Tensor):
                state["batches"] = batches

    def finds_dead(self, state: State) -> bool:
        return True

    def compute(self, state: State) -> Statistics:
        found = _statistics(state)
        if "alive" in state:
            alive = state["alive"]
            found = replace(found, channels=len(alive), dead=int((~alive).sum()))
        if "batches" in state:
            mean, variance, _ = state["batches"] / state["batches"][-1]
            running_mean, running_variance, eps = state["running"]
            of_mean = (mean - running_mean).abs() / running_variance.sqrt()
            of_variance = ((variance + eps) / running_variance).log().abs()
            shifts = of_mean.mean().item(), of_variance.mean().item()
            found = replace(found, mean_shift=shifts[0], variance_shift=shifts[1])
        return found


@register
class GradientStats(Measuring):
    """Mean, deviation, largest magnitude and norm of the gradient at a layer's output, by epoch.

    Use it to find vanishing and exploding gradients. They are gradients of the unscaled loss, after
    the gradient regularizers of the layer; with ``when="before"``, as they arrived. With a
    ``param:`` selector, they are a parameter's in each backward, before they accumulate.

    Example:
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

    For each parameter also its norm and its update: the norm of its change since the epoch began,
    divided by its norm then; a copy of the parameters is held for this. Use it to find layers that
    learn too fast, or not at all. Parameters are read at the end of an epoch and for a report, so
    the layer need not be called. Of a module without parameters of its own, those inside it are
    read; with a ``param:`` selector only this parameter; none that FSDP shards.

    Example:
        >>> attached = attach(nn.Sequential(nn.Linear(2, 3)), {"0": WeightStats()})
        >>> seen = attached.report()[0].observed
        >>> seen.values, list(seen.norms), seen.updates
        (9, ['weight', 'bias'], {'weight': 0.0, 'bias': 0.0})
    """

    acts_on: ClassVar[Literal["activation", "gradient"]] = "gradient"  # as what parameters take
    sees_values: ClassVar[bool] = False
    needs_calls: ClassVar[bool] = False
    columns: ClassVar[Columns[Any]] = {**_MOMENTS, "updates\nrelative": _updates}
    edges: ClassVar[tuple[float, ...]] = GradientStats(low=1e-8).edges

    def start(self) -> State:
        return {**_new_sums(self.edges), "began": Unsaved()}

    def look(self, state: State, module: nn.Module, parameter: str | None) -> None:
        found = _parameters(module, parameter)
        state.update(_new_sums(self.edges), calls=len(found), moved=False, norms={}, updates={})
        began: list[Tensor] = []
        for name, x in found.items():
            state.update(on_device(state, x.device))
            add_moments(state, x)
            add_shares(state, x.float(), self.edges)
            began.append(state["began"].setdefault(name, x.clone()).to(x.device))
        for name, (norm, change, before) in zip(found, _norms(found, began), strict=True):
            state["moved"] |= bool(change)  # true for NaN
            update = change / before if before else math.nan
            for key, value in ("norms", norm), ("updates", update):
                if math.isfinite(value):
                    state[key][name] = value

    def is_empty(self, state: State) -> bool:
        return not state["moved"]

    def compute(self, state: State) -> Statistics:
        found = _statistics(state)
        whole = None if found.rms is None else found.rms * math.sqrt(found.values)
        return replace(found, norm=whole, norms=state["norms"], updates=state["updates"])

    def merge(self, a: State, b: State) -> State:
        return a  # ranks hold the same parameters


def _norms(found: Mapping[str, Tensor], began: Sequence[Tensor]) -> list[list[float]]:
    """The norms of each parameter, of its change and of what it was; they are read at once."""
    if not found:
        return []
    values = list(found.values())
    changes = [x - before for x, before in zip(values, began, strict=True)]
    device = values[0].device
    dtype = wide_dtype(device)
    norms = foreach_norm([*values, *changes, *began], 2.0, dtype)
    rows = torch.stack([norm.to(device) for norm in norms]).view(3, -1)
    columns: list[list[float]] = rows.t().tolist()
    return columns


def _parameters(module: nn.Module, name: str | None) -> dict[str, Tensor]:
    """The parameter of this name, or the layer's own parameters, or else those inside it."""
    if shard_refusal(module) is not None:
        return {}
    own = parameters_of(module) if name is None else {name: getattr(module, name)}
    named: dict[str, Any] = dict(own or module.named_parameters())
    # other classes may hold parts, or wait for other processes
    plain = {name: p.detach() for name, p in named.items() if type(p) in (Tensor, nn.Parameter)}
    return {name: x for name, x in plain.items() if x.is_floating_point() and not x.is_meta}
