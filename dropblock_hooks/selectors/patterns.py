"""Regular expressions over names: matched by ``re`` where that is sure to be quick.

``re`` tries one way after another. Where a pattern may have too many, it is matched by `Automaton`;
what that does not read, or can't do in time, is refused. Nothing here depends on a clock: the same
spec gives the same result on a busy machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ..quoting import message_of
from .automata import Automaton, Effort, NotReadError, TooLongError, compiled

MOST_STEPS = 300_000  # of all patterns of a spec that re is not trusted with; at most .5 s
_LONGEST = 2_000
_SURE = 3_000_000  # steps of re, about 50 ms
_WIDE = re.compile(r"-(?:[^\x00-\x7f]|\\[uUN])")
_WIDE_STEPS = 25_000  # re.compile takes 8 ms for each range of characters beyond ASCII
_REPEATED_GROUP = re.compile(r"\)(?:\s|#.*+)*+[*+{]")  # (?x) allows blanks and comments between
_TOO_LONG = (
    "takes too long to match: use fewer repeats (*, +, {}), above all of groups that repeat inside"
)


class PatternError(ValueError):
    """What is no regular expression, or one that can't be matched in time."""


def matching(text: str, names: Sequence[str], effort: Effort) -> list[str]:
    """The names that a regular expression means as a whole.

    Raises:
        PatternError: for what is none, or takes too long.
    """
    if len(text) > _LONGEST:
        raise PatternError(f"has {len(text)} characters; at most {_LONGEST}")
    try:
        effort.spend(_WIDE_STEPS * len(_WIDE.findall(text)) + 10 * max(0, len(text) - 200))
        pattern = compiled(text)
        return _matching(pattern, names, effort)
    except TooLongError:
        raise PatternError(_TOO_LONG) from None
    except RecursionError:
        raise PatternError("is not a regular expression: it is nested too deeply") from None
    except (re.error, OverflowError) as error:
        raise PatternError(f"is not a regular expression: {message_of(error)}") from None


def _matching(pattern: re.Pattern[str], names: Sequence[str], effort: Effort) -> list[str]:
    longest, total = max(map(len, names), default=0), sum(map(len, names))
    if not total:  # a number of ways that is infinite can't be multiplied by it
        return []
    fullmatch: Callable[[str], object] = pattern.fullmatch
    steps = total * _most_ways(pattern.pattern, longest)
    if steps > _SURE:
        try:
            fullmatch = Automaton.of(pattern.pattern, effort).fullmatch
        except NotReadError:
            effort.spend(int(min(steps / 100, MOST_STEPS + 1)))
    return [name for name in names if fullmatch(name)]


def _most_ways(text: str, n: int) -> float:
    """No fewer ways than a search that tries one after another has on a text of length `n`."""
    bare = re.sub(r"\\.", "_", text, flags=re.DOTALL).replace("(?", "(")
    if _REPEATED_GROUP.search(bare):
        return float("inf")
    repeats = sum(map(bare.count, "*+{"))
    choices = sum(map(bare.count, "?|"))
    return float(n + 1) ** min(repeats, 50) * 2.0 ** min(choices, 50)
