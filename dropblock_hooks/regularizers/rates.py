"""Rates: the fields that take a number or a schedule, and the values that they may take."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeAlias, get_args, get_type_hints

from ..checks import NON_NEGATIVE, POSITIVE, PROBABILITY, Range, as_number
from ..quoting import quote
from ..schedules import Schedule, span_of

RateLike: TypeAlias = float | Schedule | Callable[[float], float]
Rate: TypeAlias = Annotated[RateLike, Range()]
"""Any number, or a schedule of it."""
Probability: TypeAlias = Annotated[RateLike, PROBABILITY]
"""A number in [0, 1], or a schedule of it."""
NonNegative: TypeAlias = Annotated[RateLike, NON_NEGATIVE]
"""A number >= 0, or a schedule of it."""
Positive: TypeAlias = Annotated[RateLike, POSITIVE]
"""A number > 0, or a schedule of it."""


def checked_rate(name: str, rate: Any, allowed: Range) -> Any:
    if inspect.isclass(rate):
        cls = rate.__name__
        raise TypeError(f"{name} got the class {cls}: write {cls}(...)")
    if not callable(rate):
        return as_number(name, rate, "a number or a schedule", allowed)
    for end in filter(math.isfinite, span_of(rate)):
        if end not in allowed:
            raise ValueError(f"{name} must be {allowed}, got {quote(rate)}, which reaches {end:g}")
    return rate


@functools.cache
def hints_of(cls: Any) -> Mapping[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls)}


@functools.cache
def ranges_of(cls: Any) -> Mapping[str, Range]:
    found: dict[str, Range] = {}
    for name, hint in hints_of(cls).items():
        for part in (hint, *get_args(hint)):  # of ``Rate | None`` the first
            metadata = getattr(part, "__metadata__", ())
            found.update((name, each) for each in metadata if isinstance(each, Range))
    return found
