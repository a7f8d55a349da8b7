"""Globs over name components, matched along the tree of the names.

Components without a wildcard are looked up, so that a thousand globs don't each try all names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

_ANY = "**"
_TOKEN = re.compile(r"\[(!?)([^\]]+)\]|.", re.DOTALL)
_WILD = re.compile(r"[*?\[]")


class NameTree:
    """Names by their components: ``layer4.0.bn1`` is a child of ``layer4.0``."""

    def __init__(self, names: Iterable[str]) -> None:
        self._root = _Node("")
        self._ending: dict[str, list[_Node]] = {}
        for name in names:
            if name:
                self._insert(name)

    def _insert(self, name: str) -> None:
        node = self._root
        components = name.split(".")
        for i, component in enumerate(components):
            node.size += 1
            if component not in node.below:
                node.below[component] = _Node(".".join(components[: i + 1]))
            node = node.below[component]
        node.size += 1
        node.there = True
        for i in range(len(components)):
            self._ending.setdefault(".".join(components[i:]), []).append(node)

    def match(self, glob: str) -> list[str]:
        """The names that a glob means; never that of the root.

        Raises:
            re.error: for what is not a glob.
        """
        parts = glob.split(".")
        if _ANY not in parts:
            return [node.name for node in _step(self._root, parts) if node.there]
        pattern = glob_pattern(glob)
        return [n.name for n in self._candidates(parts) if pattern.fullmatch("." + n.name)]

    def _candidates(self, parts: list[str]) -> Iterable[_Node]:
        """Of the names that begin as the glob does and those that end so, the fewer."""
        begin = _step(self._root, parts[: parts.index(_ANY)])
        wild = [i for i, part in enumerate(parts, 1) if _WILD.search(part)]
        end = parts[wild[-1] :]
        ending = self._ending.get(".".join(end), [])
        if end and len(ending) < sum(node.size for node in begin):
            return ending
        return (inner for node in begin for inner in node.all())

    def parents(self, glob: str) -> list[str]:
        """The names below which the glob means something."""
        deeper, pattern = f"{_ANY}.{glob}", glob_pattern(glob)
        found: dict[str, None] = {}
        for name in self.match(deeper):
            parts = name.split(".")
            for cut in range(1, len(parts)):
                if pattern.fullmatch("." + ".".join(parts[cut:])):
                    found[".".join(parts[:cut])] = None
                    break
        return list(found)


class _Node:
    __slots__ = "below", "name", "size", "there"

    def __init__(self, name: str) -> None:
        self.name = name
        self.below: dict[str, _Node] = {}
        self.size = 0  # names here and below
        self.there = False

    def all(self) -> Iterator[_Node]:
        if self.there:
            yield self
        for child in self.below.values():
            yield from child.all()


def _step(root: _Node, parts: list[str]) -> list[_Node]:
    """The nodes that components lead to, one level each."""
    nodes = [root]
    for part in parts:
        if not nodes:
            break
        if _WILD.search(part):
            pattern = _component(part)
            nodes = [
                child
                for node in nodes
                for key, child in node.below.items()
                if pattern.fullmatch(key)
            ]
        else:
            nodes = [node.below[part] for node in nodes if part in node.below]
    return nodes


@functools.lru_cache(maxsize=256)
def glob_pattern(text: str) -> re.Pattern[str]:
    """A glob over name components, to be matched against ``"." + name``."""
    groups = [""]
    for component in text.split("."):
        if component == _ANY:
            groups.append("")
        else:
            groups[-1] += rf"\.{_translated(component)}(?![^.])"
    return re.compile(_anchored(groups, r"(?:\.[^.]+)*"))


def _anchored(fixed: list[str], between: str) -> str:
    """Fixed parts with anything between them: all but the last one are found once, never again.

    A part of fixed length that is found early leaves the most to the ones behind it, so there is
    nothing to come back for; a search that does would take the more time the more parts there are.
    """
    if len(fixed) == 1:
        return fixed[0]
    first, *middle, last = fixed
    found = [f"(?>{between}?{part})" for part in middle if part]
    return "".join((first, *found, between, last))


@functools.lru_cache(maxsize=256)
def _component(text: str) -> re.Pattern[str]:
    return re.compile(_translated(text))


def _translated(component: str) -> str:
    fixed = [""]
    for token in _TOKEN.finditer(component):
        found = token.group()
        if found == "*":
            fixed.append("")
        elif found == "?":
            fixed[-1] += "[^.]"
        elif not token[2]:
            fixed[-1] += re.escape(found)
        else:
            inside = re.escape(token[2]).replace("\\-", "-")
            fixed[-1] += f"[{'^' if token[1] else ''}{inside}]"
    return _anchored(fixed, "[^.]*")
