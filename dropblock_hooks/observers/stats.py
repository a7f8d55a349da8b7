"""Observers of statistics: of activations, of gradients and of parameters, by epoch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import foreach_norm, is_part_of_flat, parameters_of
from ..checks import Range, as_count, as_number
from ..functional.masks import wide_dtype
from ..functional.measures import (
    ALL_VALUES,
    BINS,
    CALLS,
    COUNT,
    KEPT,
    LARGEST,
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
from ..functional.outliers import (
    add_outliers,
    add_tails_to,
    combined_moments,
    kurtosis,
    new_outliers,
    new_tails,
    peak_ratio,
)
from ..functional.residual import add_squares, branch_ratio, new_branch
from ..registry import register
from ..selectors.wrappers import is_distributed, whole_value
from ..tables import Columns, Short
from .base import NO_PAUSE, Compiled, Observer, Pause, Seen, State, Unsaved, on_device

_BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


@dataclass(frozen=True)
class Statistics:
    """The statistics of an epoch. A field without values to compute it from has the value None."""

    calls: int  # the measured calls; for `WeightStats`, the number of parameters
    # measured calls with NaN or Inf, which `values` and the fields from `mean` to `norm` omit
    left_out: int
    values: int  # the number of values
    # the number of finite magnitudes other than 0 below, between and above the ``edges`` of the
    # observer, in all measured calls
    histogram: tuple[int, ...]
    mean: float | None = None
    std: float | None = None  # population deviation; inexact if it is below 1e-4 of the mean
    rms: float | None = None
    largest: float | None = None  # the largest magnitude
    norm: float | None = None  # the mean norm of a call; for `WeightStats`, of all values
    zeros: float | None = None  # the share of values that are zero in float32
    nonfinite: float | None = None  # the share of values that are NaN or Inf in float32
    channels: int | None = None  # their number, if their axis is known
    dead: int | None = None  # channels that were exactly zero in every measured call
    # with `ActivationStats(outliers=True)`:
    kurtosis: float | None = None  # 3 for normal values
    outliers: float | None = None  # the share of values beyond 6 deviations of their call
    peak_ratio: float | None = None  # the largest magnitude of a channel over the median channel's
    # for `ActivationStats(residual=True)`: rms(output - input) / rms(input)
    residual: float | None = None
    # for a BatchNorm, means over channels; the variances include the eps of the layer:
    mean_shift: float | None = None  # |mean of batches - running mean| / running deviation
    variance_shift: float | None = None  # |log(variance of batches / running variance)|
    norms: Mapping[str, float] = field(default_factory=dict)  # for `WeightStats`, by parameter
    # the norm of the change of each parameter since the epoch began, divided by its norm then;
    # without the parameters that were zero then
    updates: Mapping[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """Return the numbers for a logger, by name."""
        numbers: dict[str, float] = {}
        for name, value in vars(self).items():
            if isinstance(value, float) or name == "left_out":
                numbers[name] = value
        if self.dead is not None:
            numbers["dead"] = self.dead
        for name, norm in self.norms.items():
            numbers[f"norm/{name}"] = norm
        for name, update in self.updates.items():
            numbers[f"update/{name}"] = update
        return numbers


def _new_sums(edges: Sequence[float]) -> State:
    """Return an empty state, with a bin between each two edges and one beyond each end."""
    length = BINS + len(edges) + 1
    return {
        "sums": torch.zeros(length, dtype=torch.float64),
        "largest": torch.zeros((), dtype=torch.float64),
        "all_values": 0,  # the number of values in all measured calls
    }


def _statistics(state: State) -> Statistics:
    """Return the statistics that the sums of a state give."""
    sums = state["sums"].tolist()
    calls = state["calls"]
    all_values = state["all_values"]
    kept = int(sums[KEPT])
    values = int(sums[COUNT])
    histogram = map(int, sums[BINS:])

    statistics = Statistics(
        calls=calls,
        left_out=calls - kept,
        values=values,
        histogram=tuple(histogram),
    )
    if kept:
        norm = sums[NORMS] / kept
        statistics = replace(statistics, norm=norm)
    if all_values:
        zeros = sums[ZEROS] / all_values
        nonfinite = sums[NONFINITE] / all_values
        statistics = replace(statistics, zeros=zeros, nonfinite=nonfinite)
    if values:
        mean = sums[SUM] / values
        mean_square = sums[SQUARES] / values
        variance = max(mean_square - mean * mean, 0.0)
        statistics = replace(
            statistics,
            mean=mean,
            std=math.sqrt(variance),
            rms=math.sqrt(mean_square),
            largest=state["largest"].item(),
        )
    return statistics


def _dead(s: Statistics) -> str | None:
    """Write the cell of dead channels. A table prints None as ``-``."""
    if s.dead is None:
        return None
    return f"{s.dead} of {s.channels}"


def _running(s: Statistics) -> str:
    """Write the cell of the shifts of a BatchNorm."""
    if s.mean_shift is None:
        return ""
    return f"{s.mean_shift:.2g}, {s.variance_shift:.2g}"


def _updates(s: Statistics) -> Short:
    """Write the cell of the updates: without names if it is too long."""
    texts = []
    named = []
    for name, update in s.updates.items():
        text = f"{update:.2g}"
        texts.append(text)
        named.append(f"{name} {text}")
    return Short(", ".join(texts), ", ".join(named))


_COLUMNS: Columns[Any] = {
    "mean": attrgetter("mean"),
    "std": attrgetter("std"),
    "largest": attrgetter("largest"),
    "norm": attrgetter("norm"),
    "zeros": attrgetter("zeros"),
    "nan/inf": attrgetter("nonfinite"),
}


def _if_measured(name: str) -> Callable[[Statistics], Any]:
    """Make the cell of a number that only some sites have. A table leaves an empty column out."""

    def cell(s: Statistics) -> Any:
        number = getattr(s, name)
        return "" if number is None else number

    return cell


@dataclass(frozen=True, repr=False)
class Measuring(Observer):
    """Moments, shares of zeros and a histogram of magnitudes, of every n-th call."""

    every: int = 10
    low: float = 1e-8
    high: float = 1e4

    columns: ClassVar[Columns[Any]] = _COLUMNS
    traced: ClassVar[bool] = True

    def check(self, values: Mapping[str, float]) -> None:
        super().check(values)
        as_count("every", self.every)
        magnitudes = Range(1e-30, 1e30)
        low = as_number("low", self.low, allowed=magnitudes)
        high = as_number("high", self.high, allowed=magnitudes)
        if high <= low:
            raise ValueError(f"high must be above low, got low={low:g}, high={high:g}")

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of the bins of the histogram, rising."""
        return octaves(*self.exponents)

    @property
    def exponents(self) -> tuple[int, int]:
        """The exponents of 2 where the histogram begins and ends."""
        first = math.floor(math.log2(self.low))
        last = math.ceil(math.log2(self.high))
        return first, last

    def start(self) -> State:
        return _new_sums(self.edges)

    def is_due(self, state: State, turn: int, training: bool, shared: dict[str, Any]) -> bool:
        return turn % self.every == 0

    def pause_at(self, state: State, turn: int, shared: dict[str, Any]) -> Pause:
        calls_before_due = -turn % self.every
        return Pause(turn + calls_before_due)

    def update(self, state: State, seen: Seen) -> None:
        add_measured(state, seen.tensor, seen.scale, self.exponents)

    def compute(self, state: State) -> Statistics:
        return _statistics(state)

    def merge(self, a: State, b: State) -> State:
        merged = super().merge(a, b)
        merged["largest"] = torch.maximum(a["largest"], b["largest"])
        return merged

    def start_compiled(self) -> list[float]:
        length = SUMS + BINS + len(self.edges) + 1
        return [0.0] * length

    def compiled_numbers(self, state: State) -> list[int]:
        return [self.every, *self.exponents]

    def take_compiled(self, state: State, counted: Compiled) -> int:
        values = counted.values
        calls = round(values[CALLS])
        all_calls = counted.turn + calls
        # each `every`-th call was measured, from call 0 on
        measured_before = math.ceil(counted.turn / self.every)
        measured = math.ceil(all_calls / self.every) - measured_before
        state["calls"] += measured
        state["all_values"] += round(values[ALL_VALUES])

        sums = state["sums"]
        added = values[SUMS:]
        sums += torch.tensor(added, dtype=sums.dtype, device=sums.device)
        state["largest"].clamp_(min=values[LARGEST])

        if counted.alive is not None:
            state["alive"] = alive_in_either(state.get("alive"), counted.alive)
        if counted.batches is not None:
            state["batches"] = counted.batches + state.get("batches", 0.0)
        # an observer of values is active in each call, and one of gradients only in measured ones
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

    Args:
        every: measure each n-th call of an epoch, the first included; at least 1. In eager mode,
            the other calls start no operator of torch. 1 measures each call.
        low: lower bound of the histogram of magnitudes, at least 1e-30, rounded down to a power of
            2. Its bins are octaves.
        high: upper bound of the histogram, above `low`, at most 1e30; rounded up to a power of 2.
        at: observe the layer's ``"output"`` or its ``"input"``, where no gradients are seen.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: see the activation ``"after"`` the regularizers of the layer, or ``"before"`` them. An
            observer of gradients alone sees them after, or before, the gradient regularizers.
        outliers: True also measures three numbers. The first is the kurtosis. The second is the
            share of values that are more than 6 standard deviations from the mean of their call.
            The third is the largest magnitude of a channel, divided by that of the median channel.
            On a CPU, a measured call then takes 2 to 5 times as long. On a GPU with Triton, it
            starts 2 more kernels. Without Triton, it starts about 60 more operators, and holds up
            to three float64 copies of the tensor.
        residual: True also measures ``rms(output - input) / rms(input)``. If a block adds a branch
            to its input, this is the ratio of the branch to the shortcut. An activation after the
            sum, as in a ResNet, counts as a part of the branch. There is no ratio where output and
            input have different shapes. A layer that gets no tensor is a SiteError. On a GPU with
            Triton, a measured call then starts 2 more kernels.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.
    """

    outliers: bool = field(default=False, kw_only=True)
    residual: bool = field(default=False, kw_only=True)

    channelwise: ClassVar[bool] = True
    reads_given: ClassVar[bool] = True
    columns: ClassVar[Columns[Any]] = {
        **_COLUMNS,
        "kurtosis": _if_measured("kurtosis"),
        "beyond\n6 std": _if_measured("outliers"),
        "peak/\nmedian": _if_measured("peak_ratio"),
        "branch/\nshortcut": _if_measured("residual"),
        "dead\nchannels": _dead,
        "running": _running,
    }

    traced: ClassVar[bool] = True  # again, because a class with its own `start` loses it

    def check(self, values: Mapping[str, float]) -> None:
        super().check(values)
        if self.residual and self.at == "input":
            raise ValueError(
                "residual=True compares the output of a layer with its input: it takes no "
                "at='input'"
            )

    @property
    def compares_input(self) -> bool:  # type: ignore[override]  # of each object, not of the class
        return self.residual

    def start(self) -> State:
        state = super().start()
        if self.outliers:
            state.update(new_outliers())
        if self.residual:
            state["branch"] = new_branch()
        return state

    def start_sums(self, channels: int) -> dict[str, Tensor]:
        sums = {}
        if self.outliers:
            sums["tails"] = new_tails()
        if self.outliers and channels:
            sums["peaks"] = torch.zeros(channels, dtype=torch.float64)
        if self.residual:
            sums["branch"] = new_branch()
        return sums

    def read_layer(self, state: State, module: nn.Module, parameter: str | None) -> None:
        """Keep the latest running statistics of a BatchNorm, to compare its batches with them."""
        layer: Any = module
        if not isinstance(module, _BATCH_NORMS):
            return
        # None without running statistics; tensors of other classes may have no numbers
        if type(layer.running_mean) is not Tensor or layer.running_mean.is_meta:
            return

        # copied to the CPU, where `compute` gets the state, because no tensor in a tuple is moved
        mean = layer.running_mean.to("cpu", torch.float64, copy=True)
        variance = layer.running_var.to("cpu", torch.float64, copy=True)
        state["running"] = mean, variance + layer.eps, layer.eps

    def update(self, state: State, seen: Seen) -> None:
        super().update(state, seen)
        mapped = seen.channels_first()
        if mapped is not None:
            add_alive(state, mapped)
        if self.outliers:
            add_outliers(state, seen.tensor, mapped)
        if self.residual and seen.given[0].shape == seen.tensor.shape:
            add_squares(state["branch"], seen.tensor, seen.given[0])

        # in evaluation mode, the layer does not normalize by the batch
        if "running" in state and seen.training:
            batches = add_batch(state.get("batches", 0.0), seen.given[0])
            if isinstance(batches, Tensor):  # 0.0 if no batch had a variance yet
                state["batches"] = batches

    def finds_dead(self, state: State) -> bool:
        return True

    def take_compiled(self, state: State, counted: Compiled) -> int:
        sums = counted.sums
        if "tails" in sums:
            add_tails_to(state, sums["tails"], sums.get("peaks"))
        if "branch" in sums:
            state["branch"] += sums["branch"]
        return super().take_compiled(state, counted)

    def compute(self, state: State) -> Statistics:
        statistics = _statistics(state)
        if "branch" in state:
            ratio = branch_ratio(state["branch"])
            statistics = replace(statistics, residual=ratio)
        if "alive" in state:
            alive = state["alive"]
            dead = int((~alive).sum())
            statistics = replace(statistics, channels=len(alive), dead=dead)

        if "moments" in state:
            statistics = _with_outliers(statistics, state)

        if "batches" in state:
            # the rows are the sums of means, the sums of variances and the numbers of batches
            number_of_batches = state["batches"][-1]
            mean, variance, _ = state["batches"] / number_of_batches
            running_mean, running_variance, eps = state["running"]
            distances = (mean - running_mean).abs()
            mean_shifts = distances / running_variance.sqrt()
            ratios = (variance + eps) / running_variance
            variance_shifts = ratios.log().abs()
            statistics = replace(
                statistics,
                mean_shift=mean_shifts.mean().item(),
                variance_shift=variance_shifts.mean().item(),
            )
        return statistics

    def merge(self, a: State, b: State) -> State:
        merged = super().merge(a, b)
        if "peaks" in a and "peaks" in b:  # missing if the channels are not known
            merged["peaks"] = torch.maximum(a["peaks"], b["peaks"])
        if self.outliers:
            merged["moments"] = combined_moments(a["moments"], b["moments"])
        return merged


def _with_outliers(statistics: Statistics, state: State) -> Statistics:
    """Add the kurtosis, the outliers and the ratio of peaks to the statistics."""
    moments = state["moments"]
    count = moments[0].item()
    if not count:
        return statistics

    share = state["outliers"].item() / count
    statistics = replace(statistics, kurtosis=kurtosis(moments), outliers=share)
    if "peaks" in state:
        statistics = replace(statistics, peak_ratio=peak_ratio(state["peaks"]))
    return statistics


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

    Args:
        every: measure each n-th call of an epoch, the first included; at least 1. In eager mode,
            the other calls start no operator of torch. 1 measures each call.
        low: lower bound of the histogram of magnitudes, at least 1e-30, rounded down to a power of
            2. Its bins are octaves.
        high: upper bound of the histogram, above `low`, at most 1e30; rounded up to a power of 2.
        at: ``"output"``; no other value is allowed.
        index: the element of a tuple, list or dict, as an integer or a key. None is the output
            itself.
        layout: ``"auto"``; no other value is allowed.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: see the gradient ``"after"`` the gradient regularizers of the layer, or ``"before"``
            them.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.
    """

    low: float = 1e-12

    acts_on: ClassVar[Literal["activation", "gradient"]] = "gradient"
    sees_values: ClassVar[bool] = False
    sees_gradients: ClassVar[bool] = True
    reads_grad_scale: ClassVar[bool] = True
    traced: ClassVar[bool] = True  # again, because a class with its own `start` loses it

    def check(self, values: Mapping[str, float]) -> None:
        super().check(values)
        if self.layout != "auto":
            raise ValueError(f"{self.label} measures all values together: it takes no layout")

    def start(self) -> State:
        # shift: how many calls after each `every`-th call the measured call comes
        # lost_gradients: how many measured calls got no gradient
        return {**super().start(), "shift": 0, "lost_gradients": 0}

    def is_due(self, state: State, turn: int, training: bool, shared: dict[str, Any]) -> bool:
        """Return whether to measure a call, although its gradient may never come.

        A GAN calls its generator twice in a step, and detaches one of the outputs. So each of the
        first `every` calls is measured until a gradient has come. If a measured call later
        gets no gradient, the measured calls move one call later. A gradient is lost when it can no
        longer come. A step may call a shared layer several times before the backward.
        """
        gradients = state["calls"]  # only gradients count as calls of this observer
        if gradients == 0 and turn < self.every:
            return True
        if (turn - state["shift"]) % self.every:
            return False
        # if each call is measured, no other call could be measured in place of this one
        if state["lost_gradients"] and self.every > 1:
            state["shift"] += 1
            state["lost_gradients"] = 0
            return False
        return True

    def pause_at(self, state: State, turn: int, shared: dict[str, Any]) -> Pause:
        gradients = state["calls"]
        if gradients == 0 and turn < self.every:
            return NO_PAUSE
        calls_before_due = (state["shift"] - turn) % self.every
        return Pause(turn + calls_before_due)


@register
class WeightStats(Observer):
    """Mean, deviation, largest magnitude and norm of a layer's own parameters, all taken together.

    For each parameter, it also measures the norm and the update: the norm of the change since the
    epoch began, divided by the norm then. It holds a copy of the parameters for this. A parameter
    that was zero then has no update. Use it to find layers that learn too fast, or not at all.
    Parameters are read at the end of an epoch and for a report, so the layer need not be called,
    and `active` and `when` have no effect. If a module has no parameters of its own, the parameters
    inside it are read; with a ``param:`` selector, only this parameter. Sharded parameters are
    gathered when ``attach`` or ``step`` is called. Parameters of FullyShardedDataParallel are not
    read.

    Example:
        >>> attached = attach(nn.Sequential(nn.Linear(2, 3)), {"0": WeightStats()})
        >>> seen = attached.report()[0].observed
        >>> seen.values, list(seen.norms), seen.updates
        (9, ['weight', 'bias'], {'weight': 0.0, 'bias': 0.0})

    Args:
        at: ``"output"``; no other value is allowed.
        index: None; no other value is allowed.
        layout: ``"auto"``; no other value is allowed.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: see the activation ``"after"`` the regularizers of the layer, or ``"before"`` them. An
            observer of gradients alone sees them after, or before, the gradient regularizers.

    Raises:
        ValueError: if an option has a value that is not allowed.
    """

    # a `param:` selector takes only classes that act on gradients
    acts_on: ClassVar[Literal["activation", "gradient"]] = "gradient"
    sees_values: ClassVar[bool] = False
    reads_parameters: ClassVar[bool] = True
    needs_calls: ClassVar[bool] = False
    columns: ClassVar[Columns[Any]] = {**_COLUMNS, "updates\nrelative": _updates}
    edges: ClassVar[tuple[float, ...]] = ActivationStats().edges

    def start(self) -> State:
        return {**_new_sums(self.edges), "began": Unsaved()}

    def read_layer(self, state: State, module: nn.Module, parameter: str | None) -> None:
        values = _parameters(module, parameter)
        state.update(_new_sums(self.edges))  # all values are read again
        state.update(calls=len(values), moved=False, norms={}, updates={})
        # if it is True, a `ModelHook` lets this read the layer again in the first training forward
        state["waits"] = _waits(module)

        starts: dict[str, Tensor] = {}  # the values when the epoch began
        for name, x in values.items():
            if name not in state["began"]:
                state["began"][name] = x.clone()
            start = state["began"][name]
            values[name] = x = whole_value(x)
            state.update(on_device(state, x.device))
            add_moments(state, x)
            add_shares(state, x.float(), self.edges)
            starts[name] = whole_value(start).to(x.device)

        for name, norms in _norms(values, starts).items():
            state["moved"] |= bool(norms.change)  # true for NaN
            if math.isfinite(norms.now):
                state["norms"][name] = norms.now
            update = norms.change / norms.start if norms.start else math.nan
            if math.isfinite(update):
                state["updates"][name] = update

    def is_empty(self, state: State) -> bool:
        # right after a step, no parameter has moved, and the report shows the epoch before
        return not state["moved"]

    def compute(self, state: State) -> Statistics:
        statistics = _statistics(state)
        norm = None  # the norm of all values
        if statistics.rms is not None:
            norm = statistics.rms * math.sqrt(statistics.values)
        return replace(
            statistics,
            norm=norm,
            norms=state["norms"],
            updates=state["updates"],
        )

    def merge(self, a: State, b: State) -> State:
        return a  # ranks hold the same parameters


class _Norms(NamedTuple):
    """The norms of a parameter, of its change in this epoch, and of its value at the start."""

    now: float
    change: float
    start: float


def _norms(values: Mapping[str, Tensor], starts: Mapping[str, Tensor]) -> dict[str, _Norms]:
    """Compute the norms of each parameter, and read all from the device at once."""
    if not values:
        return {}

    changes = [x - starts[name] for name, x in values.items()]
    device = next(iter(values.values())).device
    tensors = [*values.values(), *changes, *starts.values()]
    norms = foreach_norm(tensors, 2.0, wide_dtype(device))
    on_one_device = [norm.to(device) for norm in norms]
    rows = torch.stack(on_one_device).view(3, -1)

    norms_of = {}
    for name, numbers in zip(values, rows.t().tolist(), strict=True):
        norms_of[name] = _Norms(*numbers)
    return norms_of


def _waits(module: nn.Module) -> bool:
    """Return whether parameters have no numbers yet, because they are on meta or uninitialized."""
    for parameter in module.parameters():
        is_lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
        if is_lazy or parameter.is_meta:
            return True
    return False


def _parameters(module: nn.Module, name: str | None) -> dict[str, Tensor]:
    """Return the parameter of this name, or the layer's own parameters, or those inside it."""
    parameters: dict[str, Any]
    if name is not None:
        held = getattr(module, name, None)
        parameters = {} if held is None else {name: held}  # `verify` reports one that is gone
    else:
        parameters = parameters_of(module) or dict(module.named_parameters())

    values: dict[str, Tensor] = {}
    for key, parameter in parameters.items():
        # tensors of other classes may have no numbers
        if not (type(parameter) in (Tensor, nn.Parameter) or is_distributed(parameter)):
            continue
        if is_part_of_flat(parameter):
            continue
        if parameter.is_floating_point() and not parameter.is_meta:
            values[key] = parameter.detach()
    return values
