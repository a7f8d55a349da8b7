"""What `Watchdog` sites have seen, looked at for all of them together, and told.

A look reads all sites at once, which waits for the device; between two looks nothing does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..observers.watchdog import Watchdog
from ..observers.watched import Clock
from ..quoting import described
from ..registry import text
from ..selectors.wrappers import find_module
from ..sites.counts import numbers_of
from ..sites.hooks import SiteHook
from ..sites.nested import Nested
from ..sites.shared import Control
from ..warn import warn
from .finding import Alert, WatchdogError
from .maker import Sight
from .rules import Looked, alerts_of


@dataclass(frozen=True)
class Watching:
    """When to look, among the forwards of a model; 0 for never."""

    every: int

    @classmethod
    def of(cls, hooks: Iterable[SiteHook]) -> Watching | None:
        """That of the `Watchdog` sites; None where there are none."""
        found = [each.every or 0 for each in map(_observer, hooks) if each is not None]
        return cls(min(filter(None, found), default=0)) if found else None

    def pass_forward(
        self, base: nn.Module, control: Control, hooks: Sequence[SiteHook], given: Sequence[Any]
    ) -> None:
        """Count a training forward of the model, and look where it is time.

        `given` is what the model took and gave: the tensor with the fewest entries has its samples.
        """
        clock = Clock.of(control.shared)
        clock.forwards += 1
        clock.calls += 1
        clock.samples += min((len(x) for x in Nested(given).tensors if x.ndim), default=1)
        if self.every and clock.forwards >= self.every:
            tell_alerts(control, look_for_alerts(base, control, hooks))


def _observer(hook: SiteHook) -> Watchdog | None:
    observer = hook.site.regularizer
    return observer if isinstance(observer, Watchdog) else None


def look_at_step(
    base: nn.Module, control: Control, hooks: Sequence[SiteHook], ended: bool
) -> list[Alert]:
    """What there is to tell when time moves: as an epoch ends; within one, as of forwards.

    A trainer may move it at every batch, and never call the model itself, but a part of it.
    """
    watching = Watching.of(hooks)
    if watching is None:
        return []
    clock = Clock.of(control.shared)
    clock.steps += 1
    due = ended or 0 < watching.every <= clock.steps
    return look_for_alerts(base, control, hooks) if due else []


def look_for_alerts(base: nn.Module, control: Control, hooks: Sequence[SiteHook]) -> list[Alert]:
    """What there is to tell: each once for a layer and rule, until it has gone away in between."""
    looked = _looked(base, control, hooks)
    if looked is None or not control.installed:
        return []
    clock = Clock.of(control.shared)
    clock.forwards = clock.steps = 0
    found = {(each.key, each.kind): each for each in alerts_of(looked)}
    before = clock.alerts
    if not looked.has_statistics:  # of these, what was found still holds
        found = {key: each for key, each in before.items() if key[1] != "nonfinite"} | found
    if looked.has_calls:
        clock.alerts = found
    for sight in looked.sights:
        watched = sight.site.bound
        watched.forget(statistics=looked.has_statistics)
    kinds = {kind for _, kind in before}
    return [
        alert
        for key, alert in found.items()
        # what follows from NaN is more NaN: other layers are named once it has gone away
        if key not in before and not (key[1] == "nonfinite" and key[1] in kinds)
    ]


def alerts_now(base: nn.Module, control: Control, hooks: Sequence[SiteHook]) -> list[Alert]:
    """What holds: of the last look, and what has come since then. Tells nothing."""
    looked = _looked(base, control, hooks)
    if looked is None:
        return []
    before = Clock.of(control.shared).alerts
    known = {kind for _, kind in before}
    found = {(each.key, each.kind): each for each in alerts_of(looked)}
    news = {
        key: each for key, each in found.items() if key[1] != "nonfinite" or key[1] not in known
    }
    return list((before | news).values())


def _looked(base: nn.Module, control: Control, hooks: Sequence[SiteHook]) -> Looked | None:
    """All sites, read at once; None where there is no `Watchdog`."""
    sites = [hook.site for hook in hooks if _observer(hook) is not None]
    watches = [site.bound for site in sites]
    if not watches:
        return None
    numbers = numbers_of([tensor for watch in watches for tensor in watch.tensors()])
    sights = []
    for site, watch in zip(sites, watches, strict=True):
        module = find_module(base, site.name)
        if module is not None:
            sights.append(Sight(site, module, *watch.kept_of(numbers)))
    return Looked(base, control, sights, [hook.site for hook in hooks])


def tell_alerts(control: Control, alerts: Sequence[Alert]) -> None:
    """Do what the `Watchdog` of each was told to do.

    Raises:
        WatchdogError: where that is to raise.
    """
    by_action: dict[object, list[Alert]] = {}
    for alert in alerts:
        by_action.setdefault(alert.action, []).append(alert)
    raising = by_action.pop("raise", [])
    for action, group in by_action.items():
        if action == "warn":
            warn("\n".join(["watchdog:", *(f"  - {each}" for each in group)]))
        else:
            _call(control, action, group)
    if raising:
        raise WatchdogError(raising)


def _call(control: Control, action: object, alerts: Sequence[Alert]) -> None:
    """Call somebody's function; where that fails, the training goes on."""
    for alert in alerts:
        try:
            action(alert)  # type: ignore[operator]  # the Watchdog has asked
        except Exception as error:  # somebody's code may raise anything
            key = (text(action), "watchdog_action")
            if key not in control.told:
                control.told.add(key)
                warn(
                    f"the Watchdog's action {key[0]} failed, and the training goes on: "
                    f"{described(error)}; it was called with: {alert}"
                )
