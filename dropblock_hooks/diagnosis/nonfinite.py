"""Applies the rule of a `Watchdog` about NaN and Inf, and names the layer that made them first.

``alerts`` calls `find_nonfinite` each time that a `Watchdog` looks.
"""

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

_SMALLEST_SCALE = 1.0  # a GradScaler below this scale is not recovering from its overflows


def find_nonfinite(run: Run, sights: list[Sight]) -> Iterator[Finding]:
    """Find the layer that made the first NaN or Inf, or the first layer with a bad gradient.

    Masked logits contain -Inf, so -Inf alone is a fault only if NaN or +Inf follows.
    The text ends with the last steps before, if the `Watchdog` keeps some.
    """
    by_site = {sight.site.key: sight for sight in sights}
    for finding in _find_first(run, sights):
        sight = by_site[finding.sites[0]]
        parts = [finding.text, *_steps_before(sight)]
        yield replace(finding, text=". ".join(parts))


def _find_first(run: Run, sights: list[Sight]) -> Iterator[Finding]:
    """Find the first NaN or Inf in a forward or a backward, or in parameters after that."""
    if not sights:
        return

    clock = Clock.of(run.shared)
    # `worse` is the time of the first NaN or +Inf, and `bad` that of the first NaN, +Inf or -Inf
    first_worse = min(sights, key=lambda sight: sight.watched.worse)
    first_in_backward = min(sights, key=lambda sight: sight.watched.grad_bad)
    time_of_values = first_worse.watched.worse
    time_of_gradient = first_in_backward.watched.grad_bad
    gradient_came_first = time_of_gradient < time_of_values

    scaled = is_enabled(run.scaler)
    # a GradScaler finds its scale by overflows, so they are no fault
    searching = scaled and run.scaler.get_scale() >= _SMALLEST_SCALE
    if gradient_came_first and not searching:
        message = messages.BAD_SCALED_GRADIENT if scaled else messages.BAD_GRADIENT
        yield first_in_backward.finding(message)
    elif time_of_values < math.inf:
        first = first_worse
        made_it = first_worse.watched.made == time_of_values
        if not made_it:  # an earlier -Inf may be the cause
            first = min(sights, key=lambda sight: sight.watched.bad)
        yield _of_forward(first, sights, clock)
    else:
        is_compiled = run.ticker is not None
        yield from _after_the_last_measured(sights, clock, is_compiled)


def _steps_before(sight: Sight) -> Iterator[str]:
    """Describe the first bad call of a layer, and the numbers of the last calls before it."""
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
    """Return the number of rows, the numbers of their calls, and their values, as texts."""
    numbers = [str(row.call) for row in rows]
    values = [f"{row.value:.3g}" for row in rows]
    return {
        "calls": counted(len(rows), "measured call"),
        "numbers": ", ".join(numbers),
        "values": ", ".join(values),
    }


def _of_forward(
    first: Sight,
    sights: Sequence[Sight],
    clock: Clock,
) -> Finding:
    """Make the finding about bad values in a forward.

    The innermost layer whose input was finite has made the bad values. It is `first` or a module
    around `first`. If code between two layers made them, their parent is named. If no such layer
    is watched, `first` is named.

    Args:
        first: the layer that returned bad values first.
        sights: all watched layers.
        clock: the forwards that were measured.
    """

    def depth(sight: Sight) -> tuple[bool, int]:
        """Return a key for `max`, which prefers `first`, and then the innermost layer."""
        return sight is first, len(sight.site.name)

    makers = [sight for sight in sights if _made_bad_values(sight, first)]
    sight = max(makers, key=depth, default=first)

    bad = _bad_parameters(sights)
    gap = _gap_before(first, clock)
    # if the values became bad after the gap began, the first of them may have been in the gap
    if bad and gap is not None and first.watched.bad > gap.time:
        clock.closely = True  # measures each forward from now on
        return sight.finding(
            messages.BAD_OUTPUT_LATER,
            forward=gap.after,
            when=f"between forward {gap.before} and forward {gap.after}",
            parameters=listed(bad, 3),
        )

    more = ""
    if bad:
        more = f". Not finite now: {listed(bad, 3)}. Go back to a checkpoint"
    if bad and makers:
        more += ", and lower the learning rate or clip gradients (ClipGradNorm)"
    message = messages.MADE_BAD_VALUES if makers else messages.GOT_BAD_VALUES
    return sight.finding(
        message,
        bad=sight.watched.bad_calls,
        calls=sight.watched.measured,
        more=more,
    )


def _gap_before(first: Sight, clock: Clock) -> Gap | None:
    """Return the forwards before the first bad one that were not measured; None if all were."""
    watched = first.watched
    if not watched.gap:
        return clock.gap
    last_forward = max(clock.forwards, watched.compiled_calls)
    bad_forward = last_forward - watched.bad_ago
    last_measured = bad_forward - watched.gap - 1
    return Gap(
        before=last_measured,
        after=bad_forward,
        time=-1,  # before all bad values
    )


def _made_bad_values(sight: Sight, first: Sight) -> bool:
    """Return whether a layer made bad values from a finite input, and is or contains `first`."""
    watched = sight.watched
    is_bad = watched.bad < math.inf
    had_finite_input = watched.made == watched.bad
    if not (is_bad and had_finite_input):
        return False
    prefix = f"{sight.site.name}.".lstrip(".")  # "" for the model itself, which contains all
    names_of_first = (first.site.name, *first.site.aliases)
    return any(f"{name}.".startswith(prefix) for name in names_of_first)


def _after_the_last_measured(
    sights: Sequence[Sight],
    clock: Clock,
    compiled: bool,
) -> Iterator[Finding]:
    """Find NaN and Inf in parameters after forwards that were not measured.

    An update has put them there since the last measured forward. Therefore the first layer with
    bad values need not be the layer that made them.
    """
    last = clock.last
    forwards = clock.forwards
    if compiled:
        # between two looks, the clock does not count compiled forwards
        forwards = max(forwards, *(sight.watched.compiled_calls for sight in sights))
        last = forwards - max(sight.watched.unmeasured for sight in sights)
    if last == forwards:
        return

    bad = []
    first = None
    for sight in sights:
        if not sight.trainable:  # an update does not write a frozen layer
            continue
        names = _bad_parameters([sight])
        if names and first is None:
            first = sight
        bad += names

    if first is not None:
        clock.closely = True  # measures each forward from now on
        yield first.finding(
            messages.BAD_PARAMETERS_LATER,
            forward=forwards,
            when=f"after forward {last}",
            parameters=listed(bad, 3),
        )


def _bad_parameters(sights: Sequence[Sight]) -> list[str]:
    """Describe the parameters of the watched layers that are not finite."""
    bad = []
    for sight in sights:
        layer = sight.site.name or "the model"
        for name, p in sight.module.named_parameters(recurse=False):
            values = local_values(p).detach()
            if values.is_meta:
                continue
            if not torch.isfinite(values).all():
                bad.append(f"parameter '{name}' of {layer}")
    return bad
