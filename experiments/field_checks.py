"""What the values of a config's fields must be; each refusal says what was given."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def require(valid: bool, name: str, rule: str, value: object) -> None:
    """Refuse a value that is not valid.

    Raises:
        ValueError: that says what it must be.
    """
    if not valid:
        raise ValueError(f"{name} must be {rule}, got {value!r}")


def is_plain(data: object) -> bool:
    """Whether it is the same after a way through JSON."""
    if isinstance(data, dict):
        return all(isinstance(key, str) for key in data) and all(map(is_plain, data.values()))
    if isinstance(data, list | tuple):
        return all(map(is_plain, data))
    return isinstance(data, str | int | float | None)


def closest(word: str, known: Iterable[str]) -> str:
    """`" (closest: a, b)"`, or nothing where no known name resembles `word`."""
    near = difflib.get_close_matches(word, list(known), cutoff=0.55)
    return f" (closest: {', '.join(near)})" if near else ""


def check_known(word: str, known: Iterable[str], what: str, shown: str | None = None) -> None:
    """Refuse a name that is none of those known, which are `shown` so.

    Example:
        >>> check_known("flop", ["none", "flip"], "augmentation")
        Traceback (most recent call last):
        ValueError: unknown augmentation 'flop' (closest: flip)

    Raises:
        ValueError: that says which are.
    """
    known = list(known)
    if word not in known:
        hint = closest(word, known) or f"; known: {shown or ', '.join(known)}"
        raise ValueError(f"unknown {what} {word!r}{hint}")
