"""Docstrings: an argument is described once, and ``help()`` of each class and function shows it."""

import inspect
import re
from collections import ChainMap
from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")
_SECTION = re.compile(r"^([A-Z]\w+):\n((?:    .*\n|\n)*)", re.MULTILINE)
_ARGUMENT = re.compile(r"^    \**(\w+)(?: \([^)]*\))?: .*\n(?: {8}.*\n)*", re.MULTILINE)


def described_in(*sources: object) -> Callable[[_T], _T]:
    """Decorator of functions: `complete` their docstring from the docstrings of other functions."""
    return lambda function: complete(
        function,
        inspect.signature(function).parameters,  # type: ignore[arg-type]
        sources,
    )


def complete(target: _T, names: Iterable[str], sources: Iterable[object]) -> _T:
    """Add missing arguments, the equation and the reference from the docstrings of `sources`.

    The arguments are put into the order of `names`. The nearest of the sources comes first.
    """
    if not target.__doc__:  # none was written, or Python runs with -OO
        return target
    docs = [inspect.cleandoc(each.__doc__ or "") + "\n\n" for each in (target, *sources)]
    own, *others = (dict(_SECTION.findall(doc)) for doc in docs)
    found = [_ARGUMENT.finditer(each.get("Args", "")) for each in (own, *others)]
    arguments = ChainMap(*({item[1]: item[0] for item in each} for each in found))
    order = dict.fromkeys([*names, *arguments.maps[0]])
    lines = "".join(arguments[name] for name in order if name in arguments)
    text = docs[0].replace(f"Args:\n{own.get('Args', '')}", f"Args:\n{lines}\n")
    inherited = ChainMap({"Args": lines}, *others)
    for title in ("Args", "Equation", "Reference"):
        if f"\n{title}:\n" not in text and inherited.get(title):
            text += f"{title}:\n{inherited[title].rstrip()}\n\n"
    target.__doc__ = text
    return target
