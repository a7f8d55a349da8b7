"""Checks of the values of a user, with one clear error message for each fault.

Constructors, ``functional`` and the methods of an `Attachment` call them with the arguments that
they get. Compiled code traces the checks of ``functional``, and torch 2.9 can't trace
the test of a type against a union of types, so these use tuples of types.
"""

import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from numbers import Real
from types import NoneType
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.fx import Proxy

from .quoting import quote, shorten, shown
from .registry import is_number

_P = ParamSpec("_P")
_T = TypeVar("_T")

_OTHER_NAMES = {
    "p": ("drop_prob", "drop_rate", "dropout", "keep_prob", "prob", "rate"),
    "start": ("begin", "first", "initial"),
    "stop": ("end", "final", "last"),
}
"""What other libraries call an argument of this package."""


@dataclass(frozen=True)
class Range:
    """The values that a number may take.

    Example:
        >>> 1.0 in Range(0, 1, open_high=True)
        False

    Args:
        low: the lower bound, any number or -inf.
        high: the upper bound, any number or inf.
        open_low: True excludes the lower bound itself.
        open_high: True excludes the upper bound itself.
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        if self.low == -math.inf and self.high == math.inf:
            return "a finite number"
        if self.high == math.inf:
            relation = ">" if self.open_low else ">="
            return f"{relation} {self.low:g}"

        left = "(" if self.open_low else "["
        right = ")" if self.open_high else "]"
        return f"in {left}{self.low:g}, {self.high:g}{right}"


PROBABILITY = Range(0, 1)
NON_NEGATIVE = Range(0)
POSITIVE = Range(0, open_low=True)


def as_number(name: str, value: Any, kind: str = "a number", allowed: Range | None = None) -> float:
    """Return `value` as a finite float in the allowed range.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is not finite, or not in the range.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {kind}, got {shown(value)}")

    number = float(value)
    if number - number != 0.0:  # not finite; torch.compile can't trace math.isfinite
        raise ValueError(f"{name} must be a finite number, got {shorten(str(value))}")
    if allowed is not None and number not in allowed:
        hint = _percent_hint(number, allowed)
        raise ValueError(f"{name} must be {allowed}, got {shorten(str(value))}{hint}")
    return number


def _percent_hint(number: float, allowed: Range) -> str:
    """Return the advice to write a share, if a number that must be a share may be a percentage."""
    is_share = (allowed.low, allowed.high) == (0, 1)
    if is_share and 2 <= number <= 100:
        return f" ({number:g} % is {number / 100:g})"
    return ""


def as_count(name: str, value: Any, minimum: int = 1) -> int:
    """Return `value` as an integer of at least `minimum`, or raise ValueError."""
    try:
        count = operator.index(value)
    except TypeError:
        count = minimum - 1

    if isinstance(value, bool) or count < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {shown(value)}")
    return count


def as_index(value: Any) -> int | str | None:
    """Return the place of an element, an integer or a key, or raise TypeError."""
    if value is None or isinstance(value, str):
        return value

    message = f"index must be an integer or a key, got {shown(value)}"
    if isinstance(value, bool):
        raise TypeError(message)
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(message) from None


def closest(word: str, known: Iterable[str], n: int = 3) -> str:
    """Return `" (closest: a, b)"`, or an empty text if no known name resembles `word`."""
    near = difflib.get_close_matches(word[:200], dict.fromkeys(known), n=n, cutoff=0.55)
    if not near:
        return ""
    return f" (closest: {', '.join(near)})"


def check_arguments(
    cls: type, args: Sequence[Any], kwargs: Mapping[str, Any], annotation: str
) -> None:
    """Raise TypeError for an argument that a class of regularizers or schedules does not take.

    Args:
        cls: the class that is called.
        args: the positional arguments.
        kwargs: the keyword arguments.
        annotation: the annotation that the message proposes.
    """
    known: Mapping[str, Any] = getattr(cls, "__dataclass_fields__", {})
    names = list(kwargs)
    # class variables are among these fields but are no arguments, and their `kw_only` is MISSING
    positional = [name for name, field_ in known.items() if field_.kw_only is False]
    if len(args) > len(positional):  # perhaps a rate was meant that has no annotation
        names += _new_attributes(cls)

    for name in names:
        value = getattr(cls, name, None)
        if is_number(value) and name not in known:
            raise TypeError(
                f"{cls.__name__} has no argument {name!r}, because {name} = {value} has no "
                f"annotation in the class: write `{name}: {annotation} = {value}`, and @register "
                "above the class"
            )
    names_of_class = _names_of(cls.__init__)  # type: ignore[misc]  # of any class
    _check_names(cls.__name__, kwargs, names_of_class)


def _new_attributes(cls: type) -> list[str]:
    """Return the names of the attributes that the bases of a class do not have."""
    names = []
    for name in vars(cls):
        is_inherited = any(hasattr(base, name) for base in cls.__bases__)
        if not is_inherited:
            names.append(name)
    return names


def clear_call(example: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorate a function, so that the error about a wrong argument says what to write.

    Args:
        example: a correct call.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        name = function.__name__
        names = _names_of(function)
        parameters = inspect.signature(function).parameters.values()
        most = sum(parameter.kind is not Parameter.KEYWORD_ONLY for parameter in parameters)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if len(args) > most:
                raise TypeError(
                    f"{name} takes at most {most} arguments without a name, got {len(args)}: "
                    f"write {example}"
                )
            _check_names(name, kwargs, names)
            return function(*args, **kwargs)

        return call

    return decorate


@functools.cache
def _names_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of the arguments of a function; None if it takes any name."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(parameter.name for parameter in parameters if parameter.name != "self")


def _check_names(callee: str, kwargs: Mapping[str, Any], names: Collection[str] | None) -> None:
    """Raise TypeError for a keyword argument with an unknown name, with the closest name."""
    if names is None:
        return
    for name in kwargs:
        if name not in names:
            meant = _meant_argument(name, names)
            hint = f" Did you mean {meant}?" if meant else ""
            if name == "keep_prob" and meant == "p":
                hint += " p is the share that is dropped: 1 - keep_prob."
            known = ", ".join(names) or "none"
            raise TypeError(f"{callee} has no argument {name!r}.{hint} Arguments: {known}")


def _meant_argument(name: str, names: Collection[str]) -> str:
    """Return the argument that an unknown name probably means, or an empty text."""
    meant = own_name(name, names)
    if meant:
        return meant
    near = difflib.get_close_matches(name[:200], names, n=1, cutoff=0.55)
    return near[0] if near else ""


def own_name(name: str, names: Collection[str]) -> str:
    """Return the argument that other libraries call by this name, or an empty text."""
    for own, others in _OTHER_NAMES.items():
        if name in others and own in names:
            return own
    return ""


def check_option(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError for a value that is not one of the allowed ones."""
    is_plain = isinstance(value, (str, int, NoneType))  # arrays, for example, have another `==`
    if is_plain and value in allowed:
        return

    if len(allowed) == 1:
        raise ValueError(f"{name} must be {allowed[0]!r}, got {quote(value)}")
    hint = closest(str(value), map(str, allowed))
    options = ", ".join(map(repr, allowed))
    raise ValueError(f"{name} must be one of {options}, got {quote(value)}{hint}")


def check_tensor(input: Any) -> None:
    """Raise TypeError for an object that is no tensor, and no Proxy of torch.fx for one."""
    if not isinstance(input, (Tensor, Proxy)):
        raise TypeError(f"input must be a tensor, got {quote(input)}")


def check_floating(input: Any) -> None:
    """Raise TypeError for an object that is no tensor, or no floating-point tensor."""
    check_tensor(input)
    if not input.is_floating_point():
        raise TypeError(f"input must be a floating-point tensor, got {input.dtype}")


def check_block_size(block_size: int | Sequence[int], spatial: int) -> tuple[int, ...]:
    """Return `block_size` as one integer for each of `spatial` axes, or raise ValueError."""
    if not isinstance(block_size, (list, tuple)):
        return (as_count("block_size", block_size),) * spatial

    if len(block_size) != spatial:
        raise ValueError(
            f"block_size must be an integer or {spatial} of them (one per spatial axis), "
            f"got {quote(tuple(block_size))}"
        )
    return tuple(as_count("block_size", size) for size in block_size)
