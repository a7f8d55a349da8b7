"""Activation checkpointing: forwards that run again, inside a backward."""

import sys
from types import FrameType

import torch

from .warn import warn

graph_task = torch._C._current_graph_task_id  # of the backward that runs now
NO_TASK = -1

_CHECKPOINT = "torch.utils.checkpoint"


def checkpointed() -> bool:
    """Whether a function of ``torch.utils.checkpoint`` is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


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
