"""When the sites of a `Watchdog` are looked at, and how it reports what it has found."""

from collections.abc import Iterable, Sequence

from torch import nn

from ..findings import Finding, Kind, tell
from ..observers.watchdog import Watchdog
from ..observers.watched import Clock
from ..selectors.wrappers import find_module
from ..sites.hooks import SiteHook
from ..sites.run import Run
from .rules import Looked, Sight, first_cause, judge


def _watchdogs(hooks: Iterable[SiteHook]) -> dict[str, Watchdog]:
    """Every `Watchdog`, by the key of its site."""
    observers = {hook.site.key: hook.site.regularizer for hook in hooks}
    return {key: each for key, each in observers.items() if isinstance(each, Watchdog)}


def interval(hooks: Iterable[SiteHook]) -> int | None:
    """Return the smallest `every` of all `Watchdog` sites; 0 for never, None without any site."""
    found = [dog.every or 0 for dog in _watchdogs(hooks).values()]
    return min(filter(None, found), default=0) if found else None


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
    return look_for_alerts(base, run, hooks) if ended or 0 < every <= clock.steps else []


def look_for_alerts(
    base: nn.Module, run: Run, hooks: Sequence[SiteHook], statistics: bool = True
) -> list[Finding]:
    """Judge all sites, and begin anew; the findings that hold and were not there before.

    Without `statistics`, only values that are not finite are judged.
    """
    looked = _looked(base, run, hooks, statistics)
    if looked is None or not run.installed:
        return []
    clock = Clock.of(run.shared)
    if statistics:
        clock.waiting = clock.steps = 0
    before, found = clock.alerts, _by_site(judge(looked))
    if not looked.has_statistics:  # what was found from statistics still holds
        found = {key: each for key, each in before.items() if key[1] != Kind.NONFINITE} | found
    if looked.has_calls:
        run.told -= before.keys() - found.keys()
        clock.alerts = found
    for sight in looked.sights:
        sight.site.bound.open["watched"].forget(statistics=looked.has_statistics)
    news = [found[key] for key in found if key not in before and not _follows(key, before)]
    return first_cause(news, looked)


def alerts_now(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """What holds: of the last look, and what has come since then. Reports nothing."""
    looked = _looked(base, run, hooks)
    if looked is None:
        return []
    before = Clock.of(run.shared).alerts
    found = _by_site(judge(looked)).items()
    held = before | {k: each for k, each in found if not _follows(k, before)}
    return first_cause(list(held.values()), looked)


def _by_site(findings: Iterable[Finding]) -> dict[tuple[str, str], Finding]:
    return {(each.sites[0], each.kind): each for each in findings}


def _follows(key: tuple[str, str], before: dict[tuple[str, str], Finding]) -> bool:
    """Whether it is NaN that came from NaN: no other layer is named until all is finite again."""
    return key[1] == Kind.NONFINITE and any(kind == Kind.NONFINITE for _, kind in before)


def _looked(
    base: nn.Module, run: Run, hooks: Sequence[SiteHook], statistics: bool = True
) -> Looked | None:
    """All sites, read at once, which waits for the device; None where there is no `Watchdog`."""
    dogs = _watchdogs(hooks)
    sights = []
    for site in (hook.site for hook in hooks if hook.site.key in dogs):
        module = find_module(base, site.name)
        watched = site.bound.open["watched"]
        watched.read()
        if module is not None:
            sights.append(Sight(site, module, watched))
    return Looked(base, run, sights, statistics) if dogs else None


def tell_alerts(run: Run, hooks: Iterable[SiteHook], findings: Iterable[Finding]) -> None:
    """Report findings as the `Watchdog` of their site was told to.

    Raises:
        WatchdogError: where that is to raise.
    """
    dogs = _watchdogs(hooks)
    groups: dict[object, list[Finding]] = {}
    for each in findings:
        groups.setdefault(dogs[each.sites[0]].action, []).append(each)
    for action in sorted(groups, key=lambda action: action == "raise"):  # that comes last
        tell(groups[action], run.told, action)  # type: ignore[arg-type]  # a Watchdog's
