"""What one site of a `Capture` keeps: its last calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..axes.view import View
from .base import Seen, Watch

_PLAIN = (bool, int, float, complex, str, bytes)


class Record(NamedTuple):
    """One call of a layer.

    Attributes:
        epoch: the time of the call.
        call: its number among the calls that the site has seen, from 0.
        value: the output of the layer, with its nesting; None where activations are not kept.
            Of objects that are neither tensors nor numbers nor text, None is kept.
        grad: the gradient of each of its floating-point tensors, with the same nesting; None before
            a backward, and where no gradient has come.
        training: whether the layer was in training mode.
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
        leaves, nesting: the output, flattened, with a slot for each tensor that is kept apart.
        forms: how the axes of each tensor are read, where that matters.
        differentiable: whether a gradient may come.
    """

    epoch: float
    call: int
    training: bool
    leaves: list[Any]
    nesting: Any
    values: list[Tensor] | None
    grads: dict[int, Tensor]
    forms: list[View | None]
    differentiable: bool

    def record(self) -> Record:
        """Return what is shown."""
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
    """

    by_call: ClassVar[bool] = True

    def __init__(self, capture: Any) -> None:
        self.capture = capture
        self.reads_channels = capture.reduce == "channels"
        self.calls = 0
        self.entries: dict[int, _Entry] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "entries": {}}

    def state_dict(self) -> dict[str, Tensor]:
        return {"calls": torch.tensor(self.calls, device="cpu")}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the number of calls, and drop what was kept, which is of another time."""
        self.calls = int(state["calls"])
        self.entries.clear()

    @property
    def records(self) -> list[Record]:
        """What is kept, oldest first."""
        return [entry.record() for entry in list(self.entries.values())]

    def see(self, seen: Seen) -> int | None:
        capture = self.capture
        if not (capture.activations or seen.differentiable):
            return None  # no gradient will come: the record would be empty
        call, self.calls = self.calls, self.calls + 1
        if call % capture.every:
            return call
        leaves, nesting = tree_flatten(seen.nest([_Slot(at) for at in range(len(seen.tensors))]))
        values = None
        if capture.activations:
            values = [capture.kept(x, f) for x, f in zip(seen.tensors, seen.forms, strict=True)]
        self.entries[call] = _Entry(
            self.epoch,
            call,
            seen.training,
            [_plain(leaf) for leaf in leaves],
            nesting,
            values,
            {},
            list(seen.forms),
            seen.differentiable,
        )
        while capture.keep is not None and len(self.entries) > capture.keep:
            del self.entries[next(iter(self.entries))]
        return call

    def see_gradient(self, grad: Tensor, at: int, scale: float | Tensor, ticket: Any) -> None:
        if ticket < 0:  # recomputed by compiled code: the gradients of the last call come first
            ticket = next(
                (
                    call
                    for call in reversed(self.entries)
                    if self.entries[call].differentiable and at not in self.entries[call].grads
                ),
                None,
            )
        entry = self.entries.get(ticket)
        if entry is not None:
            with torch.no_grad():
                entry.grads[at] = self.capture.kept(grad, entry.forms[at])


def _plain(leaf: Any) -> Any:
    """What is kept of a leaf: nothing that could hold a graph."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf if isinstance(leaf, (_Slot, *_PLAIN)) else None
