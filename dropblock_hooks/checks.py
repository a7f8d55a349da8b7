"""Checks of the values of a user, with one clear error message for each fault."""

import difflib
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

from .quoting import quote, shorten, shown


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
        raise ValueError(f"{name} must be {allowed}, got {shorten(str(value))}")
    return number


def as_count(name: str, value: Any, minimum: int = 1) -> int:
    """Return `value` as an integer of at least `minimum`, or raise ValueError."""
    try:
        count = operator.index(value)
    except TypeError:
        count = minimum - 1

    if isinstance(value, bool) or count < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {shown(value)}")
    return count


def closest(word: str, known: Iterable[str], n: int = 3) -> str:
    """Return `" (closest: a, b)"`, or an empty text if no known name resembles `word`."""
    near = difflib.get_close_matches(word[:200], dict.fromkeys(known), n=n, cutoff=0.55)
    if not near:
        return ""
    return f" (closest: {', '.join(near)})"


def check_option(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError for a value that is not one of the allowed ones."""
    is_plain = isinstance(value, str | int | None)  # arrays, for example, have another `==`
    if not is_plain or value not in allowed:
        hint = closest(str(value), map(str, allowed))
        options = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {options}, got {quote(value)}{hint}")


def check_floating(input: Tensor) -> None:
    """Raise TypeError for a tensor of integers, booleans or complex numbers."""
    if not input.is_floating_point():
        raise TypeError(f"input must be a floating-point tensor, got {input.dtype}")


def check_block_size(block_size: int | Sequence[int], spatial: int) -> tuple[int, ...]:
    """Return `block_size` as one integer for each of `spatial` axes, or raise ValueError."""
    if not isinstance(block_size, list | tuple):
        return (as_count("block_size", block_size),) * spatial

    if len(block_size) != spatial:
        raise ValueError(
            f"block_size must be an integer or {spatial} of them (one per spatial axis), "
            f"got {quote(tuple(block_size))}"
        )
    return tuple(as_count("block_size", size) for size in block_size)
