"""Finds what is wrong with a training as a whole, such as a rate that was always 0.

These findings are reported when an attachment is removed, or when the process ends.
"""

from __future__ import annotations

import atexit
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any
from weakref import WeakSet

from .. import messages
from ..findings import Finding, tell
from ..regularizers.base import Regularizer
from ..regularizers.foreign import Retune
from ..schedules import length_of, span_of, value_at
from ..sites.model_hook import ModelHook
from ..sites.run import Run
from ..sites.site import LiveSite
from ..tables import counted

_FEWEST = 10  # fewer calls are a trial, not a training
_MOST_TIMES = 1_000  # a schedule is evaluated at so many times


_installed: WeakSet[ModelHook] = WeakSet()
"""The hooks of all attachments. Copies are not in it, because they may be averages of weights."""


def remember_until_exit(hook: ModelHook) -> None:
    """Remember an attachment, because a script may end without `remove` or ``verify``."""
    _installed.add(hook)


@atexit.register
def tell_at_exit() -> None:
    """Warn of what a script has forgotten, for the attachments that it has not removed."""
    for model_hook in list(_installed):
        run = model_hook.run
        if run.installed and model_hook.model is not None:
            sites = [hook.site for hook in model_hook.hooks]
            tell(find_forgotten(run, sites), run.told)


def find_forgotten(run: Run, sites: Sequence[LiveSite]) -> list[Finding]:
    """Find what the user has forgotten, when a training has ended."""
    return not_stepped(sites) or _find_at_end(run, sites)


def _find_at_end(run: Run, sites: Sequence[LiveSite]) -> list[Finding]:
    """Find rates that were always 0, and a model that never ran in training mode."""
    trained = [site for site in sites if site.counter.active >= _FEWEST]
    return find_zero_rates(run, trained) + _only_evaluated(run, sites)


def find_zero_rates(run: Run, sites: Iterable[LiveSite]) -> list[Finding]:
    """Find the entries of the spec none of whose rates was ever above 0.

    The first rate of a `ByDepth` may be 0, so the other sites of the entry count as well. A rate
    that only rises later is no fault.
    """
    entries: dict[tuple[int, int], list[LiveSite]] = defaultdict(list)
    for site in sites:
        if _is_off_at_zero(site.regularizer) and site.counter.active:
            entries[site.position].append(site)
    risen = {site.position for site in run.sites if site.rose or _will_rise(site)}

    findings = []
    for position, members in entries.items():
        if position in risen:
            continue
        keys = [site.key for site in members]
        calls = counted(max(site.counter.active for site in members), "active call")
        findings.append(messages.ZERO_RATE.finding(*keys, epoch=run.epoch, calls=calls))
    return findings


def has_risen(rate: Any, t: float) -> bool:
    """Return whether a rate is above 0 in an epoch before `t`."""
    return _is_ever_above_zero(rate, start=0, stop=math.ceil(t))


def not_stepped(sites: Iterable[LiveSite]) -> list[Finding]:
    """Find out whether a schedule is moving and nobody has called ``step``."""
    for site in sites:
        if site.moves and site.counter.trained and not site.run.stepped:
            values = {"key": site.key, "rate": site.rate, "calls": site.calls}
            return [messages.NOT_STEPPED.finding(epoch=site.run.epoch, **values)]
    return []


def _is_off_at_zero(regularizer: Regularizer) -> bool:
    """Return whether a main rate of 0 switches the regularizer off, which may not be meant."""
    if isinstance(regularizer, Retune):
        return callable(regularizer.p)  # a constant 0 switches a dropout of the model off
    main_rate = next(iter(regularizer.rates), "")
    if regularizer.off.get(main_rate) == 0.0:
        return True
    return bool(main_rate) and regularizer.idle_at_zero


def _will_rise(site: LiveSite) -> bool:
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


def _only_evaluated(run: Run, sites: Iterable[LiveSite]) -> list[Finding]:
    """Find out whether the model never ran in training mode, if nobody has called ``step``."""
    forwards = run.counter.life()
    if run.stepped or run.switched or forwards.trained or forwards.evaluated < _FEWEST:
        return []
    if any(site.counter.active or site.counter.trained for site in sites):
        return []

    count = counted(forwards.evaluated, "forward")
    return [messages.NEVER_TRAINED.finding(epoch=run.epoch, forwards=count)]
