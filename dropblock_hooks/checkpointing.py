"""Activation checkpointing: forwards that run again, inside a backward.

`Site.enter` does not count them. A site draws the same mask again.
"""

import sys
from types import FrameType

import torch

from .warn import warn

graph_task = torch._C._current_graph_task_id  # of the backward that runs now
NO_TASK = -1


def tell_lost_random_state(key: str) -> None:
    """Warn if torch's checkpoint around this recomputation has not restored the random state.

    `key` is the key of the site that draws.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            scope = frame.f_locals
            context = getattr(scope.get("ctx"), "preserve_rng_state", None)
            if scope.get("preserve_rng_state", context) is False:
                warn(
                    f"{key}: the gradients are wrong: its layer is checkpointed with "
                    "preserve_rng_state=False, so the recomputation draws another mask than the "
                    "forward did; leave preserve_rng_state at True"
                )
                return
        frame = frame.f_back
