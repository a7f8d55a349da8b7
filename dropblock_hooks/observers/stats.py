"""Observers of statistics: of activations, of gradients and of parameters, by epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm as norm

from ..checks import Range, as_count, as_number
from ..registry import register
from ..selectors.wrappers import shard_refusal
from ..tables import Columns, Short
from .base import Observer, Seen, State, Unsaved, on_device
from .moments import (
    KEPT,
    SQUARES,
    Statistics,
    add_alive,
    add_moments,
    add_shares,
    new_moments,
    statistics,
)


@dataclass(frozen=True, repr=False)
class Measuring(Observer):
    """Moments at every call; shares of zeros and a histogram of magnitudes at every n-th call.

    Args:
        every: zeros, values that are not finite and the histogram are counted at each n-th call of
            an epoch, the first included; at least 1.
        low: lower bound of the histogram of magnitudes, at least 1e-30. Its bins are octaves: the
            bound is rounded down to a power of 2.
        high: upper bound of the histogram, above `low` and at most 1e30. It is rounded up to a
            power of 2.
    """

    every: int = 10
    low: float = 1e-8
    high: float = 1e4

    def check(self, values: Mapping[str, float]) -> None:
        super().check(values)
        as_count("every", self.every)
        low = as_number("low", self.low, allowed=Range(1e-30, 1e30))
        as_number("high", self.high, allowed=Range(low, 1e30, open_low=True))

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of the bins of the histogram, rising."""
        first, last = math.floor(math.log2(self.low)), math.ceil(math.log2(self.high))
        return tuple(2.0**octave for octave in range(first, last + 1))

    def start(self) -> State:
        return new_moments(self.edges)

    def update(self, state: State, seen: Seen) -> None:
        add_moments(state, seen.tensor, seen.scale)
        if state["calls"] % self.every == 0:
            add_shares(state, seen.tensor, self.edges, seen.scale)

    def compute(self, state: State) -> Statistics:
        return statistics(state)

    def merge(self, a: State, b: State) -> State:
        return {**super().merge(a, b), "largest": torch.maximum(a["largest"], b["largest"])}

    def headings(self) -> tuple[str, Columns[Any]]:
        return f"{self.label}: zeros, nan/inf: 1 call in {self.every}", dict(_MOMENTS)


@register
class ActivationStats(Measuring):
    """Mean, deviation, largest magnitude and norm of the output of a layer by epoch; dead channels.

    Use it on activation functions, norms and blocks. No call waits for the device. A call with NaN
    or Inf is counted, but left out of the moments. A channel is dead if it was exactly zero in
    every call of the epoch. The running statistics of a BatchNorm are compared with each n-th batch
    (`every`).

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

    def look(self, state: State, module: nn.Module, parameter: str | None) -> None:
        layer: Any = module
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if is_norm and type(layer.running_mean) is Tensor and not layer.running_mean.is_meta:
            one = torch.ones_like(layer.running_mean)  # ranks are added up, and then divided by it
            running = layer.running_mean, layer.running_var, layer.eps * one, one
            state["running"] = torch.stack(running).to(state["sums"])

    def update(self, state: State, seen: Seen) -> None:
        super().update(state, seen)
        mapped = seen.channels_first()
        if mapped is not None:
            add_alive(state, mapped)
        if "running" in state and seen.training and state["calls"] % self.every == 0:
            x = seen.given[0]
            if x.numel() > x.shape[1]:  # one value has no variance
                variance, mean = torch.var_mean(x.to(state["sums"].dtype), [0, *range(2, x.ndim)])
                batch = torch.stack((mean, variance, torch.ones_like(mean)))
                state["batches"] = state.get("batches", 0.0) + batch

    def compute(self, state: State) -> Statistics:
        found = statistics(state)
        if "alive" in state:
            alive = state["alive"]
            found = replace(found, channels=len(alive), dead=int((~alive).sum()))
        if "batches" in state and "running" in state:
            batches, running = state["batches"].double(), state["running"].double()
            mean, variance = batches[:2] / batches[2]
            running_mean, running_variance, eps = running[:3] / running[3]
            of_mean = (mean - running_mean).abs() / (running_variance + eps).sqrt()
            of_variance = ((variance + eps) / (running_variance + eps)).log().abs()
            shifts = of_mean.mean().item(), of_variance.mean().item()
            found = replace(found, mean_shift=shifts[0], variance_shift=shifts[1])
        return found

    def headings(self) -> tuple[str, Columns[Any]]:
        note, columns = super().headings()
        columns = {**columns, "dead": _dead, "running": _running}
        return f"{note}; dead: channels, always zero", columns


@register
class GradientStats(Measuring):
    """Mean, deviation, largest magnitude and norm of the gradient at a layer's output, by epoch.

    Use it to find vanishing and exploding gradients. They are gradients of the unscaled loss, after
    the gradient regularizers of the layer; with ``when="before"``, as they arrived. With a
    ``param:`` selector, they are those of a parameter in each backward, before they accumulate.

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

    For each parameter also its norm and the relative size of its updates: the norm of its change
    since the epoch began, divided by its norm then. For this, a copy of the parameters is held on
    their device. Use it to find layers that learn too fast, or not at all. Parameters are read at
    the end of an epoch and for a report, so the layer need not be called. Of a module without
    parameters of its own, those inside it are read. With a ``param:`` selector, only this parameter
    is read. Parameters that FSDP shards are not read.

    Example:
        >>> attached = attach(nn.Sequential(nn.Linear(2, 3)), {"0": WeightStats()})
        >>> seen = attached.report()[0].observed
        >>> seen.values, list(seen.norms), seen.updates
        (9, ['weight', 'bias'], {'weight': 0.0, 'bias': 0.0})
    """

    acts_on: ClassVar[Literal["activation", "gradient"]] = "gradient"  # as what parameters take
    sees_values: ClassVar[bool] = False
    needs_calls: ClassVar[bool] = False
    edges: ClassVar[tuple[float, ...]] = GradientStats(low=1e-8).edges

    def start(self) -> State:
        return {**new_moments(self.edges), "began": Unsaved()}

    def look(self, state: State, module: nn.Module, parameter: str | None) -> None:
        parameters = _parameters(module, parameter)
        state.update(new_moments(self.edges), calls=len(parameters), moved=False)
        state.update(norms={}, updates={})
        for name, x in parameters.items():
            state.update(on_device(state, x.device))
            add_moments(state, x)
            add_shares(state, x, self.edges)
            began = state["began"].setdefault(name, x.clone()).to(x.device)
            change = x - began
            state["moved"] |= bool(change.any())  # true for NaN
            state["norms"][name] = float(norm(x))
            state["updates"][name] = float(norm(change) / norm(began))

    def is_empty(self, state: State) -> bool:
        return not state["moved"]

    def compute(self, state: State) -> Statistics:
        sums = state["sums"]
        whole = math.sqrt(sums[SQUARES].item()) if sums[KEPT] else None
        norms, updates = (
            {name: x for name, x in state[which].items() if math.isfinite(x)}
            for which in ("norms", "updates")
        )
        return replace(statistics(state), norm=whole, norms=norms, updates=updates)

    def merge(self, a: State, b: State) -> State:
        return a  # ranks hold the same parameters

    def headings(self) -> tuple[str, Columns[Any]]:
        note = f"{self.label}: updates: norm of the change, relative"
        return note, {**_MOMENTS, "updates": _updates}


def _parameters(module: nn.Module, name: str | None) -> dict[str, Tensor]:
    """The layer's own parameters, else those inside it, or the one of this name.

    Those without numbers are left out.
    """
    if shard_refusal(module) is not None:
        return {}
    own = {name: getattr(module, name) for name in (module._parameters if name is None else [name])}
    own = own or dict(module.named_parameters())
    # other classes may hold parts, or wait for other processes
    plain = {name: p.detach() for name, p in own.items() if type(p) in (Tensor, nn.Parameter)}
    return {name: x for name, x in plain.items() if x.is_floating_point() and not x.is_meta}


def _number(name: str) -> Callable[[Statistics], str | None]:
    """The column of a number, in three digits: there are many in a row."""
    return lambda s: None if getattr(s, name) is None else f"{getattr(s, name):.3g}"


def _dead(s: Statistics) -> str | None:
    return None if s.dead is None else f"{s.dead} of {s.channels}"


def _running(s: Statistics) -> str:
    return "" if s.mean_shift is None else f"{s.mean_shift:.2g}, {s.variance_shift:.2g}"


def _updates(s: Statistics) -> Short:
    short = ", ".join(f"{update:.2g}" for update in s.updates.values())
    return Short(short, ", ".join(f"{name} {update:.2g}" for name, update in s.updates.items()))


_MOMENTS: Columns[Any] = {
    **{name: _number(name) for name in ("mean", "std", "largest", "norm", "zeros")},
    "nan/inf": _number("nonfinite"),
}
