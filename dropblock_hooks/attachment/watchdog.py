"""When the `Watchdog` sites of an attachment are judged, and how the findings are reported.

A look reads all sites at once, which waits for the device; between two looks nothing does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ..findings import Finding, Kind, tell
from ..observers.watchdog import Watchdog
from ..observers.watched import Clock
from ..selectors.wrappers import find_module
from ..sites.hooks import SiteHook
from ..sites.run import Run
from .rules import Looked, Sight, judge


def interval(hooks: Iterable[SiteHook]) -> int | None:
    """Return the smallest `every` of all `Watchdog` sites; 0 for never, None without any site."""
    found = [each.every or 0 for each in map(_observer, hooks) if each is not None]
    return min(filter(None, found), default=0) if found else None


def watch_forward(base: nn.Module, run: Run, hooks: Sequence[SiteHook], every: int) -> None:
    """Count a training forward of the model, and look at each n-th one."""
    clock = Clock.of(run.shared)
    clock.forwards += 1
    if clock.forwards >= every:
        tell_alerts(run, hooks, look_for_alerts(base, run, hooks))


def _observer(hook: SiteHook) -> Watchdog | None:
    observer = hook.site.regularizer
    return observer if isinstance(observer, Watchdog) else None


def look_at_step(
    base: nn.Module, run: Run, hooks: Sequence[SiteHook], ended: bool
) -> list[Finding]:
    """What there is to report when time moves: at the end of an epoch; within one, every so often.

    A trainer may move time at every batch, and never call the model itself but a part of it.
    """
    every = interval(hooks)
    if every is None:
        return []
    clock = Clock.of(run.shared)
    clock.steps += 1
    due = ended or 0 < every <= clock.steps
    return look_for_alerts(base, run, hooks) if due else []


def look_for_alerts(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """Judge all sites, and begin anew; the findings that hold and were not there before."""
    looked = _looked(base, run, hooks)
    if looked is None or not run.installed:
        return []
    clock = Clock.of(run.shared)
    clock.forwards = clock.steps = 0
    before, found = clock.alerts, _by_site(judge(looked))
    if not looked.has_statistics:  # what was found from statistics still holds
        found = {key: each for key, each in before.items() if key[1] != Kind.NONFINITE} | found
    if looked.has_calls:
        run.told -= before.keys() - found.keys()
        clock.alerts = found
    for sight in looked.sights:
        sight.site.bound.open["watched"].forget(statistics=looked.has_statistics)
    return [found[key] for key in found if key not in before and not _follows(key, before)]


def alerts_now(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """What holds: of the last look, and what has come since then. Reports nothing."""
    looked = _looked(base, run, hooks)
    if looked is None:
        return []
    before = Clock.of(run.shared).alerts
    found = _by_site(judge(looked)).items()
    return list((before | {k: each for k, each in found if not _follows(k, before)}).values())


def _by_site(findings: Iterable[Finding]) -> dict[tuple[str, str], Finding]:
    return {(each.sites[0], each.kind): each for each in findings}


def _follows(key: tuple[str, str], before: dict[tuple[str, str], Finding]) -> bool:
    """Whether it is NaN that came from NaN: no other layer is named until all is finite again."""
    return key[1] == Kind.NONFINITE and any(kind == Kind.NONFINITE for _, kind in before)


def _looked(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> Looked | None:
    """All sites, read at once; None where there is no `Watchdog`."""
    sites = [hook.site for hook in hooks if _observer(hook) is not None]
    if not sites:
        return None
    sights = []
    for site in sites:
        module = find_module(base, site.name)
        watched = site.bound.open["watched"]
        watched.read()
        if module is not None:
            sights.append(Sight(site, module, watched.kept, watched.peaks.tolist()))
    return Looked(base, run, sights)


def tell_alerts(run: Run, hooks: Iterable[SiteHook], findings: Iterable[Finding]) -> None:
    """Report findings as the `Watchdog` of their site was told to.

    Raises:
        WatchdogError: where that is to raise.
    """
    actions = {hook.site.key: dog.action for hook in hooks if (dog := _observer(hook))}
    groups: dict[object, list[Finding]] = {}
    for each in findings:
        groups.setdefault(actions[each.sites[0]], []).append(each)
    for action in sorted(groups, key=lambda action: action == "raise"):  # that comes last
        tell(groups[action], run.told, action)  # type: ignore[arg-type]  # a Watchdog's
