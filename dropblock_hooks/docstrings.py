"""Docstrings: an argument is described once, and ``help()`` of each class and function shows it."""

import inspect
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")
_SECTION = re.compile(r"^([A-Z]\w+):\n((?:    .*\n|\n)*)", re.MULTILINE)
_ARGUMENT = re.compile(r"^    \**(\w+)(?: \([^)]*\))?: .*\n(?: {8}.*\n)*", re.MULTILINE)
_INHERITED = ("Equation", "Reference")


def described_in(*sources: object) -> Callable[[_T], _T]:
    """Decorator of functions: `complete` their docstring from the docstrings of other functions."""
    return lambda function: complete(
        function,
        inspect.signature(function).parameters,  # type: ignore[arg-type]
        sources,
    )


def complete(target: _T, names: Iterable[str], sources: Iterable[object]) -> _T:
    """Add missing parts to a docstring, from the docstrings of `sources`.

    The parts are the descriptions of the arguments, which have these names and this order, the
    equation and the reference. The nearest of the sources comes first.
    """
    docs = [target.__doc__, *(source.__doc__ for source in sources)]
    if not docs[0]:  # none was written, or Python runs with -OO
        return target
    texts = [inspect.cleandoc(doc or "") + "\n" for doc in docs]
    titles = [title for title, _ in _SECTION.findall(texts[0])]
    if len(set(titles)) < len(titles):  # this is not our format
        return target
    found = [dict(_SECTION.findall(text)) for text in texts]
    arguments: dict[str, str] = {}
    sections = dict(found[0])
    for each in reversed(found):
        items = _ARGUMENT.finditer(each.get("Args", ""))
        arguments.update((item[1], item[0]) for item in items)
        sections.update((title, each[title]) for title in _INHERITED if title in each)
    own = [item[1] for item in _ARGUMENT.finditer(found[0].get("Args", ""))]
    order = dict.fromkeys([*names, *own])
    sections["Args"] = "".join(arguments[name] for name in order if name in arguments)
    others = [title for title in sections if title not in ("Example", "Args", *_INHERITED)]
    parts = [_SECTION.sub("", texts[0])]
    for title in ("Example", "Args", *others, *_INHERITED):
        if sections.get(title):
            parts.append(f"{title}:\n{sections[title]}")
    target.__doc__ = "\n\n".join(part.rstrip() for part in parts) + "\n"
    return target
