"""Activation checkpointing: forwards that run again, inside a backward."""

import sys
from types import FrameType
from typing import Generic, TypeVar

import torch
from torch.compiler import is_compiling

from .warn import warn

graph_task = torch._C._current_graph_task_id  # of the backward that runs now
NO_TASK = -1

_CHECKPOINT = "torch.utils.checkpoint"

T = TypeVar("T")


def plainly_run() -> bool:
    """Whether tensors are real ones: neither a function transform nor a mode for tensors is on."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return not transformed and not torch._C._len_torch_dispatch_stack()


def checkpointed() -> bool:
    """Whether a function of ``torch.utils.checkpoint`` is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def may_be_recomputed() -> bool:
    """Whether a checkpoint may run this forward again: one under way keeps tensors in its own way,
    or, of the reentrant kind, runs without gradients.

    After an error in compiled code dynamo meets this function alone, and can't trace the question.
    """
    if is_compiling():
        return True
    if torch.is_grad_enabled():
        return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return checkpointed()


def loses_random_state() -> bool:
    """Whether the checkpoint around this recomputation has not restored the random state.

    Nothing but the frames of ``torch.utils.checkpoint`` tells; where they are not the known ones
    (another checkpoint function), the answer is False.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            scope = frame.f_locals
            preserve = scope.get(
                "preserve_rng_state", getattr(scope.get("ctx"), "preserve_rng_state", None)
            )
            if preserve is not None:
                return not preserve
        frame = frame.f_back
    return False


def tell_lost_random_state(key: str) -> None:
    """Warn where this recomputation draws another mask than the forward did; `key` is the site."""
    if loses_random_state():
        warn(
            f"{key}: the gradients are wrong: its layer is checkpointed with "
            "preserve_rng_state=False, so the recomputation draws another mask than the "
            "forward did; leave preserve_rng_state at True"
        )


class Past(Generic[T]):
    """What the last forwards did, for one that is run again.

    Attributes:
        last: of the last forward; None before the first.
        kept: of the last one in a checkpoint; None while all forwards did the same.
        settled: what a forward may do without a `note`, since nothing would change; None if all
            are to be noted.
    """

    def __init__(self) -> None:
        self.last: T | None = None
        self.kept: T | None = None
        self.settled: T | None = None

    def note(self, now: T) -> None:
        """A forward does this."""
        changed = self.last is not now
        if changed and self.kept is None:
            self.kept = self.last  # whether that one was in a checkpoint is not known: it may be
        self.last = now
        agrees = self.kept is None or self.kept is now
        # the frames come last: they take longer to look at
        if not agrees and (may_be_recomputed() or (changed and checkpointed())):
            self.kept, agrees = now, True
        self.settled = now if agrees else None

    def again(self) -> T | None:
        """What is to be done by the forward that runs again now."""
        if self.kept is None or self.kept is self.last or not checkpointed():
            return self.last
        return self.kept
