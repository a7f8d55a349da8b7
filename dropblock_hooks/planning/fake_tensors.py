"""Removes the fake tensors that a forward has left in caches outside of its model.

Functions under ``functools.lru_cache`` and global dicts keep tensors, such as the masks of windowed
attention, for the next forward of any model. A fake one would break it.
"""

import functools
import gc
import types
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

_DEEPEST = 4  # containers between a tensor and the cache that holds it
_LRU: type = type(functools.lru_cache(lambda: None))


def take_out(kind: type) -> None:
    """Remove the fake tensors of a kind of mode from all caches.

    Nothing else may hold them when this is called.
    """
    if _alive(kind):
        gc.collect()
        for tensor in _alive(kind):
            _release(tensor, 0)


def _alive(kind: type) -> list[FakeTensor]:
    # some objects lie about their class when asked, so the type is taken
    found = [o for o in gc.get_objects() if type(o) is FakeTensor]
    return [tensor for tensor in found if type(getattr(tensor, "fake_mode", None)) is kind]


def _release(held: Any, depth: int) -> None:
    for holder in gc.get_referrers(held):
        if isinstance(holder, types.FrameType) or depth > _DEEPEST:
            continue
        if type(holder) is _LRU:
            holder.cache_clear()  # type: ignore[attr-defined]  # of what `type` is, mypy knows nothing
        elif type(holder) is dict and not _is_namespace(holder):
            for key in [key for key, value in holder.items() if value is held]:
                del holder[key]
        elif isinstance(holder, tuple | list) or type(holder).__name__ == "_lru_list_elem":
            _release(holder, depth + 1)


def _is_namespace(holder: dict[Any, Any]) -> bool:
    """Whether it is the attributes of an object, or the globals of a module: no cache."""
    return "__name__" in holder or any(
        getattr(owner, "__dict__", None) is holder for owner in gc.get_referrers(holder)
    )
