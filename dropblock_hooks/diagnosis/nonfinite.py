"""The rule of a `Watchdog` about NaN and Inf: the layer that made the first of them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from .. import messages
from .._torch import local_values
from ..findings import Finding
from ..observers.rows import Row
from ..observers.watchdog import Clock, Gap
from ..quoting import listed
from ..sites.run import Run
from ..sites.scaler import is_enabled
from ..tables import counted
from .sights import Sight

_SMALLEST_SCALE = 1.0  # a GradScaler below it is not recovering from its overflows


def find_nonfinite(run: Run, sights: list[Sight]) -> Iterator[Finding]:
    """Find the layer that made the first bad value, or the first that a bad gradient reaches.

    An output with -Inf alone may be masked logits. It is a cause only where NaN or +Inf follows.
    The text ends with the last steps before, if the `Watchdog` keeps some.
    """
    by_site = {sight.site.key: sight for sight in sights}
    for finding in _find_first(run, sights):
        sight = by_site[finding.sites[0]]
        parts = [finding.text, *_steps_before(sight)]
        yield replace(finding, text=". ".join(parts))


def _find_first(run: Run, sights: list[Sight]) -> Iterator[Finding]:
    """Find the first bad value in a forward or a backward, or the parameters that it has left."""
    if not sights:
        return

    clock = Clock.of(run.shared)
    worst = min(sights, key=lambda sight: sight.watched.worse)
    first_in_backward = min(sights, key=lambda sight: sight.watched.grad_bad)
    bad_gradient_first = first_in_backward.watched.grad_bad < worst.watched.worse

    scaled = is_enabled(run.scaler)
    # overflows are how a GradScaler finds its scale
    searching = scaled and run.scaler.get_scale() >= _SMALLEST_SCALE
    if bad_gradient_first and not searching:
        message = messages.BAD_SCALED_GRADIENT if scaled else messages.BAD_GRADIENT
        yield first_in_backward.finding(message)
    elif worst.watched.worse < math.inf:
        first = worst
        if worst.watched.made != worst.watched.worse:  # -Inf in its input may have made it
            first = min(sights, key=lambda sight: sight.watched.bad)
        yield _of_forward(first, sights, clock)
    else:
        yield from _after_the_last_measured(sights, clock, compiled=run.ticker is not None)


def _steps_before(sight: Sight) -> Iterator[str]:
    """Tell the first bad call of a layer, and what was measured in the last calls before it."""
    rows = sight.watched.rows
    if not rows.keep:
        return
    if rows.first_bad < math.inf:
        text = messages.FIRST_BAD_GRADIENT if rows.in_gradient else messages.FIRST_BAD_CALL
        yield text.format(call=rows.first_bad)
    if rows.outputs:
        yield messages.ROWS_OF_OUTPUT.format(**_shown(rows.outputs))
    if rows.gradients:
        yield messages.ROWS_OF_GRADIENT.format(**_shown(rows.gradients))


def _shown(rows: Sequence[Row]) -> dict[str, str]:
    """Return how many rows there are, the numbers of their calls, and their values."""
    numbers = [str(row.call) for row in rows]
    values = [f"{row.value:.3g}" for row in rows]
    return {
        "calls": counted(len(rows), "measured call"),
        "numbers": ", ".join(numbers),
        "values": ", ".join(values),
    }


def _of_forward(first: Sight, sights: Sequence[Sight], clock: Clock) -> Finding:
    """Make the finding that a layer returned bad values, where `first` was the first to do so.

    Of that layer and all around it, the innermost one whose input was finite has made them. If
    code between two layers made them, that is their parent. If there is none, `first` is named.
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
    """Return the forwards before the first bad one that were not measured; None without any."""
    watched = first.watched
    if not watched.gap:
        return clock.gap
    bad_forward = max(clock.forwards, watched.turn) - watched.bad_ago
    return Gap(before=bad_forward - watched.gap - 1, after=bad_forward, time=-1)


def _made_bad_values(sight: Sight, first: Sight) -> bool:
    """Return whether a layer is `first`, or around it, and made bad values of a finite input."""
    watched = sight.watched
    if not watched.made == watched.bad < math.inf:
        return False
    prefix = f"{sight.site.name}.".lstrip(".")  # "" for the model itself, which is around all
    names_of_first = (first.site.name, *first.site.aliases)
    return any(f"{name}.".startswith(prefix) for name in names_of_first)


def _after_the_last_measured(
    sights: Sequence[Sight], clock: Clock, compiled: bool
) -> Iterator[Finding]:
    """Find bad parameters that forwards have left which were not measured.

    An update has put NaN or Inf into parameters since then. Therefore the first layer with bad
    values need not be the one that made them.
    """
    last = clock.last
    forwards = clock.forwards
    if compiled:
        # between two looks, the clock does not count
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
