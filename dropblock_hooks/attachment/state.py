"""Saves the state of an attachment as numbers, text and tensors, and restores it.

`Attachment.state_dict` calls `save`. `Attachment.load_state_dict` calls `check` and then `restore`.
"""

import copy
import dis
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch

from .. import messages
from ..checks import NON_NEGATIVE, as_number
from ..observers.base import Watch
from ..quoting import kind_of, listed
from ..registry import as_call, stated_fields
from ..regularizers.base import Regularizer
from ..regularizers.foreign import Foreign
from ..schedules import without_epochs
from ..sites.counter import Snapshot
from ..sites.history import Recorder, read_state
from ..sites.run import Run
from ..sites.site import LiveSite
from ..warn import warn

_VERSION = 4
_ELEMENTS = {"affected": int, "total": int, "expected": float}  # counts, and how they are read


class Saved(NamedTuple):
    """The parts of a state that was read, by the keys of the sites."""

    epoch: float
    stepped: bool
    forwards: int
    regularizers: dict[str, "Description"]
    counts: dict[str, tuple[Snapshot, Snapshot]]  # the totals, and the elements of the open window
    anchors: dict[str, Any]  # the values of anchored parameters at attaching
    memories: dict[str, Any]  # the memories of regularizers
    history: Recorder


class Description(NamedTuple):
    """The text of a regularizer, for a comparison with the same site in another process.

    Attributes:
        text: the repr of the regularizer.
        without_epochs: the text without the lengths that schedules have from the training.
    """

    text: str
    without_epochs: str

    @classmethod
    def of(cls, regularizer: Regularizer, epochs: int | None) -> Self:
        """Describe a regularizer in a training of this length, or of unknown length."""
        arguments = {}
        for name, value in stated_fields(regularizer).items():
            arguments[name] = without_epochs(value, epochs)

        text = as_call(type(regularizer), arguments)
        return cls(repr(regularizer), text)

    def is_that_of(self, other: "Description") -> bool:
        """Return whether both describe the same regularizer, in trainings of any lengths."""
        return self.text == other.text or self.without_epochs == other.without_epochs


def save(sites: Sequence[LiveSite], run: Run) -> dict[str, Any]:
    """Return the state of an attachment: numbers and text, and tensors of anchors and memories.

    Raises:
        TypeError: if a regularizer may have a memory that can't be saved.
    """
    _check_memories(sites)
    run.take_counts()  # so that each `tally` is complete
    saved_sites = {site.key: _saved_site(site, run.epochs) for site in sites}
    return {
        "version": _VERSION,
        "epoch": run.epoch,
        "stepped": run.stepped,
        "forwards": run.counter.life().calls,
        "sites": saved_sites,
        "history": run.history.state_dict(sites),
    }


def _saved_site(site: LiveSite, epochs: int | None) -> dict[str, Any]:
    """Return the state of a site in a training of this length, or of unknown length."""
    life = site.tally.read().life()
    window = site.tally.window()
    description = Description.of(site.regularizer, epochs)
    saved = {
        "regularizer": description.text,
        "without_epochs": description.without_epochs,
        "calls": life.calls,
        "active_calls": life.active,
        **_elements(life._asdict()),
        "window": _elements(window._asdict()),
    }
    is_observer = isinstance(site.bound, Watch)  # whose statistics are not saved
    if hasattr(site.bound, "state_dict") and not is_observer:
        saved["memory"] = copy.deepcopy(site.bound.state_dict())
    if site.anchor is not None:
        saved["anchor"] = site.anchor.detach().cpu().clone()
    return saved


def _check_memories(sites: Sequence[LiveSite]) -> None:
    """Raise TypeError if a result of `Regularizer.bind` may have a memory that can't be saved."""
    keys = [site.key for site in sites if _may_forget(site)]
    if not keys:
        return
    raise TypeError(
        f"{listed(keys, 8)}: the result of its bind() can't be saved, so a resumed training would "
        "differ: return an object from bind() that has state_dict() and load_state_dict(state); "
        "without a memory, let state_dict() return {}"
    )


def _may_forget(site: LiveSite) -> bool:
    """Return whether the result of `Regularizer.bind` may keep something between calls."""
    bound = site.bound
    regularizer = site.regularizer
    if isinstance(bound, Watch) or hasattr(bound, "state_dict"):
        return False
    has_own_bind = type(regularizer).bind is not Regularizer.bind
    if isinstance(regularizer, Foreign) or not has_own_bind:
        return False

    is_method = getattr(bound, "__self__", None) is regularizer
    return not is_method and not _keeps_nothing(bound)


def _keeps_nothing(bound: Any) -> bool:
    """Return whether the result is a function that reads only constants from its closure.

    A function that assigns to a name of its closure (``nonlocal``) keeps the assigned value. The
    same holds for functions in the closure, and for functions that it defines. Names that the
    function itself defines are new in each call.
    """
    if not isinstance(bound, types.FunctionType):
        return False

    constant = (bool, int, float, str, torch.dtype, Regularizer)
    functions = [bound]
    for function in functions:  # the loop also visits the functions that it appends
        names = set(function.__code__.co_freevars)
        if _assigns(function.__code__, names):
            return False
        for cell in function.__closure__ or ():
            content = cell.cell_contents
            if isinstance(content, types.FunctionType):
                if content not in functions:
                    functions.append(content)
            elif not isinstance(content, constant):
                return False
    return True


def _assigns(code: types.CodeType, names: set[str]) -> bool:
    """Return whether a code, or a function that it defines, assigns to one of these names."""
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in names:
            return True
    inner_codes = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    # a name that an inner function defines anew is another one
    return any(_assigns(inner, names.intersection(inner.co_freevars)) for inner in inner_codes)


def _elements(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the counts of elements, as plain numbers."""
    elements = {}
    for name, number in _ELEMENTS.items():
        elements[name] = number(counts[name])
    return elements


def _counts(saved: Mapping[str, Any]) -> tuple[Snapshot, Snapshot]:
    """Return the totals and the open window of a site in a state."""
    life = Snapshot(
        trained=int(saved["calls"]),  # in both modes, which a state does not tell apart
        active=int(saved["active_calls"]),
        **_elements(saved),
    )
    window = Snapshot(**_elements(saved["window"]))
    return life, window


def check(state: Any, sites: Sequence[LiveSite], run: Run, strict: bool) -> Saved:
    """Read a state, and change nothing.

    A schedule that takes its length from the training counts as the same schedule in a longer one.

    Raises:
        ValueError: if the state is damaged or, with `strict`, of another spec.
    """
    _check_version(state)
    here = {site.key: Description.of(site.regularizer, run.epochs) for site in sites}
    try:
        saved = _read(state)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the state of the Attachment is damaged: {error!r}") from error

    different = _differences(saved.regularizers, here) + _other_shapes(saved, sites)
    if strict and different:
        lines = "\n".join(different)
        raise ValueError(
            f"the state is of another model or spec:\n{lines}\n"
            "Attach the spec of the state. To load the sites whose keys are the same, pass "
            "strict=False"
        )
    if here and here.keys().isdisjoint(saved.regularizers):
        warn(messages.NO_SITE_OF_STATE)
    return saved


def _check_version(state: Any) -> None:
    """Raise ValueError for an object that is no state of an attachment in this version."""
    is_mapping = isinstance(state, Mapping)
    version = state.get("version") if is_mapping else None
    if version == _VERSION:
        return
    if version is not None:
        raise ValueError(
            f"this is the state_dict of an Attachment in version {version}, and this version of "
            f"the package reads version {_VERSION}"
        )

    what = "this is not the state_dict of an Attachment"
    if is_mapping and any(isinstance(value, torch.Tensor) for value in state.values()):
        what = "this is the state_dict of a model, not of an Attachment"
    raise ValueError(f"{what}: pass what attached.state_dict() returned")


def _read(state: Mapping[str, Any]) -> Saved:
    """Read the parts of a state. A damaged state raises one of several errors."""
    epoch = as_number("epoch", state["epoch"], allowed=NON_NEGATIVE)
    forwards = int(state["forwards"])
    stepped = bool(state["stepped"])
    regularizers = {}
    counts = {}
    anchors = {}
    memories = {}
    for key, saved in state["sites"].items():
        regularizers[key] = _description(saved)
        counts[key] = _counts(saved)
        if "anchor" in saved:
            anchors[key] = _anchor(saved)
        if "memory" in saved:
            memories[key] = saved["memory"]
    return Saved(
        epoch=epoch,
        stepped=stepped,
        forwards=forwards,
        regularizers=regularizers,
        counts=counts,
        anchors=anchors,
        memories=memories,
        history=read_state(state["history"]) if "history" in state else Recorder(),
    )


def _anchor(saved: Mapping[str, Any]) -> torch.Tensor:
    """Return the value of an anchored parameter in a state."""
    anchor = saved["anchor"]
    if not isinstance(anchor, torch.Tensor):
        raise TypeError(f"anchor must be a tensor, got {kind_of(anchor)}")
    return anchor


def _description(saved: Mapping[str, Any]) -> Description:
    """Return the description of the regularizer of a site in a state."""
    text = str(saved["regularizer"])
    without = str(saved["without_epochs"])
    return Description(text, without)


def _differences(there: Mapping[str, Description], here: Mapping[str, Description]) -> list[str]:
    """Describe the sites whose regularizers differ between the state and the model."""
    none = Description("none", "none")
    lines = []
    for key in {**here, **there}:
        theirs = there.get(key, none)
        ours = here.get(key, none)
        if not theirs.is_that_of(ours):
            lines.append(f"  - {key}: the state has {theirs.text}, the model has {ours.text}")
    return lines


def _other_shapes(saved: Saved, sites: Sequence[LiveSite]) -> list[str]:
    """Describe the sites whose parameters have other shapes than their values in the state."""
    lines = []
    for site in sites:
        theirs = _shape_of(saved.anchors.get(site.key))
        ours = _shape_of(site.anchor)
        if theirs is not None and ours is not None and theirs != ours:
            lines.append(
                f"  - {site.key}: the parameter has the shape {theirs} in the state, and {ours} in "
                "the model"
            )
    return lines


def _shape_of(x: Any) -> tuple[int, ...] | None:
    return None if x is None else tuple(x.shape)


def restore(saved: Saved, sites: Sequence[LiveSite], run: Run) -> None:
    """Take over the counts, the memories, the anchors and the history of a state.

    `Attachment.load_state_dict` has set the time before. The open window keeps the elements that
    were counted in it before saving. Its number of calls begins at 0.
    """
    run.take_counts()  # before `set_counts` replaces them
    run.stepped = saved.stepped
    run.counter.set_counts(Snapshot(trained=saved.forwards), Snapshot())

    for site in sites:
        if site.key in saved.counts:
            site.tally.set_counts(*saved.counts[site.key])
        if site.key in saved.memories and hasattr(site.bound, "load_state_dict"):
            site.bound.load_state_dict(copy.deepcopy(saved.memories[site.key]))

        anchor = saved.anchors.get(site.key)
        if anchor is not None and _shape_of(anchor) == _shape_of(site.anchor):
            site.anchor = anchor.to(site.anchor, copy=True)
            # the anchor is not that of `attach`, so `old_anchors` must not compare it with weights
            site.anchored_at = None

    run.history.load(saved.history, sites)
    # as after `attach`: `step` was not called since, and the next training forward is checked, and
    # notes how often parameters had been written
    run.checked = False
    run.writes = None
    run.fresh = True
