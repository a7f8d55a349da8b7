"""The state of an attachment as plain numbers and text, and back."""

import copy
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import messages
from ..checks import NON_NEGATIVE, as_number
from ..findings import Finding, tell
from ..observers.base import Watch
from ..regularizers.base import Regularizer
from ..regularizers.foreign import Foreign
from ..sites.counter import Snapshot
from ..sites.run import Run
from ..sites.site import Site
from ..warn import warn

_VERSION = 3
_ELEMENTS = {"affected": int, "total": int, "expected": float}  # counts, and how they are read


class Saved(NamedTuple):
    """A state that was read, with its parts by the keys of the sites."""

    epoch: float
    epochs: int  # the length of the training, 0 if it was not given
    stepped: bool
    forwards: int
    regularizers: dict[str, str]  # their reprs
    counts: dict[str, tuple[Snapshot, Snapshot]]  # the totals and the open window
    memories: dict[str, Any]  # of the sites whose regularizer has a memory


def save(sites: Sequence[Site], run: Run) -> dict[str, Any]:
    """Return the state of an attachment as plain numbers and text."""
    run.take_counts()
    saved_sites = {site.key: _saved_site(site) for site in sites}
    tell(_not_saved(sites, run), run.told)
    return {
        "version": _VERSION,
        "epoch": run.epoch,
        "epochs": run.epochs or 0,
        "stepped": run.stepped,
        "forwards": run.counter.life().calls,
        "sites": saved_sites,
    }


def _saved_site(site: Site) -> dict[str, Any]:
    """Return the state of a site."""
    life = site.tally.read().life()
    window = site.tally.window()
    saved = {
        "regularizer": repr(site.regularizer),
        "calls": life.calls,
        "active_calls": life.active,
        **_elements(life._asdict()),
        "window": _elements(window._asdict()),
    }
    if hasattr(site.bound, "state_dict") and not isinstance(site.bound, Watch):
        saved["memory"] = copy.deepcopy(site.bound.state_dict())
    return saved


def _not_saved(sites: Sequence[Site], run: Run) -> list[Finding]:
    """Find the sites whose regularizer may have a memory that is not in the state."""
    keys = [site.key for site in sites if _may_forget(site)]
    if not keys:
        return []

    return [messages.NOT_SAVED.finding(*keys, epoch=run.epoch)]


def _may_forget(site: Site) -> bool:
    """Return whether what `Regularizer.bind` returned may keep something between calls.

    A method of the regularizer, or a function without a closure, keeps nothing.
    """
    bound = site.bound
    regularizer = site.regularizer
    if isinstance(bound, Watch) or hasattr(bound, "state_dict"):
        return False
    if type(regularizer).bind is Regularizer.bind or isinstance(regularizer, Foreign):
        return False
    is_method = getattr(bound, "__self__", None) is regularizer
    is_plain_function = isinstance(bound, types.FunctionType) and bound.__closure__ is None
    return not is_method and not is_plain_function


def _elements(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of elements alone, as plain numbers."""
    return {name: number(counts[name]) for name, number in _ELEMENTS.items()}


def _counts(saved: Mapping[str, Any]) -> tuple[Snapshot, Snapshot]:
    """Return the totals and the open window of a site in a state."""
    life = Snapshot(
        trained=int(saved["calls"]),
        active=int(saved["active_calls"]),
        **_elements(saved),
    )
    window = Snapshot(**_elements(saved["window"]))
    return life, window


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
        saved = _read(state)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the state of the Attachment is damaged: {error!r}") from error

    different = _differences(saved, here, run)
    if strict and different:
        lines = "\n".join(different)
        raise ValueError(f"the state is of another spec (strict=False takes what fits):\n{lines}")
    if here and here.keys().isdisjoint(saved.regularizers):
        warn("the state has none of these sites, so only its epoch is restored")
    return saved


def _read(state: Mapping[str, Any]) -> Saved:
    """Read the parts of a state; any of several errors if it is damaged."""
    epoch = as_number("epoch", state["epoch"], allowed=NON_NEGATIVE)
    epochs = int(state["epochs"])
    forwards = int(state["forwards"])
    stepped = bool(state["stepped"])
    sites = state["sites"]
    return Saved(
        epoch=epoch,
        epochs=epochs,
        stepped=stepped,
        forwards=forwards,
        regularizers={key: str(saved["regularizer"]) for key, saved in sites.items()},
        counts={key: _counts(saved) for key, saved in sites.items()},
        memories={key: saved["memory"] for key, saved in sites.items() if "memory" in saved},
    )


def _differences(saved: Saved, here: dict[str, str], run: Run) -> list[str]:
    """Describe the sites whose regularizer in the state is not the one of the model, by key."""
    lines = []
    for key in here | saved.regularizers:
        theirs = saved.regularizers.get(key, "none")
        ours = here.get(key, "none")
        if theirs == ours:
            continue
        if _timeless(theirs, saved.epochs) != _timeless(ours, run.epochs):
            lines.append(f"  - {key}: the state has {theirs}, the model has {ours}")
    return lines


def _timeless(regularizer: str, epochs: int | None) -> str:
    """Return the text of a regularizer without lengths of schedules that follow the training."""

    def length(schedule: re.Match[str]) -> str:
        epochs_text, delay_text, delay = schedule.groups()
        rest = (epochs or 0) - math.ceil(float(delay or 0))
        follows = float(epochs_text) == (rest or 1)
        return f"epochs=all{delay_text or ''}" if follows else schedule[0]

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

    run.looked = False
    run.fresh = True
