"""Globs over the components of a name: ``*`` stays within one component, ``**`` spans several."""

import re
from collections.abc import Iterable

_SPAN = r"(?:[^.\n]+\.)*"
_TOKEN = re.compile(r"\*+|\[(!?)([^\]]+)\]|.", re.DOTALL)


def matching(glob: str, names: Iterable[str]) -> list[str]:
    """The names that a glob matches, never the empty name of the root.

    Raises:
        re.error: for a glob with a bad range, such as ``[z-a]``.
    """
    lines = "\n".join([f"{name}." for name in names if name])  # one search is fast
    pattern = re.compile(rf"^(?:{_translated(glob)})$", re.MULTILINE)
    return [name[:-1] for name in pattern.findall(lines) if name]


def _translated(glob: str) -> str:
    """The glob as a regular expression over a name with a dot after each component."""
    parts: list[str] = []
    for component in glob.split("."):
        if component != "**":
            parts.append(rf"{_component(component)}\.")
        elif parts[-1:] != [_SPAN]:  # two in a row mean the same, and take longer to match
            parts.append(_SPAN)
    return "".join(parts)


def _component(text: str) -> str:
    found = []
    for token in _TOKEN.finditer(text):
        if token.group().startswith("*"):
            found.append(r"[^.\n]*")
        elif token.group() == "?":
            found.append(r"[^.\n]")
        elif token[2]:
            inside = re.escape(token[2]).replace("\\-", "-")
            found.append(rf"(?![.\n])[{'^' if token[1] else ''}{inside}]")
        else:
            found.append(re.escape(token.group()))
    return "".join(found)
