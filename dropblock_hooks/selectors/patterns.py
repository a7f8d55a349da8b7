"""Regular expressions over names, matched by ``re`` where it has few enough ways to try.

It tries one way after another, and ``((.?)*)*!`` has more than there is time for. How many there
are is read from the pattern and the names, not from a clock: a busy machine changes no result.
"""

import functools
import re
import warnings
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import pairwise
from math import log2
from typing import Any

from ..quoting import message_of

_LONGEST = 2_000
_MOST_STEPS = 30  # as a power of two: some seconds at most
_WIDE = re.compile(r"-(?:[^\x00-\x7f]|\\[uUN])")  # a range that `re.compile` takes 8 ms for
_MOST_WIDE = 20
_LOCAL_FLAGS = re.compile(r"\(\?[a-z-]+:")
_TOO_LONG = (
    "takes too long to match: use fewer repeats (*, +, {}), above all of groups that repeat "
    "inside, or possessive ones (*+, ++)"
)
_parser, _compiler = import_module("re._parser"), import_module("re._compiler")


class PatternError(ValueError):
    """What is no regular expression, or one that can't be matched in time."""


def matching(text: str, names: tuple[str, ...]) -> list[str]:
    """The names that a regular expression means as a whole.

    Raises:
        PatternError: for what is none, or takes too long.
    """
    if len(text) > _LONGEST:
        raise PatternError(f"has {len(text)} characters; at most {_LONGEST}")
    try:
        with warnings.catch_warnings():  # of what may change in `re`
            warnings.simplefilter("ignore")
            if len(_WIDE.findall(text)) > _MOST_WIDE or _steps(text, names) > _MOST_STEPS:
                raise PatternError(_TOO_LONG)
            pattern = re.compile(text)
    except RecursionError:
        raise PatternError("is not a regular expression: it is nested too deeply") from None
    except (re.error, OverflowError) as error:
        raise PatternError(f"is not a regular expression: {message_of(error)}") from None
    return [name for name in names if pattern.fullmatch(name)]


def _steps(text: str, names: tuple[str, ...]) -> float:
    """No fewer steps than `re` takes to match a pattern on all names, as a power of two."""
    tree = _parser.parse(text)
    longest, total = max(map(len, names), default=0), sum(map(len, names))
    single = () if _LOCAL_FLAGS.search(text) else ("LITERAL", "NOT_LITERAL", "IN", "ANY")
    once = 0.0  # for what is matched in one way only: steps, but no ways for what is around it

    def most(*parts: Any) -> int:
        """In how many places of a name all parts fit that stand for one character, at most."""
        known = [part for part in parts if str(part[0]) in single]
        if not known:
            return longest
        ahead = [(_parser.ASSERT, (1, [part])) for part in known[1:]]
        place = _parser.SubPattern(tree.state, [*ahead, known[0]])
        return _most(_compiler.compile(place), names)

    def ways(parts: Iterable[Any], times: int) -> float:
        """How many there are to match a sequence so many times in a name, as a power of two."""
        nonlocal once
        bits = 0.0
        for (kind, value), behind in pairwise([*_flat(parts), (None, None)]):
            match str(kind):
                case "BRANCH":
                    inside = [ways(branch, times) for branch in value[1]]
                    bits += times * log2(len(inside)) + (max if times == 1 else sum)(inside)
                case "GROUPREF_EXISTS":
                    bits += times + sum(ways(branch or [], times) for branch in value[1:])
                case "ATOMIC_GROUP" | "POSSESSIVE_REPEAT" | "ASSERT" | "ASSERT_NOT":
                    once += ways(value[-1] if isinstance(value, tuple) else value, 1)
                case "MAX_REPEAT" | "MIN_REPEAT":
                    low, high, body = value
                    first, *_ = repeated = [*_flat(body), (None, None)]
                    turns = min(high * times, *map(most, repeated))  # and one each that fails
                    ends = min(high - low, most(first, behind))
                    bits += min(times * log2(1 + ends), times + turns)
                    bits += ways(body, min(high * times, turns + times))
                    bits += 0 if body.getwidth()[0] else max(low, turns)  # of nothing, or more
        return bits

    return log2(max(total, 1)) + ways([*tree, *_parser.parse("\0")], 1) + once


@functools.lru_cache(maxsize=100)
def _most(place: re.Pattern[str], names: tuple[str, ...]) -> int:
    return max((len(place.findall(name)) for name in names), default=0)


def _flat(parts: Iterable[Any]) -> Iterator[Any]:
    """The parts of a sequence; of a group, its parts."""
    for kind, value in parts:
        yield from _flat(value[-1]) if str(kind) == "SUBPATTERN" else [(kind, value)]
