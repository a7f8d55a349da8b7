"""The classes that a spec file can name, and their reprs."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

_T = TypeVar("_T")
_CLASSES: dict[str, type] = {}
_NAMES: dict[type, str] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def register(cls: type | None = None, /, *, name: str | None = None) -> Any:
    """Make a class a frozen dataclass and give it a name that spec files can use.

    Example:
        >>> from dropblock_hooks import Probability, Regularizer, Spec, register
        >>> @register
        ... class Attenuate(Regularizer):
        ...     p: Probability = 0.1
        ...
        ...     def apply(self, x, now):
        ...         return x * (1 - now.p), None
        >>> Spec.from_yaml("layer1: {Attenuate: {p: 0.2}}")
        Spec({'layer1': Attenuate(p=0.2)})

    Args:
        cls: the class; already a dataclass or not.
        name: the name in spec files and site keys; the class's own name by default.

    Raises:
        TypeError: for a dataclass that is not frozen.
        ValueError: for a name that another class has.
    """
    if cls is None:
        return lambda cls: register(cls, name=name)
    has_method = hasattr(cls, "apply") or hasattr(cls, "span")
    if not isinstance(cls, type) or not has_method:
        raise TypeError(f"register takes a subclass of Regularizer or Schedule, got {cls!r}")
    if "__dataclass_params__" not in vars(cls):
        cls = dataclass(frozen=True, repr=False)(cls)
    elif not vars(cls)["__dataclass_params__"].frozen:
        raise TypeError(f"{cls.__name__} must be a frozen dataclass: @dataclass(frozen=True)")

    name = name or cls.__name__
    other = _CLASSES.get(name, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"the name {name!r} is taken by {other.__module__}.{other.__qualname__}")

    _CLASSES[name] = cls
    _NAMES[cls] = name
    return cls


def check_fields(cls: type) -> None:
    """Raise TypeError for fields without the decorator that makes them fields."""
    if "__dataclass_params__" in vars(cls):
        return
    hints = inspect.get_annotations(cls)
    names = sorted(name for name, hint in hints.items() if "ClassVar" not in str(hint))
    if names:
        raise TypeError(f"{cls.__name__} has fields ({', '.join(names)}): put @register above it")


def store(frozen: object, /, **values: Any) -> None:
    """Store checked or derived values in a frozen object, in its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


def registered(base: type[_T]) -> dict[str, type[_T]]:
    """The registered subclasses of a class, by their names in specs."""
    return {name: cls for name, cls in _CLASSES.items() if issubclass(cls, base)}


def name_of(cls: type) -> str:
    """The name of a class in specs; a class that is not registered has its ``__name__``."""
    return _NAMES.get(cls, cls.__name__)


def brief(obj: Any) -> str:
    """The repr of an object with its `stated_fields`; a field without a name stands alone."""
    return as_call(type(obj), stated_fields(obj))


def as_call(cls: type, arguments: Mapping[str, Any]) -> str:
    """The text of a call of a class; a value without a name is the text of an argument itself."""
    texts = [f"{name}={text(value)}" if name else value for name, value in arguments.items()]
    return f"{name_of(cls)}({', '.join(texts)})"


def text(value: Any) -> str:
    """The repr of a value without addresses; of a function its name."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__qualname__
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def stated_fields(obj: Any) -> dict[str, Any]:
    """The fields to show: those that differ from their defaults, and all numbers other than 0.

    Keyword-only fields come last. If the class sets ``states_defaults = False``, numbers are shown
    only if they differ, too. A method ``_stated`` of the class replaces these rules.
    """
    if hasattr(obj, "_stated"):
        replaced: dict[str, Any] = obj._stated()
        return replaced

    states_numbers = getattr(obj, "states_defaults", True)
    stated = {}
    for field_ in sorted(fields(obj), key=lambda field_: bool(field_.kw_only)):
        value = getattr(obj, field_.name)
        differs = value != field_.default
        is_stated_number = states_numbers and _is_nonzero_number(value)
        if field_.init and (differs or is_stated_number):
            stated[field_.name] = value
    return stated


def _is_nonzero_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 0
