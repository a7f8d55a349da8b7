"""Removes the fake tensors that a forward has left in caches outside of its model.

Functions under ``functools.lru_cache`` and global dicts keep tensors, such as the masks of windowed
attention, for the next forward of any model. A fake one would break it.
"""

import functools
import gc
import types
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_DEEPEST = 4  # containers between a tensor and the cache that holds it
_LRU: type = type(functools.lru_cache(lambda: None))


def take_out(mode: FakeTensorMode | None) -> None:
    """Remove the fake tensors of a mode from all caches; nothing else may hold them by now."""
    if mode is not None and _alive(mode):
        gc.collect()
        for tensor in _alive(mode):
            _release(tensor, 0)


def _alive(mode: FakeTensorMode) -> list[FakeTensor]:
    # some objects lie about their class when asked, so the type is taken
    found = [o for o in gc.get_objects() if type(o) is FakeTensor]
    return [tensor for tensor in found if getattr(tensor, "fake_mode", None) is mode]


def _release(held: Any, depth: int) -> None:
    for holder in gc.get_referrers(held):
        if isinstance(holder, types.FrameType) or depth > _DEEPEST:
            continue
        if type(holder) is _LRU:
            holder.cache_clear()  # type: ignore[attr-defined]  # of what `type` is, mypy knows nothing
        elif type(holder) is dict:
            for key in [key for key, value in holder.items() if value is held]:
                del holder[key]
        elif isinstance(holder, tuple | list) or type(holder).__name__ == "_lru_list_elem":
            _release(holder, depth + 1)
