"""The state of an attachment as plain numbers and text, and back."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..sites.counter import Snapshot
from ..sites.run import Run
from ..sites.site import Site
from ..warn import warn

_VERSION = 3


def save(sites: Sequence[Site], run: Run) -> dict[str, Any]:
    counts = {}
    for site in sites:
        life = site.counter.read().life()
        counts[site.key] = {
            "regularizer": repr(site.regularizer),
            "calls": life.calls,
            "active_calls": life.active,
            **_elements(life._asdict()),
            "window": _elements(site.counter.window()._asdict()),
        }
    return {
        "version": _VERSION,
        "epoch": run.epoch,
        "epochs": run.epochs or 0,
        "stepped": run.stepped,
        "forwards": run.counter.life().calls,
        "sites": counts,
    }


def _elements(counts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: counts[name] for name in ("affected", "total", "expected")}


def check(state: Any, sites: Sequence[Site], run: Run, strict: bool) -> None:
    """Raise ValueError for a state of other sites; warn of a state of none of these sites.

    A schedule that takes its length from the training is the same in a longer one.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != _VERSION:
        raise ValueError(
            f"this is not the state_dict of an Attachment in version {_VERSION}: its version is "
            f"{version}"
        )
    here = {site.key: repr(site.regularizer) for site in sites}
    there = {key: saved["regularizer"] for key, saved in state["sites"].items()}
    different = []
    for key in here | there:
        theirs, ours = there.get(key, "none"), here.get(key, "none")
        if theirs != ours and _timeless(theirs, state["epochs"]) != _timeless(ours, run.epochs):
            different.append(f"  - {key}: the state has {theirs}, the model has {ours}")
    if strict and different:
        lines = "\n".join(different)
        raise ValueError(f"the state is of another spec (strict=False takes what fits):\n{lines}")
    if here and here.keys().isdisjoint(there):
        warn("the state has none of these sites, so only its epoch is restored")


def _timeless(regularizer: str, epochs: int | None) -> str:
    """The text of a regularizer, without lengths of schedules that follow the training."""

    def length(found: re.Match[str]) -> str:
        rest = (epochs or 0) - math.ceil(float(found[3] or 0))
        own = float(found[1]) != (rest or 1)
        return found[0] if own else f"epochs=all{found[2] or ''}"

    return re.sub(r"epochs=([^,)]+)(, delay=([^,)]+))?", length, regularizer)


def restore(state: Mapping[str, Any], sites: Sequence[Site], run: Run) -> None:
    """Take over the counts of a checked state, and begin a new window."""
    run.stepped = state["stepped"]
    run.counter.restore(Snapshot(trained=state["forwards"]), Snapshot())
    for site in sites:
        if saved := state["sites"].get(site.key):
            calls, active = saved["calls"], saved["active_calls"]
            life = Snapshot(trained=calls, active=active, **_elements(saved))
            site.counter.restore(life, Snapshot(**_elements(saved["window"])))
    run.looked, run.fresh = False, True
