"""Activation checkpointing: forwards that run again, inside a backward.

`Site.enter` does not count them. A site draws the same mask again.
"""

import sys
from types import FrameType

from ._torch import NO_TASK as NO_TASK
from ._torch import graph_task as graph_task
from .warn import warn


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
