"""The state of an attachment as plain numbers and text, and back."""

import copy
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..checks import NON_NEGATIVE, as_number
from ..findings import Finding, Kind, Severity, tell
from ..observers.base import Watch
from ..regularizers.base import Regularizer
from ..regularizers.foreign import Foreign
from ..sites.counter import Snapshot
from ..sites.run import Run
from ..sites.site import Site
from ..warn import warn

_VERSION = 3
_ELEMENTS = {"affected": int, "total": int, "expected": float}


class Saved(NamedTuple):
    """A state that was read and fits; of each site the totals and the open window, by key."""

    epoch: float
    stepped: bool
    forwards: int
    counts: dict[str, tuple[Snapshot, Snapshot]]
    memories: dict[str, Any]  # of the sites whose regularizer has a memory, by key


def save(sites: Sequence[Site], run: Run) -> dict[str, Any]:
    run.take_counts()
    counts = {}
    for site in sites:
        life = site.tally.read().life()
        counts[site.key] = {
            "regularizer": repr(site.regularizer),
            "calls": life.calls,
            "active_calls": life.active,
            **_elements(life._asdict()),
            "window": _elements(site.tally.window()._asdict()),
        }
        if hasattr(site.bound, "state_dict") and not isinstance(site.bound, Watch):
            counts[site.key]["memory"] = copy.deepcopy(site.bound.state_dict())
    tell(_not_saved(sites, run), run.told)
    return {
        "version": _VERSION,
        "epoch": run.epoch,
        "epochs": run.epochs or 0,
        "stepped": run.stepped,
        "forwards": run.counter.life().calls,
        "sites": counts,
    }


def _not_saved(sites: Sequence[Site], run: Run) -> list[Finding]:
    """A finding if what `Regularizer.bind` returns may keep what the state does not have."""
    keys = []
    for site in sites:
        bound, cls = site.bound, type(site.regularizer)
        known = cls.bind is Regularizer.bind or isinstance(site.regularizer, Foreign)
        if known or isinstance(bound, Watch) or hasattr(bound, "state_dict"):
            continue
        plain = isinstance(bound, types.FunctionType) and bound.__closure__ is None
        if not plain and getattr(bound, "__self__", None) is not site.regularizer:
            keys.append(site.key)
    if not keys:
        return []
    text = "what its bind() keeps between calls is not in the state, so a resumed training differs"
    cure = (
        "Return an object from bind() that has state_dict() and load_state_dict(state); without a "
        "memory, let state_dict() return {}"
    )
    return [Finding(Kind.NOT_SAVED, Severity.WARNING, tuple(keys), text, cure, run.epoch)]


def _elements(counts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: number(counts[name]) for name, number in _ELEMENTS.items()}


def _counts(saved: Mapping[str, Any]) -> tuple[Snapshot, Snapshot]:
    calls, active = int(saved["calls"]), int(saved["active_calls"])
    window = Snapshot(**_elements(saved["window"]))
    return Snapshot(trained=calls, active=active, **_elements(saved)), window


def check(state: Any, sites: Sequence[Site], run: Run, strict: bool) -> Saved:
    """Read a state, and change nothing; ValueError if it is damaged or, if `strict`, does not fit.

    A schedule that takes its length from the training is the same in a longer one.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != _VERSION:
        raise ValueError(
            f"this is not the state_dict of an Attachment in version {_VERSION}: its version is "
            f"{version}"
        )
    here = {site.key: repr(site.regularizer) for site in sites}
    try:
        epoch = as_number("epoch", state["epoch"], allowed=NON_NEGATIVE)
        epochs, forwards, stepped = int(state["epochs"]), int(state["forwards"]), state["stepped"]
        there = {key: str(saved["regularizer"]) for key, saved in state["sites"].items()}
        counts = {key: _counts(saved) for key, saved in state["sites"].items()}
        memories = {k: saved["memory"] for k, saved in state["sites"].items() if "memory" in saved}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the state of the Attachment is damaged: {error!r}") from error
    different = []
    for key in here | there:
        theirs, ours = there.get(key, "none"), here.get(key, "none")
        if theirs != ours and _timeless(theirs, epochs) != _timeless(ours, run.epochs):
            different.append(f"  - {key}: the state has {theirs}, the model has {ours}")
    if strict and different:
        lines = "\n".join(different)
        raise ValueError(f"the state is of another spec (strict=False takes what fits):\n{lines}")
    if here and here.keys().isdisjoint(there):
        warn("the state has none of these sites, so only its epoch is restored")
    return Saved(epoch, bool(stepped), forwards, counts, memories)


def _timeless(regularizer: str, epochs: int | None) -> str:
    """The text of a regularizer, without lengths of schedules that follow the training."""

    def length(found: re.Match[str]) -> str:
        rest = (epochs or 0) - math.ceil(float(found[3] or 0))
        own = float(found[1]) != (rest or 1)
        return found[0] if own else f"epochs=all{found[2] or ''}"

    return re.sub(r"epochs=([^,)]+)(, delay=([^,)]+))?", length, regularizer)


def restore(saved: Saved, sites: Sequence[Site], run: Run) -> None:
    """Take over the counts of a state, and begin a new window."""
    run.take_counts()
    run.stepped = saved.stepped
    run.counter.restore(Snapshot(trained=saved.forwards), Snapshot())
    for site in sites:
        if site.key in saved.counts:
            site.tally.restore(*saved.counts[site.key])
        if site.key in saved.memories and hasattr(site.bound, "load_state_dict"):
            site.bound.load_state_dict(copy.deepcopy(saved.memories[site.key]))
    run.looked, run.fresh = False, True
