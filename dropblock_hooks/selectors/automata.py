"""Regular expressions matched by sets of states: the time grows with the text, never faster.

Python's ``re`` tries one way after another, and ``((.?)*)*!`` has more ways than there is time for.
Here all ways are followed at once. What is read is the syntax of ``re`` without what needs memory
of the way: backreferences, atomic groups, possessive repeats; nor lookbehind, and only the flags
``i`` and ``s``. Every pattern that comes here was accepted by ``re.compile``.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable
from typing import Any, TypeAlias

Node: TypeAlias = tuple[Any, ...]
"""("atom", text), ("seq", nodes), ("alt", nodes), ("repeat", node, low, high or None),
("edge", text), ("look", node, wanted)"""

_ATOM = re.compile(
    r"\[\^?\]?(?:[^\]\\]|\\.)*\]"
    r"|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[dDsSwWafnrtv]|[^0-9a-zA-Z])"
    r"|[^\\()|*+?\[^$]",
    re.DOTALL,
)
_EDGE = re.compile(r"\^|\$|\\[AZbB]")
_REPEAT = re.compile(r"([*+?]|\{(?:[0-9]+|[0-9]*,[0-9]*)\})(\??)(\+?)")
_GROUP = re.compile(r"\((?:\?(?::|P<\w+>|=|!))?")
_FLAGS = re.compile(r"\(\?[is]+\)")
_WORD = re.compile(r"\w")
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


def parse(text: str) -> tuple[str, Node]:
    """The flags of a pattern, as it writes them, and its tree."""
    flags = _FLAGS.match(text)
    prefix = flags.group() if flags else ""
    parser = _Parser(text, len(prefix))
    node = parser.alternatives()
    if parser.at < len(text):
        raise NotReadError
    return prefix, node


class _Parser:
    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def alternatives(self) -> Node:
        branches = [self._sequence()]
        while self.text.startswith("|", self.at):
            self.at += 1
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else ("alt", branches)

    def _sequence(self) -> Node:
        nodes = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            nodes.append(self._repeated(self._one()))
        return "seq", nodes

    def _one(self) -> Node:
        edge = self._take(_EDGE)
        if edge:
            return "edge", edge.group()
        group = self._take(_GROUP)
        if not group:
            atom = self._take(_ATOM)
            if not atom:
                raise NotReadError
            return "atom", atom.group()
        if self.text.startswith("?", self.at):  # a group of another kind
            raise NotReadError
        inner = self.alternatives()
        self.at += 1
        look = group.group()[2:]
        return ("look", inner, look == "=") if look in ("=", "!") and look else inner

    def _repeated(self, node: Node) -> Node:
        found = self._take(_REPEAT)
        if not found:
            return node
        times, lazy, possessive = found.groups()
        if possessive and not lazy:
            raise NotReadError
        if times in ("*", "+", "?"):
            return "repeat", node, int(times == "+"), 1 if times == "?" else None
        low, comma, high = times[1:-1].partition(",")
        most = high if comma else low
        return "repeat", node, int(low or 0), int(most) if most else None


def ways(node: Node, n: int) -> float:
    """How many ways a search that tries one after another may have on a text of length `n`."""
    kind = node[0]
    if kind == "seq":
        return float(math.prod(ways(part, n) for part in node[1]))
    if kind == "alt":
        return sum(ways(part, n) for part in node[1])
    if kind == "look":
        return ways(node[1], n)
    if kind != "repeat":
        return 1
    inner, low, high = node[1:]
    once = ways(inner, n)
    if high is not None and high <= 1:
        return once + (1 - low) if high else 1
    if once > 1 or _may_be_empty(inner):
        return math.inf
    return float((n if high is None else min(high, n)) - min(low, n) + 1)


def _may_be_empty(node: Node) -> bool:
    kind = node[0]
    if kind == "seq":
        return all(map(_may_be_empty, node[1]))
    if kind == "alt":
        return any(map(_may_be_empty, node[1]))
    if kind == "repeat":
        return node[2] == 0 or _may_be_empty(node[1])
    return bool(kind != "atom")


class Automaton:
    """A pattern as a list of instructions, and the sets of them that texts have led to."""

    def __init__(self, flags: str, node: Node, effort: Effort) -> None:
        self._flags = flags
        self._effort = effort
        self._code: list[tuple[Any, ...]] = []
        self._next: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._fits: dict[tuple[str, str], bool] = {}
        self._emit(node)
        self._end = len(self._code)
        self._code.append(("end",))

    def fullmatch(self, text: str) -> bool:
        """Whether the pattern means the whole text."""
        states = self._reached((0,), text, 0)[0]
        for at, character in enumerate(text):
            if not states:
                return False
            states = self._after(states, character, text, at + 1)
        return self._end in states

    def _begins(self, text: str, at: int) -> bool:
        """Whether the pattern means a part of the text that begins here."""
        states = self._reached((0,), text, at)[0]
        while states and at < len(text) and self._end not in states:
            states = self._after(states, text[at], text, at + 1)
            at += 1
        return self._end in states

    def _after(self, states: frozenset[int], character: str, text: str, at: int) -> frozenset[int]:
        known = self._next.get((states, character))
        if known is not None:
            return known
        self._effort.spend(len(states))
        found = [i + 1 for i in states if i != self._end and self._fit(i, character)]
        reached, anywhere = self._reached(found, text, at)
        if anywhere:
            self._next[states, character] = reached
        return reached

    def _fit(self, i: int, character: str) -> bool:
        key = self._code[i][1], character
        if key not in self._fits:
            found = compiled(self._flags + self._code[i][1]).fullmatch(character)
            self._fits[key] = found is not None
        return self._fits[key]

    def _reached(self, states: Iterable[int], text: str, at: int) -> tuple[frozenset[int], bool]:
        """What is reached without a character, and whether it is so anywhere in any text."""
        todo, seen, found, anywhere = list(states), set(), [], True
        while todo:
            i = todo.pop()
            if i in seen:
                continue
            seen.add(i)
            kind, *rest = self._code[i]
            if kind in ("atom", "end"):
                found.append(i)
            elif kind == "go":
                todo += rest[0]
            else:
                anywhere = False
                if self._holds(kind, rest, text, at):
                    todo.append(i + 1)
        self._effort.spend(len(seen))
        return frozenset(found), anywhere

    def _holds(self, kind: str, rest: list[Any], text: str, at: int) -> bool:
        if kind == "look":
            found: bool = rest[0]._begins(text, at)
            return found is rest[1]
        edge = rest[0]
        if edge in ("^", r"\A"):
            return at == 0
        if edge in ("$", r"\Z"):
            return at == len(text) or (edge == "$" and text[at:] == "\n")
        sides = [
            _WORD.fullmatch(side) is not None for side in (text[at - 1 : at], text[at : at + 1])
        ]
        return (sides[0] is not sides[1]) is (edge == r"\b")

    def _add(self, *instruction: Any) -> int:
        if len(self._code) >= _MOST_CODE:
            raise TooLongError
        self._code.append(instruction)
        return len(self._code) - 1

    def _emit(self, node: Node) -> None:
        kind = node[0]
        if kind in ("atom", "edge"):
            self._add(kind, node[1])
        elif kind == "look":
            self._add(kind, Automaton(self._flags, node[1], self._effort), node[2])
        elif kind == "seq":
            for part in node[1]:
                self._emit(part)
        elif kind == "alt":
            self._emit_branches(node[1])
        else:
            self._emit_repeat(*node[1:])

    def _emit_branches(self, branches: list[Node]) -> None:
        split = self._add("go", [])
        leave = []
        for branch in branches:
            self._code[split][1].append(len(self._code))
            self._emit(branch)
            leave.append(self._add("go", []))
        for i in leave:
            self._code[i][1].append(len(self._code))

    def _emit_repeat(self, inner: Node, low: int, high: int | None) -> None:
        for _ in range(low):
            before = len(self._code)
            self._emit(inner)
            if len(self._code) == before:  # it is nothing, however often
                return
        if high is None:
            begin = self._add("go", [])
            self._emit(inner)
            self._add("go", [begin])
            self._code[begin][1].extend((begin + 1, len(self._code)))
            return
        splits = []
        for _ in range(high - low):
            splits.append(self._add("go", []))
            self._emit(inner)
        for i in splits:
            self._code[i][1].extend((i + 1, len(self._code)))
