"""Finds what is wrong with a training as a whole: rates that were always 0, no training forward.

These findings are reported when an attachment is removed, or when the process ends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from ..findings import Finding, Kind, Severity
from ..regularizers.base import Regularizer
from ..regularizers.foreign import Retune
from ..schedules import length_of, span_of, value_at
from ..sites.run import Run
from ..sites.site import Site
from ..tables import counted

_FEWEST = 10  # with fewer calls, somebody only tries something
_MOST_TIMES = 1_000  # a schedule is evaluated at so many times


def find_at_end(run: Run, sites: Sequence[Site]) -> list[Finding]:
    """Find what is wrong with a training that has ended."""
    trained = [site for site in sites if site.counter.active >= _FEWEST]
    return find_zero_rates(run, trained) + _only_evaluated(run, sites)


def find_zero_rates(run: Run, sites: Iterable[Site]) -> list[Finding]:
    """Find the entries of the spec none of whose rates was ever above 0.

    The first rate of a `ByDepth` may be 0, so the other sites of the entry count as well. A rate
    that only rises later is no fault.
    """
    entries: dict[tuple[int, int], list[Site]] = defaultdict(list)
    for site in sites:
        if _is_off_at_zero(site.regularizer) and site.counter.active:
            entries[site.position].append(site)
    risen = {site.position for site in run.sites if site.rose or _will_rise(site)}

    findings = []
    for position, members in entries.items():
        if position in risen:
            continue
        keys = tuple(site.key for site in members)
        calls = max(site.counter.active for site in members)
        text = f"the rate was 0 in each of {counted(calls, 'active call')}, so it changed nothing"
        cure = "Give it a rate, or a schedule that rises above 0, or leave it out of the spec"
        findings.append(Finding(Kind.ZERO_RATE, Severity.WARNING, keys, text, cure, run.epoch))
    return findings


def has_risen(rate: Any, t: float) -> bool:
    """Return whether a rate is above 0 in an epoch before `t`."""
    return _is_ever_above_zero(rate, start=0, stop=math.ceil(t))


def _is_off_at_zero(regularizer: Regularizer) -> bool:
    """Return whether a main rate of 0 switches the regularizer off, which may not be meant."""
    if isinstance(regularizer, Retune):
        return callable(regularizer.p)  # a constant 0 switches a dropout of the model off
    main_rate = next(iter(regularizer.rates), "")
    if regularizer.off.get(main_rate) == 0.0:
        return True
    return bool(main_rate) and regularizer.idle_at_zero


def _will_rise(site: Site) -> bool:
    """Return whether the rate of a site is above 0 in a later epoch of its schedule."""
    rate = next(iter(site.regularizer.rates.values()), 0.0)
    length = length_of(rate)
    if not length or span_of(rate) == (0.0, 0.0):
        return False
    next_epoch = math.floor(site.run.epoch) + 1
    return _is_ever_above_zero(rate, start=next_epoch, stop=math.ceil(length) + 1)


def _is_ever_above_zero(rate: Any, start: int, stop: int) -> bool:
    """Return whether a rate is above 0 at some epoch from `start` on and before `stop`.

    A long schedule is evaluated at about `_MOST_TIMES` epochs, and at the last one.
    """
    step = max(1, (stop - start) // _MOST_TIMES)
    last = range(stop - 1, stop)
    epochs = chain(range(start, stop, step), last)
    return any(value_at(rate, epoch) != 0.0 for epoch in epochs)


def _only_evaluated(run: Run, sites: Iterable[Site]) -> list[Finding]:
    """Find out whether the model never ran in training mode, if nobody has called ``step``."""
    forwards = run.counter.life()
    if run.stepped or run.switched or forwards.trained or forwards.evaluated < _FEWEST:
        return []
    if any(site.counter.active or site.counter.trained for site in sites):
        return []

    text = (
        f"the model ran {counted(forwards.evaluated, 'forward')} in evaluation mode and none in "
        "training mode, so nothing acted"
    )
    cure = "Call model.train() before training, or use active='always'"
    return [Finding(Kind.NOT_TRAINED, Severity.WARNING, (), text, cure, run.epoch)]
