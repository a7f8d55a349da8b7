"""Finds the faults of a whole training, such as a rate that was always 0.

`at_end` reports them. Others ask some of these functions earlier: `verify`, the title of the
report, `ForwardChecks` and ``load_state_dict``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from .. import messages
from ..findings import Finding
from ..regularizers.base import Regularizer
from ..regularizers.foreign import Retune
from ..schedules import length_of, span_of, value_at
from ..sites.run import Run
from ..sites.site import LiveSite
from ..tables import counted

_FEWEST = 10  # fewer calls are a trial, not a training
_MOST_TIMES = 1_000  # a schedule is evaluated at so many times


def find_forgotten(run: Run, sites: Sequence[LiveSite]) -> list[Finding]:
    """Find likely mistakes after a training.

    These are calls of ``step`` that are missing, or else rates that were always 0, and a model that
    never ran in training mode.
    """
    findings = not_stepped(sites)
    if findings:
        return findings

    trained = []
    for site in sites:
        if site.counter.active >= _FEWEST:
            trained.append(site)

    zero_rates = find_zero_rates(run, trained)
    only_evaluated = _only_evaluated(run, sites)
    return zero_rates + only_evaluated


def find_zero_rates(run: Run, sites: Iterable[LiveSite]) -> list[Finding]:
    """Find the entries of the spec whose rates were always 0.

    The first rate of a `ByDepth` may be 0, so the other sites of the entry count as well. A rate
    that only rises later is no fault.
    """
    entries: dict[tuple[int, int], list[LiveSite]] = defaultdict(list)
    for site in sites:
        if _is_off_at_zero(site.regularizer) and site.counter.active:
            entries[site.position].append(site)

    risen = set()
    for site in run.sites:
        if site.rose or _will_rise(site):
            risen.add(site.position)

    findings = []
    for position, members in entries.items():
        if position in risen:
            continue
        keys = [site.key for site in members]
        most_calls = max(site.counter.active for site in members)
        finding = messages.ZERO_RATE.finding(
            *keys,
            epoch=run.epoch,
            calls=counted(most_calls, "active call"),
        )
        findings.append(finding)
    return findings


def has_risen(rate: Any, t: float) -> bool:
    """Return whether a rate is above 0 in an epoch before `t`.

    ``load_state_dict`` asks this about the epochs of the saved training.
    """
    stop = math.ceil(t)
    return _is_ever_above_zero(rate, start=0, stop=stop)


def not_stepped(sites: Iterable[LiveSite]) -> list[Finding]:
    """Find the first site whose rate follows a schedule, if ``step`` was never called."""
    for site in sites:
        is_waiting = site.moves and not site.run.stepped
        if is_waiting and site.counter.trained:
            finding = messages.NOT_STEPPED.finding(
                epoch=site.run.epoch,
                key=site.key,
                rate=site.rate,
                calls=site.calls,
            )
            return [finding]
    return []


def _is_off_at_zero(regularizer: Regularizer) -> bool:
    """Return whether a main rate of 0 switches the regularizer off, which may be a mistake."""
    if isinstance(regularizer, Retune):
        # the user writes a constant 0 to switch a dropout of the model off
        return callable(regularizer.p)

    names = iter(regularizer.rates)
    main_rate = next(names, "")
    if not main_rate:
        return False
    if regularizer.off.get(main_rate) == 0.0:
        return True
    return regularizer.idle_at_zero


def _will_rise(site: LiveSite) -> bool:
    """Return whether the rate of a site is above 0 in a later epoch of its schedule."""
    rates = iter(site.regularizer.rates.values())
    main_rate = next(rates, 0.0)
    length = length_of(main_rate)
    if not length:
        return False
    if span_of(main_rate) == (0.0, 0.0):  # always 0
        return False

    next_epoch = math.floor(site.run.epoch) + 1
    last_epoch = math.ceil(length)
    return _is_ever_above_zero(
        main_rate,
        start=next_epoch,
        stop=last_epoch + 1,
    )


def _is_ever_above_zero(rate: Any, start: int, stop: int) -> bool:
    """Return whether a rate is above 0 at some epoch from `start` on and before `stop`.

    A long schedule is evaluated at about `_MOST_TIMES` epochs, and at the last one.
    """
    length = stop - start
    if length <= 0:
        return False
    step = math.ceil(length / _MOST_TIMES)
    some_epochs = range(start, stop, step)
    last_epoch = stop - 1
    epochs_to_check = chain(some_epochs, [last_epoch])
    return any(value_at(rate, epoch) != 0.0 for epoch in epochs_to_check)


def _only_evaluated(run: Run, sites: Iterable[LiveSite]) -> list[Finding]:
    """Find a model that never ran in training mode, unless a ``step`` has reported this."""
    if run.switched:  # `always`, `paused` or `enabled` was used
        return []
    forwards = run.counter.life()
    in_open_window = run.counter.window().evaluated
    # if an epoch has ended whose forwards were all in evaluation mode, `step` has reported it
    was_reported = run.stepped and in_open_window < forwards.evaluated
    if was_reported:
        return []
    if forwards.trained or forwards.failed or forwards.evaluated < _FEWEST:
        return []
    if any(site.counter.active or site.counter.trained for site in sites):
        return []

    finding = messages.NEVER_TRAINED.finding(
        epoch=run.epoch,
        forwards=counted(forwards.evaluated, "forward"),
    )
    return [finding]
