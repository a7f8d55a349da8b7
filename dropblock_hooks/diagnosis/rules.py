"""The rules of a `Watchdog` about gradients and activations.

``alerts`` calls `judge_statistics` when a `Watchdog` looks, if enough calls were measured.
"""

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
from .updated import find_accumulating, find_no_update

_FEW = 4  # with fewer layers, no rule about depth is applied


def judge_statistics(
    base: nn.Module,
    clock: Clock,
    sights: list[Sight],
) -> Iterator[Finding]:
    """Apply the rules about gradients and activations."""
    for_vanishing = with_rule(Kind.VANISHING, sights)
    yield from _vanishing(for_vanishing)

    for_exploding = with_rule(Kind.EXPLODING, sights)
    yield from _exploding(clock, for_exploding)

    output = _output_layer(sights)
    for sight in sights:
        if sight.judged:
            is_output = sight is output
            yield from _of_activation(sight, is_output)

    for_no_gradient = with_rule(Kind.NO_GRADIENT, sights)
    yield from _no_gradient(base, sights, for_no_gradient)

    for_no_update = with_rule(Kind.NO_UPDATE, sights)
    yield from find_no_update(for_no_update)

    for_accumulating = with_rule(Kind.ACCUMULATING, sights)
    yield from find_accumulating(for_accumulating)

    for_eval_norms = with_rule(Kind.EVAL_NORM, sights)
    yield from _eval_norms(sights, for_eval_norms)

    for_equal_inputs = with_rule(Kind.EQUAL_INPUTS, sights)
    yield from _equal_inputs(clock, for_equal_inputs)


class _Norms(NamedTuple):
    """The mean gradient norms of the first quarter and of the last quarter of the layers."""

    layers: list[Sight]  # in the order of their last calls
    first: list[float]
    last: list[float]

    @property
    def max_ratio(self) -> float:
        """The limit of the ratio of these norms."""
        first_layer = self.layers[0]
        return first_layer.dog.max_ratio

    def finding(
        self,
        message: Message,
        early: float,
        late: float,
    ) -> Finding:
        """Make a finding about the first layer.

        Args:
            message: the text of the finding.
            early: the norm that stands for the first layers.
            late: the norm that stands for the last layers.
        """
        first_layer = self.layers[0]
        last_layer = self.layers[-1]
        return first_layer.finding(
            message,
            first=len(self.first),
            layers=len(self.layers),
            early=early,
            late=late,
            last=last_layer.site.name,
        )


def _norms_along_depth(sights: list[Sight]) -> _Norms | None:
    """Return the gradient norms of the first and the last layers; None with too few layers."""
    layers = []
    for sight in sights:
        has_enough = sight.is_enough(sight.watched.grads)
        if has_enough and sight.trainable:
            layers.append(sight)
    if len(layers) < _FEW:
        return None

    layers.sort(key=_last_call)
    norms = []
    for sight in layers:
        mean_norm = sight.watched.norm / sight.watched.grads
        norms.append(mean_norm)

    quarter = max(1, len(layers) // 4)
    return _Norms(
        layers,
        first=norms[:quarter],
        last=norms[-quarter:],
    )


def _last_call(sight: Sight) -> int:
    """Return the time of the last call of a layer."""
    return sight.watched.at


def _vanishing(sights: list[Sight]) -> Iterator[Finding]:
    """Find gradients that shrink from the last layers to the first."""
    norms = _norms_along_depth(sights)
    if norms is None:
        return

    early = max(norms.first)
    # takes the median and not the smallest, because a branch may have small gradients by design
    late = median(norms.last)
    has_both = early and late  # another rule finds layers without any gradient
    limit = early * norms.max_ratio
    if has_both and limit < late:
        yield norms.finding(messages.VANISHING, early, late)


def _exploding(clock: Clock, sights: list[Sight]) -> Iterator[Finding]:
    """Find gradients that grow from the last layers to the first."""
    norms = _norms_along_depth(sights)
    if norms is None:
        return

    early = min(norms.first)
    late = max(norms.last)
    has_both = early and late
    limit = norms.max_ratio * late
    if has_both and early > limit:
        message = messages.EXPLODING
        if _is_found_later(clock):
            message = messages.EXPLODING_LATER
        yield norms.finding(message, early, late)


def _is_found_later(clock: Clock) -> bool:
    """Return whether gradients began to explode after the first look.

    An alert of the last look keeps its text.
    """
    cure_if_later = messages.EXPLODING_LATER.cure
    for finding in clock.alerts.values():
        if finding.kind == Kind.EXPLODING:
            return bool(finding.cure == cure_if_later)
    return clock.looks > 0


def _output_layer(sights: Sequence[Sight]) -> Sight | None:
    """Return the layer that makes the output: the last one without layers inside it."""
    leaves = []
    for sight in sights:
        children = list(sight.module.children())
        if not children:
            leaves.append(sight)
    return max(leaves, key=_last_call, default=None)


def _of_activation(sight: Sight, is_output: bool) -> Iterator[Finding]:
    """Find dead channels, and values at the bounds of the activation.

    The last layer may have values at the bounds, because a confident classifier has them.
    """
    dog = sight.dog
    watched = sight.watched

    alive: Any = watched.units.get("alive", ())
    dead = 0.0
    if len(alive):
        share_alive = alive.float().mean().item()
        dead = 1.0 - share_alive
    if Kind.DEAD in dog.names and dead > dog.max_dead:
        yield sight.finding(
            messages.DEAD,
            share=dead,
            channels=len(alive),
        )

    calls = max(watched.measured, 1)
    near = float(watched.near) / calls
    is_saturated = near > dog.max_saturated and not is_output
    if Kind.SATURATED in dog.names and is_saturated:
        yield sight.finding(messages.SATURATED, share=near)


def _no_gradient(
    base: nn.Module,
    all_sights: list[Sight],
    sights: list[Sight],
) -> Iterator[Finding]:
    """Find layers with trained parameters that get no gradient, while other layers do.

    Args:
        base: the model.
        all_sights: all sites of a `Watchdog`.
        sights: the sites whose `Watchdog` has this rule.
    """
    has_enough = any(sight.is_enough(sight.watched.grads) for sight in all_sights)
    model_has_gradients = any(map(_has_gradient, base.parameters()))
    routed = routed_lists(base, _called(all_sights))
    for sight in sights:
        trainable = sight.trainable  # empty for a frozen layer, which needs no gradient
        if not has_enough or not trainable:
            continue
        if any(map(_has_gradient, trainable)):
            continue

        never_called = not sight.watched.calls
        parents = around(sight.site.name)
        may_be_left_out = not routed.isdisjoint(parents)
        unused = model_has_gradients and never_called and not may_be_left_out
        if unused or _got_no_gradient(sight):
            yield sight.finding(
                messages.NO_GRADIENT,
                calls=sight.watched.measured,
            )


def _eval_norms(
    all_sights: list[Sight],
    sights: list[Sight],
) -> Iterator[Finding]:
    """Find norms in evaluation mode whose parameters are trained.

    Frozen norms and norms under FreezeNorm are in evaluation mode on purpose. The calls of a norm
    in evaluation mode are no training calls, so the calls of the other layers tell whether the
    model was trained.

    Args:
        all_sights: all sites of a `Watchdog`.
        sights: the sites whose `Watchdog` has this rule.
    """
    most_called = max((sight.watched.calls for sight in all_sights), default=0)
    for sight in sights:
        forwards = sight.watched.evaluated
        model_trained = most_called >= sight.dog.min_calls
        often_in_evaluation = forwards >= sight.dog.enough
        if model_trained and often_in_evaluation and sight.trainable:
            yield sight.finding(
                messages.EVAL_NORM,
                forwards=forwards,
            )


def _equal_inputs(clock: Clock, sights: list[Sight]) -> Iterator[Finding]:
    """Find batches whose samples are all equal, and name the first layer that returns."""
    judged = [sight for sight in sights if sight.judged]
    if not judged:
        return

    first = min(judged, key=_last_call)
    batches = clock.batches
    if batches.are_equal(first.dog.enough):
        yield first.finding(
            messages.EQUAL_INPUTS,
            samples=batches.size,
            batches=batches.compared,
        )


def _called(sights: Sequence[Sight]) -> list[str]:
    """Return the names of the layers that were called."""
    return [sight.site.name for sight in sights if sight.watched.measured]


def _got_no_gradient(sight: Sight) -> bool:
    """Return whether a layer was called often, and got no gradient or only zeros."""
    watched = sight.watched
    enough_calls = sight.is_enough(watched.measured)
    if enough_calls and not watched.grads:
        return True

    enough_gradients = sight.is_enough(watched.grads)
    all_finite = math.isinf(watched.grad_bad)  # the time of the first NaN or Inf; inf without one
    return enough_gradients and not watched.norm and all_finite


def _has_gradient(p: nn.Parameter) -> bool:
    """Return whether the gradient has a value other than 0.

    ``zero_grad(set_to_none=False)`` leaves gradients of zeros.
    """
    if p.grad is None:
        return False
    is_not_zero = p.grad != 0
    return bool(is_not_zero.any())
