"""Pickles functions in the fields of regularizers and schedules.

`Regularizer` and `Schedule` call `state_of` when they are pickled or copied, and `set_state` when
they are loaded.

pickle finds a function by its name. A lambda, or a function inside another function, has no name
that can be imported. Without this module, pickle would fail with an error that does not say where
the function is.
"""

from __future__ import annotations

import pickle
import sys
from types import FunctionType
from typing import Any

_TAKE_ANY_FUNCTION = {"cloudpickle", "dill"}
"""Libraries that pickle the code of a function, so that it needs no name."""


class _Nameless:
    """A function without a name that can be imported, which pickle refuses with a clear error."""

    def __init__(self, function: Any, place: str) -> None:
        self.function = function
        self.place = place  # the field and the class, for the error

    def __deepcopy__(self, memo: dict[int, Any]) -> _Nameless:
        return self  # as copy.deepcopy does with functions

    def __reduce__(self) -> Any:
        if not _takes_any_function():
            raise pickle.PicklingError(
                f"{self.place} is {self.function.__qualname__}, a function that pickle can't find "
                "by name: use a schedule, such as LinearSchedule(0.0, 0.1, epochs=10), or a "
                "function at the top level of a module"
            )
        return _Nameless, (self.function, self.place)


def _takes_any_function() -> bool:
    """Return whether a library that pickles all functions is pickling now."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        package, _, _ = frame.f_globals.get("__name__", "").partition(".")
        if package in _TAKE_ANY_FUNCTION:
            return True
        frame = frame.f_back
    return False


def state_of(item: Any) -> dict[str, Any]:
    """Return the attributes of an object, in which functions without a name are marked."""
    state = dict(vars(item))
    for name, value in state.items():
        if isinstance(value, FunctionType) and "<" in value.__qualname__:  # <lambda>, <locals>
            state[name] = _Nameless(value, f"{name} of {type(item).__name__}")
    return state


def set_state(item: Any, state: dict[str, Any]) -> None:
    """Set the attributes of a frozen object to the result of `state_of`."""
    for name, value in state.items():
        unmarked = value.function if isinstance(value, _Nameless) else value
        object.__setattr__(item, name, unmarked)
