"""Regular expressions over names: matched by ``re`` where it has few enough ways to try.

It tries one way after another, and ``((.?)*)*!`` has more than there is time for. Where that may be
so, all ways are followed at once: from the places where a part may begin to those where it may end.
Steps are counted, not seconds: the same spec gives the same result on a busy machine.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from itertools import groupby
from typing import Any, TypeAlias

from ..quoting import message_of

_MOST_STEPS = 600_000  # of all patterns of a spec that re is not trusted with: some .6 s
_SURE = 3_000_000  # steps of re, about 50 ms
_WIDE = re.compile(r"-(?:[^\x00-\x7f]|\\[uUN])")  # a range that re.compile takes 8 ms for
_WIDE_STEPS = 100_000
_REPEATED_GROUP = re.compile(r"\)(?:\s|#.*+)*+[*+{]")  # (?x) allows blanks and comments between
_ONE_CHARACTER = ("LITERAL", "NOT_LITERAL", "IN", "ANY")
_TOO_LONG = "takes too long to match: use fewer repeats (*, +, {}), none inside of repeated groups"
_parser, _compiler = import_module("re._parser"), import_module("re._compiler")
Ends: TypeAlias = Callable[[str, set[int]], set[int]]


class PatternError(ValueError):
    """What is no regular expression, or one that can't be matched in time."""


class _TooLongError(Exception):
    """Matching takes more steps than are left, or depends on the way."""


class Effort:
    """The steps that all patterns of one spec may take together."""

    def __init__(self) -> None:
        self._left = _MOST_STEPS

    def spend(self, steps: int) -> None:
        """Raise where no steps are left."""
        self._left -= steps
        if self._left < 0:
            raise _TooLongError


def matching(text: str, names: Sequence[str], effort: Effort) -> list[str]:
    """The names that a regular expression means as a whole.

    Raises:
        PatternError: for what is none, or takes too long.
    """
    try:
        effort.spend(_WIDE_STEPS * len(_WIDE.findall(text)) + 100 * max(0, len(text) - 200))
        with warnings.catch_warnings():  # of what may change in `re`
            warnings.simplefilter("ignore")
            pattern = re.compile(text)
            if sum(map(len, names)) * _most_ways(text, max(map(len, names), default=0)) <= _SURE:
                return [name for name in names if pattern.fullmatch(name)]
            ways = _Ways(_parser.parse(text), effort)
        return [name for name in names if len(name) in ways.ends(name, {0})]
    except _TooLongError:
        raise PatternError(_TOO_LONG) from None
    except RecursionError:
        raise PatternError("is not a regular expression: it is nested too deeply") from None
    except (re.error, OverflowError, SystemError) as error:
        raise PatternError(f"is not a regular expression: {message_of(error)}") from None


def _most_ways(text: str, n: int) -> float:
    """No fewer ways than a search that tries one after another has on a text of length `n`."""
    bare = re.sub(r"\\.", "_", text, flags=re.DOTALL).replace("(?", "(")
    if _REPEATED_GROUP.search(bare):
        return float("inf")
    repeats, choices = (sum(map(bare.count, kinds)) for kinds in ("*+{", "?|"))
    return float(n + 1) ** min(repeats, 50) * 2.0 ** min(choices, 50)


class _Ways:
    """A pattern as ``re`` has read it, as a function that follows all ways at once: from a name and
    the places where the pattern may begin to those where it may end.
    """

    def __init__(self, tree: Any, effort: Effort) -> None:
        self._state, self._effort = tree.state, effort
        self.ends = self._sequence(tree)

    def _match(self, *parts: Any) -> Any:
        return _compiler.compile(_parser.SubPattern(self._state, parts)).match

    def _sequence(self, parts: Iterable[Any]) -> Ends:
        steps: list[Ends] = []
        for plain, run in groupby(parts, lambda part: str(part[0]) in (*_ONE_CHARACTER, "AT")):
            if plain:  # meant in one way at a place
                steps.append(partial(_at_once, self._match(*run)))
            else:
                steps += [self._step(str(kind), value) for kind, value in run]

        def ends(name: str, starts: set[int]) -> set[int]:
            for step in steps:
                if not starts:
                    break
                self._effort.spend(len(starts))
                starts = step(name, starts)
            return starts

        return ends

    def _step(self, kind: str, value: Any) -> Ends:
        if kind == "SUBPATTERN" and not (value[1] or value[2]):  # no flags of its own
            return self._sequence(value[3])
        if kind == "BRANCH":
            branches = [self._sequence(branch) for branch in value[1]]
            return lambda name, starts: set().union(*(ends(name, starts) for ends in branches))
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, body = value
            if len(body) == 1 and str(body[0][0]) in _ONE_CHARACTER:
                match = self._match((_parser.MAX_REPEAT, value))
                return partial(_run, match, low, high, self._effort)
            return partial(_repeated, low, high, self._sequence(body))
        if kind in ("ASSERT", "ASSERT_NOT") and value[0] == 1:  # what is ahead
            wanted, ahead = kind == "ASSERT", self._sequence(value[1])
            return lambda name, starts: {i for i in starts if bool(ahead(name, {i})) == wanted}
        raise _TooLongError  # a backreference, say


def _at_once(match: Any, name: str, starts: set[int]) -> set[int]:
    return {found.end() for i in starts if (found := match(name, i))}


def _run(match: Any, low: int, high: int, effort: Effort, name: str, starts: set[int]) -> set[int]:
    """Of one character, repeated: with no upper limit, all that begin in a run end with it."""
    ends, last = set[int](), -1
    for i in sorted(starts):
        if i > last and (found := match(name, i)):
            last = found.end() if high == _parser.MAXREPEAT else -1
            ends.update(range(i + low, found.end() + 1))
            effort.spend((found.end() - i) // 8)
    return ends


def _repeated(low: int, high: int, once: Ends, name: str, starts: set[int]) -> set[int]:
    for _ in range(low):
        before, starts = starts, once(name, starts)
        if starts == before:  # and will be, however often
            break
    reached = new = starts
    for _ in range(high - low):
        new = once(name, new) - reached
        if not new:
            break
        reached = reached | new
    return reached
