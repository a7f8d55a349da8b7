"""The classes that a spec file can name, and their reprs.

`register` adds a class, and ``specs.convert`` finds it by the name in a file.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass
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
        TypeError: for a class without ``apply`` or ``span``, or a dataclass that is not frozen.
        ValueError: if another class has the name.
    """
    if cls is None:
        return lambda cls: register(cls, name=name)
    has_method = hasattr(cls, "apply") or hasattr(cls, "span")
    if not isinstance(cls, type) or not has_method:
        raise TypeError(f"register takes a subclass of Regularizer or Schedule, got {cls!r}")

    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None:
        make_frozen = dataclass(frozen=True, repr=False)
        cls = make_frozen(cls)
        _explain_assignment(cls)
    elif not parameters.frozen:
        raise TypeError(f"{cls.__name__} must be a frozen dataclass: @dataclass(frozen=True)")

    name = name or cls.__name__
    other = _CLASSES.get(name, cls)
    if _path_of(other) != _path_of(cls):
        raise ValueError(f"the name {name!r} is taken by {_path_of(other)}")

    _CLASSES[name] = cls
    _NAMES[cls] = name
    return cls


def _explain_assignment(cls: Any) -> None:
    """Let the error about an assignment to a field of a frozen class say what to write."""
    assign = cls.__setattr__

    def explained(self: Any, name: str, value: Any) -> None:
        try:
            assign(self, name, value)
        except FrozenInstanceError:
            raise FrozenInstanceError(
                f"cannot assign to field {name!r} of {type(self).__name__}, whose objects do not "
                f"change. To change a rate in a training, write attached.set(..., {name}=...). In "
                f"a class of your own, write the field `{name}: Probability = 0.1` in place of "
                "__init__"
            ) from None

    cls.__setattr__ = explained


def _path_of(cls: type) -> str:
    """Return the module and the name of a class. They stay the same if it is defined again."""
    return f"{cls.__module__}.{cls.__qualname__}"


def check_fields(cls: type, root: type) -> None:
    """Raise TypeError if a class has fields, but no ``@register``, or extends such a class.

    Without the decorator, a field would keep its default without a message, because no argument
    would set it. The check runs when an object is made, because the decorator runs after the class
    statement.

    Args:
        cls: a subclass of `root`.
        root: Regularizer or Schedule, where the search ends.
    """
    if "__dataclass_params__" not in vars(cls):
        _refuse_fields(cls, _annotated(cls))

    known = {field_.name for field_ in fields(cls)} if is_dataclass(cls) else set()
    for part in cls.__mro__[1:]:
        is_decorated = "__dataclass_params__" in vars(part)
        if part is root or is_decorated or not issubclass(part, root):
            continue
        # a name without a default fails when it is read
        defaults = [name for name in _annotated(part) if name in vars(part)]
        # a class with the decorator may have annotated the name again, which makes it a field
        _refuse_fields(part, [name for name in defaults if name not in known])


def _annotated(cls: type) -> list[str]:
    """Return the names that a class annotates, without class variables."""
    hints = inspect.get_annotations(cls)
    return [name for name, hint in hints.items() if "ClassVar" not in str(hint)]


def _refuse_fields(cls: type, names: list[str]) -> None:
    """Raise TypeError if there are fields of a class without a decorator."""
    if names:
        fields_ = ", ".join(sorted(names))
        raise TypeError(f"{cls.__name__} has fields ({fields_}): put @register above it")


def store(frozen: object, /, **values: Any) -> None:
    """Store checked or derived values in a frozen object, in its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


def registered(base: type[_T]) -> dict[str, type[_T]]:
    """Return the registered subclasses of a class, by their names in specs."""
    return {name: cls for name, cls in _CLASSES.items() if issubclass(cls, base)}


def name_of(cls: type) -> str:
    """Return the name of a class in specs; ``__name__`` of a class that is not registered."""
    return _NAMES.get(cls, cls.__name__)


class ShortSignature:
    """The signature of a class as ``help()`` shows it: arguments and defaults, without annotations.

    It is computed from the ``__init__`` of a class. The annotations of rates are long. They are
    still in ``__init__``.
    """

    def __get__(self, obj: object, cls: type) -> inspect.Signature:
        if obj is not None:
            raise AttributeError("__signature__")  # objects can't be called
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]  # of any class
        _, *arguments = signature.parameters.values()
        bare = []
        for argument in arguments:
            bare.append(argument.replace(annotation=argument.empty))
        return inspect.Signature(bare)


def brief(obj: Any) -> str:
    """Return the repr of an object with its `stated_fields`."""
    return as_call(type(obj), stated_fields(obj))


def as_call(cls: type, arguments: Mapping[str, Any]) -> str:
    """Return the text of a call of a class.

    The value of the name ``""`` is the text of positional arguments, and is written as it is.
    """
    texts = []
    for name, value in arguments.items():
        written = f"{name}={text(value)}" if name else value
        texts.append(written)

    joined = ", ".join(texts)
    return f"{name_of(cls)}({joined})"


def text(value: Any) -> str:
    """Return the repr of a value without addresses; the name of a function or a class."""
    has_name = inspect.isroutine(value) or inspect.isclass(value)
    if has_name:
        name: str = value.__qualname__
        return name
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def stated_fields(obj: Any) -> dict[str, Any]:
    """Return the fields to show: those that differ from their defaults.

    Numbers except 0 are shown in any case, unless the class sets ``states_defaults = False``.
    Keyword-only fields come last. A method ``_stated`` of the class replaces these rules.
    """
    if hasattr(obj, "_stated"):
        replaced: dict[str, Any] = obj._stated()
        return replaced

    states_numbers = getattr(obj, "states_defaults", True)
    arguments = [field_ for field_ in fields(obj) if field_.init]
    arguments.sort(key=lambda field_: bool(field_.kw_only))
    stated = {}
    for argument in arguments:
        value = getattr(obj, argument.name)
        differs = value != argument.default
        if differs or (states_numbers and _is_nonzero_number(value)):
            stated[argument.name] = value
    return stated


def _is_nonzero_number(value: Any) -> bool:
    """Return whether a value is a number other than 0, and no boolean."""
    return is_number(value) and value != 0


def is_number(value: Any) -> bool:
    """Return whether a value is a number, and no boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
