"""The classes that a spec file can name, their reprs and their docstrings."""

import inspect
import re
import sys
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

_T = TypeVar("_T")
_CLASSES: dict[str, type] = {}
_NAMES: dict[type, str] = {}
_SECTION = re.compile(r"^([A-Z]\w+):\n((?:    .*\n|\n)*)", re.MULTILINE)
_ARGUMENT = re.compile(r"^    \**(\w+)(?: \([^)]*\))?: .*\n(?: {8}.*\n)*", re.MULTILINE)


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
    if not (isinstance(cls, type) and (hasattr(cls, "apply") or hasattr(cls, "span"))):
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
    return documented(cls)


def described_in(*sources: object) -> Callable[[_T], _T]:
    """Decorator that adds arguments, equation and reference; the nearest source comes first."""

    def complete(target: Any) -> Any:
        if not target.__doc__:  # none was written, or Python runs with -OO
            return target
        docs = [inspect.cleandoc(each.__doc__ or "") + "\n\n" for each in (target, *sources)]
        own, *others = (dict(_SECTION.findall(doc)) for doc in docs)
        found = [_ARGUMENT.finditer(each.get("Args", "")) for each in (own, *others)]
        arguments = ChainMap(*({item[1]: item[0] for item in each} for each in found))
        options = getattr(target, "__dataclass_fields__", ())  # a signature may only have **kwargs
        names = [*inspect.signature(target).parameters, *options, *arguments.maps[0]]
        lines = "".join(arguments[name] for name in dict.fromkeys(names) if name in arguments)
        text = docs[0].replace(f"Args:\n{own.get('Args', '')}", f"Args:\n{lines}\n")
        inherited = ChainMap({"Args": lines}, *others)
        for title in ("Args", "Equation", "Reference"):
            if f"\n{title}:\n" not in text and inherited.get(title):
                text += f"{title}:\n{inherited[title].rstrip()}\n\n"
        target.__doc__ = text
        return target

    return complete


def documented(cls: type[_T]) -> type[_T]:
    """Describe in the docstring of a dataclass what its bases, or its function, describe."""
    named = re.search(r"`functional\.(\w+)`", cls.__doc__ or "")
    function = getattr(sys.modules[f"{__package__}.functional"], named[1], None) if named else None
    return described_in(*cls.__mro__[1:-1], function)(cls)


def check_fields(cls: type) -> None:
    """Raise TypeError for fields without the decorator that makes them fields."""
    hints = {} if "__dataclass_params__" in vars(cls) else inspect.get_annotations(cls)
    own = sorted(name for name, hint in hints.items() if "ClassVar" not in str(hint))
    if own:
        raise TypeError(f"{cls.__name__} has fields ({', '.join(own)}): put @register above it")


def registered(base: type[_T]) -> dict[str, type[_T]]:
    return {name: cls for name, cls in _CLASSES.items() if issubclass(cls, base)}


def name_of(cls: type) -> str:
    return _NAMES.get(cls, cls.__name__)


def brief(obj: Any) -> str:
    stated = stated_fields(obj).items()
    arguments = [f"{name}={text(value)}" if name else value for name, value in stated]
    return f"{name_of(type(obj))}({', '.join(arguments)})"


def text(value: Any) -> str:
    """The repr of a value without addresses; of a function its name."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__qualname__
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def stated_fields(obj: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, and other numbers than 0, keywords last.

    With ``states_defaults = False`` numbers need to differ too. A method ``_stated`` of the class
    replaces these rules.
    """
    if hasattr(obj, "_stated"):
        own: dict[str, Any] = obj._stated()
        return own
    worth = (int, float) if getattr(obj, "states_defaults", True) else ()
    found = {}
    for f in sorted(fields(obj), key=lambda f: bool(f.kw_only)):
        value = getattr(obj, f.name)
        is_worth = value and isinstance(value, worth) and value is not True
        if f.init and (value != f.default or is_worth):
            found[f.name] = value
    return found
