"""What one site of a `Capture` keeps: its last calls."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..checkpointing import NO_TASK, checkpointed, graph_task
from ..functional import axes
from ..handles import new_handle
from .base import Seen, Watch
from .in_graph import UNKNOWN, capture_gradient, capture_values

_MOST_WAITING = 1_000  # calls whose gradients may come by a repetition
_PLAIN = (bool, int, float, complex, str, bytes)


class Record(NamedTuple):
    """One call of a layer.

    Attributes:
        epoch: the time of the call.
        call: its number among those that the site has seen, from 0.
        value: what the layer gave, nested as its output is; None where activations are not kept.
            What is in it besides tensors, numbers and text is left out: None.
        grad: the gradient of each of its floating-point tensors, nested alike; None before a
            backward, and where none has come.
        training: the mode of the layer.
    """

    epoch: float
    call: int
    value: Any
    grad: Any
    training: bool


class _Slot:
    """Stands in the place of a tensor."""

    def __init__(self, at: int) -> None:
        self.at = at


@dataclass
class _Entry:
    """A `Record` in the making.

    Attributes:
        leaves, nesting: what the layer gave, flat, with a slot for each tensor that is kept apart.
        forms: how the axes of each tensor are read, where that matters.
    """

    epoch: float
    call: int
    training: bool
    leaves: list[Any]
    nesting: Any
    values: list[Tensor] | None
    grads: dict[int, Tensor]
    forms: list[axes.Form | None]

    def record(self) -> Record:
        """What is shown."""
        value = grad = None
        if self.values is not None:
            kept = [self.values[x.at] if isinstance(x, _Slot) else x for x in self.leaves]
            value = tree_unflatten(kept, self.nesting)
        if self.grads:
            slots = [x.at if isinstance(x, _Slot) else None for x in self.leaves]
            grads = [None if at is None else self.grads.get(at) for at in slots]
            grad = tree_unflatten(grads, self.nesting)
        return Record(self.epoch, self.call, value, grad, self.training)


class CaptureWatch(Watch):
    """Keeps the last calls of a layer, by number.

    Attributes:
        capture: the `Capture`: how often, how many, and what of each tensor.
        calls: how many were seen.
        entries: those that are kept.
        waiting: of each tensor, calls whose gradients may come by a repetition, which does not
            know its number: the last call's comes first.
        handle: its number for compiled code.
    """

    def __init__(self, capture: Any) -> None:
        self.capture = capture
        self.calls = 0
        self.entries: dict[int, _Entry] = {}
        self.waiting: dict[int, deque[int]] = {}
        self.handle = new_handle(self)

    def __getstate__(self) -> dict[str, Any]:
        left_out: dict[str, Any] = {"entries": {}, "waiting": {}, "handle": None}
        return {**self.__dict__, **left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, entries={}, waiting={}, handle=new_handle(self))

    def state_dict(self) -> dict[str, Tensor]:
        return {"calls": torch.tensor(self.calls, device="cpu")}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The numbers of calls go on; what was kept is of another time."""
        self.calls = int(state["calls"])
        self.entries.clear()
        self.waiting.clear()

    @property
    def records(self) -> list[Record]:
        """What is kept, oldest first."""
        return [entry.record() for entry in list(self.entries.values())]

    def see(self, seen: Seen) -> Any:
        if not (self.capture.activations or torch.is_grad_enabled()) and (
            is_compiling() or not checkpointed()
        ):
            return None  # no gradient will come: a record of nothing
        if is_compiling():
            slots = [_Slot(at) for at in range(len(seen.tensors))]
            nesting = _written(seen.nest(slots))
            return capture_values(self.handle, list(seen.tensors), nesting, seen.training)
        repeats = not torch.is_grad_enabled() and checkpointed()
        call, is_kept = self._begin(len(seen.tensors), repeats)
        if is_kept:
            leaves, structure = tree_flatten(
                seen.nest([_Slot(at) for at in range(len(seen.tensors))])
            )
            leaves = [_plain(leaf) for leaf in leaves]
            forms: list[axes.Form | None] = [None] * len(seen.tensors)
            if self.capture.reduce == "channels":
                forms = [seen.channels_first.form(x) for x in seen.tensors]
            self._keep(call, seen.training, leaves, structure, seen.tensors, forms)
        return call

    def see_compiled(self, tensors: Sequence[Tensor], nesting: str, training: bool) -> int:
        """The same of compiled code, at its time; the ticket."""
        if graph_task() != NO_TASK:
            return UNKNOWN
        call, is_kept = self._begin(len(tensors), True)
        if is_kept:
            leaves, structure = tree_flatten(ast.literal_eval(nesting))
            slots = [None if at is None else _Slot(at) for at in leaves]
            self._keep(call, training, slots, structure, tensors, [None] * len(tensors))
        return call

    def _begin(self, tensors: int, repeats: bool) -> tuple[int, bool]:
        """The number of a call, and whether it is kept; whether a checkpoint may repeat it."""
        call, self.calls = self.calls, self.calls + 1
        for at in range(tensors if repeats and self.capture.gradients else 0):
            self.waiting.setdefault(at, deque(maxlen=_MOST_WAITING)).append(call)
        return call, call % self.capture.every == 0

    def _keep(
        self,
        call: int,
        training: bool,
        leaves: list[Any],
        nesting: Any,
        tensors: Sequence[Tensor],
        forms: list[axes.Form | None],
    ) -> None:
        capture, values = self.capture, None
        if capture.activations:
            values = [capture.kept(x, form) for x, form in zip(tensors, forms, strict=True)]
        entry = _Entry(self.epoch, call, training, leaves, nesting, values, {}, forms)
        self.entries[call] = entry
        while capture.keep is not None and len(self.entries) > capture.keep:
            del self.entries[next(iter(self.entries))]

    def see_gradient(self, grad: Tensor, at: int, scale: float | Tensor, ticket: Any) -> None:
        if is_compiling():
            capture_gradient(self.handle, grad, at, ticket)
        else:
            self.take_gradient(grad, at, UNKNOWN if ticket is None else ticket)

    def take_gradient(self, grad: Tensor, at: int, call: int) -> None:
        """Keep the gradient of a tensor of a call; of an unknown one, by its turn."""
        waiting = self.waiting.get(at)
        if call == UNKNOWN:
            if not waiting:
                return
            call = waiting.pop()
        elif waiting and call in waiting:
            waiting.remove(call)
        entry = self.entries.get(call)
        if entry is not None:
            with torch.no_grad():
                entry.grads[at] = self.capture.kept(grad, entry.forms[at])


def _plain(leaf: Any) -> Any:
    """What is kept of a leaf: nothing that could hold a graph."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf if isinstance(leaf, (_Slot, *_PLAIN)) else None


def _written(value: Any) -> str:
    """What a layer gave as compiled code can tell: text, with a number for each tensor."""
    if isinstance(value, _Slot):
        return str(value.at)
    if isinstance(value, dict):
        return "{" + "".join([f"{key!r}: {_written(each)}, " for key, each in value.items()]) + "}"
    if isinstance(value, list | tuple):
        inside = "".join([f"{_written(each)}, " for each in value])
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return "None"
