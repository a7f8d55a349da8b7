"""Applies the rule of a `Watchdog` about NaN and Inf, and names the layer that made them first."""

import math
from collections.abc import Iterator, Sequence

import torch

from .. import messages
from .._torch import local_values
from ..findings import Finding
from ..observers.watchdog import Clock, Gap
from ..quoting import listed
from ..sites.run import Run
from ..sites.scaler import is_enabled
from .sights import Sight

_SMALLEST_SCALE = 1.0  # a GradScaler below this scale is not recovering from its overflows


def find_nonfinite(run: Run, sights: list[Sight]) -> Iterator[Finding]:
    """Find the layer that made the first NaN or Inf, or the first layer with a bad gradient.

    Masked logits contain -Inf, so -Inf alone is a fault only if NaN or +Inf follows.
    """
    if not sights:
        return

    clock = Clock.of(run.shared)
    worst = min(sights, key=lambda sight: sight.watched.worse)
    first_in_backward = min(sights, key=lambda sight: sight.watched.grad_bad)
    bad_gradient_first = first_in_backward.watched.grad_bad < worst.watched.worse

    scaled = is_enabled(run.scaler)
    # a GradScaler finds its scale by overflows, so they are no fault
    searching = scaled and run.scaler.get_scale() >= _SMALLEST_SCALE
    if bad_gradient_first and not searching:
        message = messages.BAD_SCALED_GRADIENT if scaled else messages.BAD_GRADIENT
        yield first_in_backward.finding(message)
    elif worst.watched.worse < math.inf:
        first = worst
        if worst.watched.made != worst.watched.worse:  # -Inf in the input may be the cause
            first = min(sights, key=lambda sight: sight.watched.bad)
        yield _of_forward(first, sights, clock)
    else:
        yield from _after_the_last_measured(sights, clock, compiled=run.ticker is not None)


def _of_forward(first: Sight, sights: Sequence[Sight], clock: Clock) -> Finding:
    """Make the finding about bad values in a forward.

    The innermost layer whose input was finite has made the bad values. It is `first` or a module
    around `first`. If code between two layers made them, their parent is named. If no such layer
    is watched, `first` is named.

    Args:
        first: the layer that returned bad values first.
        sights: all watched layers.
        clock: the forwards that were measured.
    """
    makers = [sight for sight in sights if _made_bad_values(sight, first)]
    sight = max(makers, key=lambda maker: (maker is first, len(maker.site.name)), default=first)

    bad = _bad_parameters(sights)
    gap = _gap_before(first, clock)
    if bad and gap is not None and first.watched.bad > gap.time:
        clock.closely = True
        when = f"between forward {gap.before} and forward {gap.after}"
        values = {"forward": gap.after, "when": when, "parameters": listed(bad, 3)}
        return sight.finding(messages.BAD_OUTPUT_LATER, **values)

    more = f". Not finite now: {listed(bad, 3)}. Go back to a checkpoint" if bad else ""
    if bad and makers:
        more += ", and lower the learning rate or clip gradients (ClipGradNorm)"
    message = messages.MADE_BAD_VALUES if makers else messages.GOT_BAD_VALUES
    watched = sight.watched
    return sight.finding(message, bad=watched.bad_calls, calls=watched.calls, more=more)


def _gap_before(first: Sight, clock: Clock) -> Gap | None:
    """Return the forwards before the first bad one that were not measured; None if all were."""
    watched = first.watched
    if not watched.gap:
        return clock.gap
    bad_forward = max(clock.forwards, watched.turn) - watched.bad_ago
    return Gap(before=bad_forward - watched.gap - 1, after=bad_forward, time=-1)


def _made_bad_values(sight: Sight, first: Sight) -> bool:
    """Return whether a layer made bad values from a finite input, and is or contains `first`."""
    watched = sight.watched
    if not watched.made == watched.bad < math.inf:
        return False
    prefix = f"{sight.site.name}.".lstrip(".")  # "" for the model itself, which contains all
    names_of_first = (first.site.name, *first.site.aliases)
    return any(f"{name}.".startswith(prefix) for name in names_of_first)


def _after_the_last_measured(
    sights: Sequence[Sight], clock: Clock, compiled: bool
) -> Iterator[Finding]:
    """Find NaN and Inf in parameters after forwards that were not measured.

    An update has put them there since the last measured forward. Therefore the first layer with
    bad values need not be the layer that made them.
    """
    last = clock.last
    forwards = clock.forwards
    if compiled:
        # between two looks, the clock does not count compiled forwards
        forwards = max(forwards, *(sight.watched.turn for sight in sights))
        last = forwards - max(sight.watched.unmeasured for sight in sights)
    if last == forwards:
        return
    bad_by_sight = [(sight, _bad_parameters([sight])) for sight in sights if sight.trained]
    bad = [name for _, names in bad_by_sight for name in names]
    if bad:
        clock.closely = True
        first = next(sight for sight, names in bad_by_sight if names)
        when = f"after forward {last}"
        values = {"forward": forwards, "when": when, "parameters": listed(bad, 3)}
        yield first.finding(messages.BAD_PARAMETERS_LATER, **values)


def _bad_parameters(sights: Sequence[Sight]) -> list[str]:
    """Describe the parameters of the watched layers that are not finite."""
    bad = []
    for sight in sights:
        for name, p in sight.module.named_parameters(recurse=False):
            values = local_values(p).detach()
            if not (values.is_meta or torch.isfinite(values).all()):
                bad.append(f"parameter '{name}' of {sight.site.name or 'the model'}")
    return bad
