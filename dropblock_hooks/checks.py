"""Checks of values that a user gives, each with one clear error message."""

import difflib
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from .quoting import quote, shorten, shown


def as_number(name: str, value: Any, kind: str = "a number") -> float:
    """`value` as a finite float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {kind}, got {shown(value)}")
    number = float(value)
    if number - number != 0.0:  # not finite; torch.compile can't trace math.isfinite
        raise ValueError(f"{name} must be a finite number, got {shorten(str(value))}")
    return number


def as_positive(name: str, value: Any) -> float:
    """`value` as a finite float above 0."""
    number = as_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be > 0, got {number}")
    return number


def as_count(name: str, value: Any, minimum: int = 1) -> int:
    """`value` as an integer of at least `minimum`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = minimum - 1
    if isinstance(value, bool) or count < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {shown(value)}")
    return count


def closest(word: str, known: Iterable[str], n: int = 3) -> str:
    """`" (closest: a, b)"`, or an empty text if no known name resembles `word`."""
    near = difflib.get_close_matches(word[:200], dict.fromkeys(known), n=n, cutoff=0.55)
    return f" (closest: {', '.join(near)})" if near else ""


def check_probability(p: float) -> float:
    """Return p if it is in [0, 1]; raise ValueError otherwise."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be in [0, 1], got {p}")
    return p


def check_option(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless `value` is among the allowed words or numbers."""
    if not isinstance(value, str | int | None) or value not in allowed:
        words = [word for word in allowed if isinstance(word, str)]
        hint = closest(value, words) if isinstance(value, str) else ""
        options = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {options}, got {quote(value)}{hint}")


def check_floating(input: Tensor) -> None:
    """Raise TypeError unless `input` holds floating-point numbers."""
    if not input.is_floating_point():
        raise TypeError(f"input must be a floating-point tensor, got {input.dtype}")


def check_block_size(block_size: int | Sequence[int], spatial: int) -> tuple[int, ...]:
    """One block edge per spatial axis."""
    if isinstance(block_size, list | tuple):
        if len(block_size) != spatial:
            raise ValueError(
                f"block_size must be an integer or {spatial} of them (one per spatial axis), "
                f"got {quote(tuple(block_size))}"
            )
        return tuple(as_count("block_size", b) for b in block_size)
    return (as_count("block_size", block_size),) * spatial
