"""Patterns over names: globs over the components of a name, and regular expressions.

In a glob, ``*`` stays within one component, and ``**`` spans several.
"""

import re
from collections.abc import Collection

ROOT = "."
"""The selector of the model itself, whose name is empty."""

_SPAN = r"(?:[^.\n]+\.)*"
_TOKEN = re.compile(r"\*+|\[(!?)([^\]]+)\]|.", re.DOTALL)


def matching(text: str, names: Collection[str]) -> list[str]:
    """The names that a name, a glob or ``re:...`` matches; the root by `ROOT` alone.

    Raises:
        re.error: for a bad pattern, such as ``[z-a]``.
    """
    if text == ROOT:
        return [name for name in names if not name]
    if text in names:
        return [text]
    if text.startswith("re:"):
        regex = re.compile(text[3:])
        return [name for name in names if name and regex.fullmatch(name)]
    lines = "\n".join([f"{name}." for name in names if name])  # one search is fast
    pattern = re.compile(rf"^(?:{_translated(text)})$", re.MULTILINE)
    return [name[:-1] for name in pattern.findall(lines) if name]


def _translated(glob: str) -> str:
    """The glob as a regular expression over a name with a dot after each component."""
    parts: list[str] = []
    for component in glob.split("."):
        if component != "**":
            parts.append(rf"{_TOKEN.sub(_translated_token, component)}\.")
        elif parts[-1:] != [_SPAN]:  # two in a row mean the same, and take longer to match
            parts.append(_SPAN)
    return "".join(parts)


def _translated_token(token: re.Match[str]) -> str:
    if token.group().startswith("*"):
        return r"[^.\n]*"
    if token.group() == "?":
        return r"[^.\n]"
    if token[2]:
        inside = re.escape(token[2]).replace("\\-", "-")
        return rf"(?![.\n])[{'^' if token[1] else ''}{inside}]"
    return re.escape(token.group())
