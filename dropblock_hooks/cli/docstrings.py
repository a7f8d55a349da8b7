"""What docstrings say: a summary, the meaning of each argument, the paper."""

import inspect
import re
from collections.abc import Iterator

from .. import functional

_CITED = re.compile(  # Huang et al., 2016, "Deep Networks" (https://...)
    r"(?P<paper>[A-Z]\w+(?:, [A-Z]\w+)*(?: and [A-Z]\w+| et al\.)?, \d{4})"
    r"[^()]{0,150}\(?(?P<url>https?://[^\s)`]+)\)?"
)


def summary(documented: object) -> str:
    """The first paragraph in one line."""
    return _plain((inspect.getdoc(documented) or "").partition("\n\n")[0])


def paper(cls: type) -> tuple[str, str]:
    """Authors and year, and the whole reference with its address; two empty texts if none."""
    for text in _texts(cls):
        cited = _CITED.search(" ".join(text.split()))
        if cited:
            return cited["paper"], cited[0]
    return "", ""


def meanings(cls: type) -> dict[str, str]:
    """What is said of the fields, by name."""
    found: dict[str, str] = {}
    for text in [*_texts(cls), *(base.__doc__ or "" for base in cls.__mro__)]:
        for name, meaning in arguments(inspect.cleandoc(text)).items():
            found.setdefault(name, meaning)
    return found


def arguments(text: str) -> dict[str, str]:
    """What the section Args of a docstring says, by name."""
    section = re.search(r"^Args:\n((?: +.*\n?|\n)*)", text, re.MULTILINE)
    items = re.split(r"^    (?=\w)", section[1] if section else "", flags=re.MULTILINE)
    parts = (_plain(item).partition(": ") for item in items)
    return {name: meaning for name, colon, meaning in parts if colon}


def _plain(text: str) -> str:
    """The text in one line, without the marks of code."""
    return " ".join(text.replace("``", "").split())


def _texts(cls: type) -> Iterator[str]:
    """The docstring of a class, of the functions that it names, and of those that they name."""
    texts, seen = [cls.__doc__ or ""], set()
    for text in texts:
        yield inspect.cleandoc(text)
        for name in re.findall(r"`(?:functional\.)?(\w+)`", text):
            if name in functional.__all__ and name not in seen:
                seen.add(name)
                texts.append(getattr(functional, name).__doc__ or "")
