"""Regular expressions over names: matched by ``re`` where it has few enough ways to try.

It tries one way after another, and ``((.?)*)*!`` has more than there is time for. Where that may be
so, all ways are followed at once: from the places where a part may begin to those where it may end.
Steps are counted, not seconds: the same spec gives the same result on a busy machine.
"""

import re
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from ..quoting import message_of

_LONGEST = 2_000
_MOST_STEPS = 3_000_000  # of all patterns of a spec that re is not trusted with: a second or two
_SURE = 3_000_000  # steps of re, about 50 ms
_WIDE = re.compile(r"-(?:[^\x00-\x7f]|\\[uUN])")  # a range that re.compile takes 8 ms for
_WIDE_STEPS = 100_000
_REPEATED_GROUP = re.compile(r"\)(?:\s|#.*+)*+[*+{]")  # (?x) allows blanks and comments between
_ONE_CHARACTER = ("LITERAL", "NOT_LITERAL", "IN", "ANY")
_TOO_LONG = (
    "takes too long to match: use fewer repeats (*, +, {}), above all of groups that repeat inside"
)
_parser, _compiler = import_module("re._parser"), import_module("re._compiler")


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
    if len(text) > _LONGEST:
        raise PatternError(f"has {len(text)} characters; at most {_LONGEST}")
    try:
        effort.spend(_WIDE_STEPS * len(_WIDE.findall(text)) + 100 * max(0, len(text) - 200))
        with warnings.catch_warnings():  # of what may change in `re`
            warnings.simplefilter("ignore")
            pattern = re.compile(text)
            if sum(map(len, names)) * _most_ways(text, max(map(len, names), default=0)) <= _SURE:
                return [name for name in names if pattern.fullmatch(name)]
            ways = _Ways(_parser.parse(text), effort)
        return [name for name in names if len(name) in ways.ends(ways.tree, name, {0})]
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
    """A pattern as ``re`` has read it, followed in all ways at once."""

    def __init__(self, tree: Any, effort: Effort) -> None:
        self.tree, self._effort = tree, effort
        self._compiled: dict[int, Any] = {}  # by the identity of what stands in the tree

    def ends(self, parts: Iterable[Any], name: str, starts: set[int]) -> set[int]:
        """Where a sequence of parts may end, if it begins at one of these places of a name."""
        for part in parts:
            self._effort.spend(len(starts) + 1)
            kind, value = str(part[0]), part[1]
            if kind in (*_ONE_CHARACTER, "AT"):
                match = self._matching(part, part)
                starts = {found.end() for i in starts if (found := match(name, i))}
            elif kind == "SUBPATTERN" and not (value[1] or value[2]):  # no flags of its own
                starts = self.ends(value[3], name, starts)
            elif kind == "BRANCH":
                starts = set().union(*(self.ends(each, name, starts) for each in value[1]))
            elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
                starts = self._repeated(value, name, starts)
            elif kind in ("ASSERT", "ASSERT_NOT") and value[0] == 1:  # what is ahead
                wanted = kind == "ASSERT"
                starts = {i for i in starts if bool(self.ends(value[1], name, {i})) == wanted}
            else:  # a backreference, say
                raise _TooLongError
        return starts

    def _repeated(self, repeat: Any, name: str, starts: set[int]) -> set[int]:
        low, high, body = repeat
        if len(body) == 1 and str(body[0][0]) in _ONE_CHARACTER:
            match = self._matching(body, (_parser.MAX_REPEAT, repeat))
            ends, run = set[int](), -1
            for i in sorted(starts):
                if i > run and (found := match(name, i)):
                    run = found.end() if high == _parser.MAXREPEAT else -1  # later ones end there
                    ends.update(range(i + low, found.end() + 1))
                    self._effort.spend(found.end() - i)
            return ends
        for _ in range(low):
            before, starts = starts, self.ends(body, name, starts)
            if starts == before:  # and will be, however often
                break
        reached = new = starts
        for _ in range(high - low):
            new = self.ends(body, name, new) - reached
            if not new:
                break
            reached = reached | new
        return reached

    def _matching(self, key: Any, part: Any) -> Any:
        """How ``re`` matches one part at a place."""
        if id(key) not in self._compiled:
            alone = _parser.SubPattern(self.tree.state, [part])
            self._compiled[id(key)] = _compiler.compile(alone).match
        return self._compiled[id(key)]
