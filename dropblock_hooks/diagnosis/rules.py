"""The rules of a `Watchdog` about gradients and activations."""

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from torch import nn

from .. import messages
from ..findings import Finding, Kind, Message
from ..observers.watchdog import Clock
from .routed import around, routed_lists
from .sights import Sight, with_rule
from .updated import find_no_update

_FEW = 4  # with fewer layers, no rule about depth is applied


def judge_statistics(base: nn.Module, clock: Clock, sights: list[Sight]) -> Iterator[Finding]:
    """Apply the rules about gradients and activations."""
    yield from _vanishing(with_rule(Kind.VANISHING, sights))
    yield from _exploding(clock, with_rule(Kind.EXPLODING, sights))
    output = _output_layer(sights)
    for sight in sights:
        if sight.judged:
            yield from _of_activation(sight, is_output=sight is output)
    yield from _no_gradient(base, sights, with_rule(Kind.NO_GRADIENT, sights))
    yield from find_no_update(with_rule(Kind.NO_UPDATE, sights))
    yield from _eval_norms(sights, with_rule(Kind.EVAL_NORM, sights))
    yield from _equal_inputs(clock, with_rule(Kind.EQUAL_INPUTS, sights))


class _Norms(NamedTuple):
    """The mean gradient norms of the first quarter and of the last quarter of the layers."""

    layers: list[Sight]  # in the order of their last calls
    first: list[float]
    last: list[float]

    @property
    def max_ratio(self) -> float:
        return self.layers[0].dog.max_ratio

    def finding(self, message: Message, early: float, late: float) -> Finding:
        """Make a finding about the first layer."""
        return self.layers[0].finding(
            message,
            first=len(self.first),
            layers=len(self.layers),
            early=early,
            late=late,
            last=self.layers[-1].site.name,
        )


def _norms_along_depth(sights: list[Sight]) -> _Norms | None:
    """Return the gradient norms of the first and the last layers; None with too few layers."""
    layers = [sight for sight in sights if sight.is_enough(sight.watched.grads) and sight.trained]
    if len(layers) < _FEW:
        return None

    layers.sort(key=lambda sight: sight.watched.at)
    norms = [sight.watched.norm / sight.watched.grads for sight in layers]
    quarter = max(1, len(layers) // 4)
    return _Norms(layers, first=norms[:quarter], last=norms[-quarter:])


def _vanishing(sights: list[Sight]) -> Iterator[Finding]:
    """Find gradients that shrink from the last layers to the first."""
    norms = _norms_along_depth(sights)
    if norms is None:
        return
    # a branch may have small gradients by design, so the smallest of the last layers is not used
    early = max(norms.first)
    late = median(norms.last)
    has_both = early and late  # a layer without any gradient is dead
    if has_both and early * norms.max_ratio < late:
        yield norms.finding(messages.VANISHING, early, late)


def _exploding(clock: Clock, sights: list[Sight]) -> Iterator[Finding]:
    """Find gradients that grow from the last layers to the first."""
    norms = _norms_along_depth(sights)
    if norms is None:
        return
    early = min(norms.first)
    late = max(norms.last)
    has_both = early and late
    if has_both and early > norms.max_ratio * late:
        later = _is_found_later(clock)
        message = messages.EXPLODING_LATER if later else messages.EXPLODING
        yield norms.finding(message, early, late)


def _is_found_later(clock: Clock) -> bool:
    """Return whether exploding gradients were not there at the first look of all."""
    for finding in clock.alerts.values():
        if finding.kind == Kind.EXPLODING:
            return bool(finding.cure == messages.EXPLODING_LATER.cure)
    return clock.looks > 0


def _output_layer(sights: Sequence[Sight]) -> Sight | None:
    """Return the layer without layers inside it that was called last, which makes the output."""
    leaves = [sight for sight in sights if not any(True for _ in sight.module.children())]
    return max(leaves, key=lambda sight: sight.watched.at, default=None)


def _of_activation(sight: Sight, is_output: bool) -> Iterator[Finding]:
    """Find channels that are dead, and values at the bounds of the activation.

    Probabilities of a classifier that is sure lie at the bounds, so the last layer may have them.
    """
    dog = sight.dog
    watched = sight.watched

    alive: Any = watched.units.get("alive", ())
    dead = 1.0 - alive.float().mean().item() if len(alive) else 0.0
    if Kind.DEAD in dog.names and dead > dog.max_dead:
        yield sight.finding(messages.DEAD, share=dead, channels=len(alive))

    near = float(watched.near) / max(watched.calls, 1)
    if Kind.SATURATED in dog.names and near > dog.max_saturated and not is_output:
        yield sight.finding(messages.SATURATED, share=near)


def _no_gradient(
    base: nn.Module, all_sights: list[Sight], sights: list[Sight]
) -> Iterator[Finding]:
    """Find layers with trained parameters that get no gradient, while others do.

    Args:
        base: the model.
        all_sights: all sites of a `Watchdog`.
        sights: those of them that have the rule.
    """
    has_enough = any(sight.is_enough(sight.watched.grads) for sight in all_sights)
    model_has_gradients = any(_has_gradient(p) for p in base.parameters())
    routed = routed_lists(base, _called(all_sights))
    for sight in sights:
        trained = sight.trained  # empty for a frozen layer, which is meant to have no gradient
        if not has_enough or not trained:
            continue
        if any(map(_has_gradient, trained)):
            continue

        never_called = model_has_gradients and not sight.watched.called
        unused = never_called and routed.isdisjoint(around(sight.site.name))
        if unused or _got_no_gradient(sight):
            yield sight.finding(messages.NO_GRADIENT, calls=sight.watched.calls)


def _eval_norms(all_sights: list[Sight], sights: list[Sight]) -> Iterator[Finding]:
    """Find trained norms in evaluation mode; frozen ones, and those of FreezeNorm, are meant.

    Their own calls are not in training mode, so those of other layers count.
    """
    most_called = max((sight.watched.called for sight in all_sights), default=0)
    for sight in sights:
        forwards = sight.watched.evaluated
        often = most_called >= sight.dog.min_calls and forwards >= sight.dog.enough
        if often and sight.trained:
            yield sight.finding(messages.EVAL_NORM, forwards=forwards)


def _equal_inputs(clock: Clock, sights: list[Sight]) -> Iterator[Finding]:
    """Find batches whose samples are all equal; the first layer that returns is named."""
    judged = [sight for sight in sights if sight.judged]
    if not judged:
        return
    first = min(judged, key=lambda sight: sight.watched.at)
    batches = clock.batches
    if batches.are_equal(first.dog.enough):
        numbers = {"samples": batches.size, "batches": batches.compared}
        yield first.finding(messages.EQUAL_INPUTS, **numbers)


def _called(sights: Sequence[Sight]) -> list[str]:
    """Return the names of the layers that were called."""
    return [sight.site.name for sight in sights if sight.watched.calls]


def _got_no_gradient(sight: Sight) -> bool:
    """Return whether a layer was called often, and got no gradient or only zeros."""
    watched = sight.watched
    none = sight.is_enough(watched.calls) and not watched.grads
    zeros = sight.is_enough(watched.grads) and not watched.norm and math.isinf(watched.grad_bad)
    return none or zeros


def _has_gradient(p: nn.Parameter) -> bool:
    """Return whether a gradient is not zero: ``zero_grad(set_to_none=False)`` leaves zeros."""
    return p.grad is not None and bool((p.grad != 0).any())
