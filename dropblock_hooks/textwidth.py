"""Text in columns of a terminal: how wide it is, shortened in its middle, wrapped, shared out."""

from __future__ import annotations

import unicodedata

WIDTH = 100
"""How wide what is printed may be, in columns."""

_GAP = 2
_NARROW = 8  # a column is not made narrower than this as long as another one can be
_NARROWEST = 3


def width_of(text: str) -> int:
    """The columns that a text takes: two for a wide character, none for a combining one."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def elide(text: str, width: int = WIDTH) -> str:
    """The text, with its middle left out where it is wider: ``layer…conv2``."""
    if width_of(text) <= width:
        return text
    head = _start(text, width // 2)
    tail = _start(text[::-1], width - 1 - width_of(head))[::-1]
    return f"{head}…{tail}"


def apart(texts: list[str], width: int) -> list[str]:
    """The texts elided to a width; where that makes different ones equal, what differs is kept.

    Example:
        >>> apart(["encoder.blocks.0.attention", "encoder.blocks.1.attention"], 16)
        ['…0.attention', '…1.attention']
    """
    short = [elide(text, width) for text in texts]
    if len(set(short)) == len(set(texts)):
        return short
    wide = [text for text in texts if width_of(text) > width]
    pairs = zip(min(wide), max(wide), strict=False)  # what these two share, all share
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    kept = [f"…{text[common:]}" if text in wide else text for text in texts]
    for i, text in enumerate(kept):
        if width_of(text) > width:
            kept[i] = _start(text, width - 1) + "…"
    return kept if len(set(kept)) > len(set(short)) else short


def _start(text: str, width: int) -> str:
    """As much of the beginning as has room."""
    taken = 0
    for i, character in enumerate(text):
        taken += _columns(character)
        if taken > width:
            return text[:i]
    return text


def padded(text: str, width: int) -> str:
    """The text in a column of this width."""
    text = elide(text, width)
    return text + " " * (width - width_of(text))


def wrapped(text: str, first: str, rest: str, width: int = WIDTH) -> list[str]:
    """A text in lines, the first behind `first` and the others behind `rest`; words stay whole
    unless one is wider than a line.
    """
    lines, line = [], first
    for word in text.split():
        begun = line not in (first, rest)
        if begun and width_of(line) + 1 + width_of(word) > width:
            lines.append(line)
            line, begun = rest, False
        joined = f"{line} {word}" if begun else line + word
        while width_of(joined) > width:
            cut = _start(joined, width)
            lines.append(cut)
            joined = rest + joined[len(cut) :]
        line = joined
    return [*lines, line]


def fit(natural: list[int], heads: list[int], width: int = WIDTH) -> list[int]:
    """The widths of columns side by side, the widest made narrower until all have room.

    Where they can't have it, the last ones are left out, and the last width is that of a column
    which says so.

    Args:
        natural: what each column would take.
        heads: what its heading takes.
        width: what there is.
    """
    for lowest in ([max(_NARROW, head) for head in heads], [_NARROWEST] * len(heads)):
        floors = [min(*pair) for pair in zip(natural, lowest, strict=True)]
        room = width - _GAP * (len(natural) - 1)
        if sum(floors) <= room:
            return _lowered(natural, floors, room)
    n = (width - 1) // (_NARROWEST + _GAP)
    return [*fit(natural[:n], heads[:n], width - _GAP - 1), 1]


def _lowered(natural: list[int], floors: list[int], room: int) -> list[int]:
    """One limit for all, the largest with which they have room; none goes below its floor."""

    def under(limit: int) -> list[int]:
        return [max(min(n, limit), floor) for n, floor in zip(natural, floors, strict=True)]

    limit = min(max(natural, default=0), room)
    while sum(under(limit)) > room:
        limit -= 1
    widths = under(limit)
    spare = room - sum(widths)
    for i, (now, wanted) in enumerate(zip(widths, natural, strict=True)):
        given = min(spare, wanted - now, 1)  # what one more for all would have been too much for
        widths[i], spare = now + given, spare - given
    return widths
