"""Globs over name components, as regular expressions that go through all names at once."""

import re
from collections.abc import Iterable

_ANY = "**"
_COMPONENTS = r"(?:\.[^.\n]++)"
_TOKEN = re.compile(r"\[(!?)([^\]]+)\]|.")
_ONE_LINE = str.maketrans("\n", "\r")


class Names:
    """Names in one text, each after a line feed and a dot: one search finds all that are meant."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {name.translate(_ONE_LINE): name for name in names if name}
        self._text = "".join(f"\n.{name}" for name in self._names) + "\n"

    def match(self, glob: str) -> list[str]:
        """The names that a glob means; never that of the root.

        Raises:
            re.error: for what is not a glob.
        """
        found = re.findall(rf"\n({_translated(glob)})(?=\n)", self._text)
        return [self._names[name[1:]] for name in found]

    def parents(self, glob: str) -> list[str]:
        """The names below which the glob means something."""
        found = re.findall(rf"\n({_COMPONENTS}+?){_translated(glob)}(?=\n)", self._text)
        return [name[1:] for name in dict.fromkeys(found)]


def _translated(glob: str) -> str:
    """A glob as a regular expression, which means a name with a dot before each component."""
    groups = [""]
    for component in glob.translate(_ONE_LINE).split("."):
        if component == _ANY:
            groups.append("")
        else:
            groups[-1] += rf"\.{_component(component)}(?![^.\n])"
    return _anchored(groups, f"{_COMPONENTS}*")


def _component(text: str) -> str:
    fixed = [""]
    for token in _TOKEN.finditer(text):
        found = token.group()
        if found == "*":
            fixed.append("")
        elif found == "?":
            fixed[-1] += r"[^.\n]"
        elif not token[2]:
            fixed[-1] += re.escape(found)
        else:
            inside = re.escape(token[2]).replace("\\-", "-")
            fixed[-1] += rf"(?![.\n])[{'^' if token[1] else ''}{inside}]"
    return _anchored(fixed, r"[^.\n]*")


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
