"""The state of an attachment as plain numbers and text, and back."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import as_number
from ..sites.counter import Snapshot
from ..sites.run import Run
from ..sites.site import Site
from ..warn import warn

_VERSION = 3
Taken = Mapping[Site, tuple[Snapshot, Snapshot]]
"""The saved counts, and the elements of the open window, by site."""


def save(sites: Sequence[Site], run: Run) -> dict[str, Any]:
    """Epoch, counts, and the elements counted in this epoch."""
    return {
        "version": _VERSION,
        "epoch": run.epoch,
        "epochs": run.epochs or 0,
        "stepped": run.stepped,
        "forwards": run.counter.life().calls,
        "sites": {site.key: _saved(site) for site in sites},
    }


def _saved(site: Site) -> dict[str, Any]:
    life = site.counter.read().life()
    return {
        "regularizer": repr(site.regularizer),
        "calls": life.calls,
        "active_calls": life.active,
        **_elements(life),
        "window": _elements(site.counter.window()),
    }


def _elements(counted: Snapshot) -> dict[str, Any]:
    return {name: getattr(counted, name) for name in ("affected", "total", "expected")}


def load(
    state: Mapping[str, Any], sites: Sequence[Site], strict: bool, epochs: int | None
) -> tuple[float, Taken]:
    """The epoch of a state, and the counts for these sites; changes nothing yet.

    A schedule that takes its length from the training (`epochs`) is the same in a longer one. A
    state that is damaged or, where `strict`, of another spec is a ValueError.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != _VERSION:
        raise ValueError(
            f"this is not the state_dict of an Attachment in version {_VERSION}: its version is "
            f"{version}"
        )
    here = {site.key: repr(site.regularizer) for site in sites}
    there: dict[str, str] = {}
    found: dict[str, tuple[Snapshot, Snapshot]] = {}
    try:
        epoch = as_number("epoch", state["epoch"])
        for key, each in state["sites"].items():
            there[key] = str(each["regularizer"])
            calls, active = int(each["calls"]), int(each["active_calls"])
            life = _snapshot(each)._replace(trained=calls, active=active)
            found[key] = life, _snapshot(each["window"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the state of the Attachment is damaged: {error!r}") from error
    different = [
        f"  - {key}: the state has {there.get(key, 'none')}, the model has {here.get(key, 'none')}"
        for key in here | there
        if there.get(key) != here.get(key)
        and _timeless(there.get(key), state.get("epochs")) != _timeless(here.get(key), epochs)
    ]
    if strict and different:
        lines = "\n".join(different)
        raise ValueError(f"the state is of another spec (strict=False takes what fits):\n{lines}")
    taken = {site: found[site.key] for site in sites if site.key in found}
    if sites and not taken:
        warn("the state has none of these sites, so only its epoch is restored")
    return epoch, taken


def _timeless(regularizer: str | None, epochs: int | None) -> str | None:
    """The text of a regularizer, without lengths of schedules that follow the training."""

    def length(found: re.Match[str]) -> str:
        rest = (epochs or 0) - math.ceil(float(found[3] or 0))
        own = float(found[1]) != (rest or 1)
        return found[0] if own else f"epochs=all{found[2] or ''}"

    return regularizer and re.sub(r"epochs=([^,)]+)(, delay=([^,)]+))?", length, regularizer)


def _snapshot(saved: Mapping[str, Any]) -> Snapshot:
    affected, total = int(saved["affected"]), int(saved["total"])
    return Snapshot(affected=affected, total=total, expected=float(saved["expected"]))


def restore(state: Mapping[str, Any], taken: Taken, run: Run) -> None:
    """Take over the counts of a state that was loaded, and begin a new window."""
    run.stepped = bool(state.get("stepped", True))
    run.counter.restore(Snapshot(trained=int(state.get("forwards", 0))), Snapshot())
    for site, counts in taken.items():
        site.counter.restore(*counts)
    run.looked, run.fresh = False, True
