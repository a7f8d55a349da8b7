"""What is wrong with a training as a whole: a rate that was always 0, a model only evaluated.

These findings come when an attachment is removed, or when the process ends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ..findings import Finding, Kind, Severity
from ..regularizers.base import Regularizer
from ..regularizers.foreign import Retune
from ..schedules import length_of, span_of, value_at
from ..sites.run import Run
from ..sites.site import Site
from ..tables import counted

_FEWEST = 10  # calls; with fewer, somebody only tries something
_MOST_TIMES = 1_000  # at which a schedule is asked


def find_at_end(run: Run, sites: Sequence[Site]) -> list[Finding]:
    """The findings about a training that has ended."""
    trained = [site for site in sites if site.counter.active >= _FEWEST]
    return find_zero_rates(run, trained) + _only_evaluated(run, sites)


def find_zero_rates(run: Run, sites: Iterable[Site]) -> list[Finding]:
    """A finding for each entry of the spec none of whose rates was ever above 0.

    The first rate of a `ByDepth` may be 0, so the other sites of the entry count as well. A rate
    that only rises later is no fault.
    """
    entries: dict[tuple[int, int], list[Site]] = defaultdict(list)
    for site in sites:
        if _is_off_at_zero(site.regularizer) and site.counter.active:
            entries[site.position].append(site)
    risen = {site.position for site in run.sites if site.rose or _will_rise(site)}
    found = []
    for position, members in entries.items():
        if position in risen:
            continue
        keys = tuple(site.key for site in members)
        calls = max(site.counter.active for site in members)
        text = f"the rate was 0 in each of {counted(calls, 'active call')}, so it changed nothing"
        cure = "Give it a rate, or a schedule that rises above 0, or leave it out of the spec"
        found.append(Finding(Kind.ZERO_RATE, Severity.WARNING, keys, text, cure, run.epoch))
    return found


def has_risen(rate: Any, t: float) -> bool:
    """Whether a rate is above 0 in an epoch before `t`."""
    return any(value_at(rate, each) != 0.0 for each in _some(0, math.ceil(t)))


def _is_off_at_zero(regularizer: Regularizer) -> bool:
    """Whether its main rate switches it off at 0, which somebody may not have meant."""
    if isinstance(regularizer, Retune):
        return callable(regularizer.p)  # a constant 0 switches a dropout of the model off
    name = next(iter(regularizer.rates), "")
    return regularizer.off.get(name) == 0.0 or (bool(name) and regularizer.idle_at_zero)


def _will_rise(site: Site) -> bool:
    """Whether the rate of a site is above 0 in an epoch to come, as far as its schedule tells."""
    rate = next(iter(site.regularizer.rates.values()), 0.0)
    length = length_of(rate)
    if not length or span_of(rate) == (0.0, 0.0):
        return False
    times = _some(math.floor(site.run.epoch) + 1, math.ceil(length) + 1)
    return any(value_at(rate, t) != 0.0 for t in times)


def _some(start: int, stop: int) -> Sequence[int]:
    """Whole numbers, at most `_MOST_TIMES` of them, with the last one."""
    return [*range(start, stop, max(1, (stop - start) // _MOST_TIMES)), *range(stop - 1, stop)]


def _only_evaluated(run: Run, sites: Iterable[Site]) -> list[Finding]:
    """The finding that the model never ran in training mode, where no ``step`` has told it."""
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
