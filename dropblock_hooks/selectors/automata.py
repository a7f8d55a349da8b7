"""Regular expressions matched by sets of states: the time grows with the text, never faster.

Python's ``re`` tries one way after another, and ``((.?)*)*!`` has more ways than there is time for.
Here all ways are followed at once. What is read is the syntax of ``re`` without what needs memory
of the way: backreferences, atomic groups, possessive repeats; nor lookbehind, and only the flags
``i`` and ``s``. Every pattern that comes here was accepted by ``re.compile``.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable
from typing import Any, TypeAlias

Code: TypeAlias = list[tuple[Any, ...]]
"""Instructions: ("atom", pattern of one character), ("go", steps to what may come next),
("test", what is asked about a place in the text). Steps are relative, so code can be repeated."""

_ATOM = re.compile(
    r"\[\^?\]?(?:[^\]\\]|\\.)*\]"
    r"|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[dDsSwWafnrtv]|[^0-9a-zA-Z])"
    r"|[^\\()|*+?\[^$]",
    re.DOTALL,
)
_EDGE = re.compile(r"\^|\$|\\[AZbB]")
_REPEAT = re.compile(r"([*+?]|\{(?:[0-9]+|[0-9]*,[0-9]*)\})(\??)(\+?)")
_TIMES = {"*": "0,", "+": "1,", "?": "0,1"}
_GROUP = re.compile(r"\((?:\?(?::|P<\w+>|=|!))?")
_FLAGS = re.compile(r"\(\?[is]+\)")
_ANYTHING = "(?s:.)"
_MOST_CODE = 2_000


class NotReadError(Exception):
    """A pattern holds what is not read here."""


class TooLongError(Exception):
    """Matching takes more steps than are left."""


class Effort:
    """The steps that all patterns of one spec may take together."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Raise TooLongError where no steps are left."""
        self._left -= steps
        if self._left < 0:
            raise TooLongError


def compiled(text: str) -> re.Pattern[str]:
    """A pattern as ``re`` reads it today, without its warnings of what may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return re.compile(text)


class Automaton:
    """A pattern as a list of instructions, and the sets of them that texts have led to."""

    def __init__(self, code: Code, effort: Effort) -> None:
        self._code = code
        self._effort = effort
        self._next: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    @classmethod
    def of(cls, pattern: str, effort: Effort) -> Automaton:
        """That of a pattern.

        Raises:
            NotReadError: for a pattern that holds what is not read here.
            TooLongError: for one that is too long when its repeats are spelled out.
        """
        return cls(_Parser(pattern, effort).code(), effort)

    def fullmatch(self, text: str, at: int = 0) -> bool:
        """Whether the pattern means the whole text, or all of it from a place on."""
        states = self._reached((0,), text, at)[0]
        for i in range(at, len(text)):
            if not states:
                return False
            known = self._next.get((states, text[i]))
            states = self._after(states, text, i) if known is None else known
        return len(self._code) in states

    def _after(self, states: frozenset[int], text: str, at: int) -> frozenset[int]:
        """The states behind the character that stands there."""
        self._effort.spend(len(states))
        atoms = [i for i in states if i < len(self._code)]
        found = [i + 1 for i in atoms if _fits(self._code[i][1], text[at])]
        reached, anywhere = self._reached(found, text, at + 1)
        if anywhere:
            self._next[states, text[at]] = reached
        return reached

    def _reached(self, states: Iterable[int], text: str, at: int) -> tuple[frozenset[int], bool]:
        """What is reached without a character, and whether it is so anywhere in any text."""
        todo, seen, found, anywhere = list(states), set(), [], True
        while todo:
            i = todo.pop()
            if i in seen:
                continue
            seen.add(i)
            kind, *rest = self._code[i] if i < len(self._code) else ("atom",)  # behind all: the end
            if kind == "atom":
                found.append(i)
            elif kind == "go":
                todo += [i + step for step in rest]
            else:
                anywhere = False
                if rest[0](text, at):
                    todo.append(i + 1)
        self._effort.spend(len(seen))
        return frozenset(found), anywhere


@functools.lru_cache(maxsize=10_000)
def _fits(atom: str, character: str) -> bool:
    return compiled(atom).fullmatch(character) is not None


class _Parser:
    """Reads a pattern from left to right, as code."""

    def __init__(self, text: str, effort: Effort) -> None:
        flags = _FLAGS.match(text)
        self._text, self._effort = text, effort
        self._flags = flags.group() if flags else ""
        self._at = len(self._flags)

    def code(self) -> Code:
        """The whole pattern."""
        code = self._alternatives()
        if self._at < len(self._text):
            raise NotReadError
        return code

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found:
            self._at = found.end()
        return found

    def _alternatives(self) -> Code:
        code = self._sequence()
        while self._text.startswith("|", self._at):
            self._at += 1
            other = self._sequence()
            code = [("go", 1, len(code) + 2), *code, ("go", len(other) + 1), *other]
        return code

    def _sequence(self) -> Code:
        code: Code = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            code += self._repeated(self._one())
            if len(code) > _MOST_CODE:
                raise TooLongError
        return code

    def _one(self) -> Code:
        edge = self._take(_EDGE)
        if edge:
            return [("test", re.compile(edge.group()).match)]
        group = self._take(_GROUP)
        if not group:
            atom = self._take(_ATOM)
            if not atom:
                raise NotReadError
            return [("atom", self._flags + atom.group())]
        if self._text.startswith("?", self._at):  # a group of another kind
            raise NotReadError
        inner = self._alternatives()
        self._at += 1
        look = group.group()[2:]
        if look not in ("=", "!"):
            return inner
        ahead = Automaton(inner + _repeat([("atom", _ANYTHING)], 0, None), self._effort).fullmatch
        return [("test", ahead if look == "=" else lambda text, at: not ahead(text, at))]

    def _repeated(self, code: Code) -> Code:
        found = self._take(_REPEAT)
        if not found:
            return code
        times, lazy, possessive = found.groups()
        if possessive and not lazy:
            raise NotReadError
        low, comma, high = _TIMES.get(times, times[1:-1]).partition(",")
        most = high if comma else low
        return _repeat(code, int(low or 0), int(most) if most else None)


def _repeat(code: Code, low: int, high: int | None) -> Code:
    if not code:
        return []
    if (len(code) + 1) * max(low, high or 0) > _MOST_CODE:
        raise TooLongError
    if high is None:
        return code * low + [("go", 1, len(code) + 2), *code, ("go", -len(code) - 1)]
    return code * low + [("go", 1, len(code) + 1), *code] * (high - low)
