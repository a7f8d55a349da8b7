"""`Spec`: entries, read from and written to Python objects, YAML and JSON.

``attach`` and `plan` read what a user gives them with `Draft.of`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from torch import nn

from ..findings import Finding, Kind, Severity
from ..quoting import ComposedError, label, quote, shorten, shown
from ..registry import store
from ..regularizers.base import Regularizer
from ..selectors.index import Index, NoMatchError
from ..selectors.select import Select, Selector, match
from ..tables import counted
from .convert import (
    PlainError,
    construct,
    is_list,
    plain_fields,
    regularizer_from,
    to_plain,
    with_name_first,
    without_name,
)
from .files import MOST_BYTES, Keys, Lines, read_json, read_yaml

_ENTRY_OF_LIST = "(selector, regularizers) or {select: ..., apply: ...}"
_A_SPEC = 'a spec is a mapping, such as {"conv2": DropBlock2d(p=0.1)}'


class SpecError(ComposedError, ValueError):
    """A spec has errors. The message and `problems` list all of them.

    Example:
        >>> Spec({"layer1": "DropBlok2d"})
        Traceback (most recent call last):
        ...
        dropblock_hooks.specs.spec.SpecError: 1 problem in the spec:
          - layer1: unknown regularizer 'DropBlok2d' (closest: DropBlock2d, ...

    Args:
        problems: a text for each error, or one text.
        source: the name of the file; ``""`` without a file.
    """

    def __init__(self, problems: Iterable[str], source: str = "") -> None:
        texts = [problems] if isinstance(problems, str) else problems
        self.problems = tuple(shorten(text, 1_000) for text in texts)
        self.source = source
        super().__init__(self.problems, source)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The problems as `Finding` objects."""
        findings = []
        for text in self.problems:
            finding = Finding(Kind.SPEC, Severity.ERROR, (), text)
            findings.append(finding)
        return tuple(findings)

    def _text(self) -> str:
        number = counted(len(self.problems), "problem")
        where = f" in {label(self.source, 200)}" if self.source else ""
        heading = f"{number} in the spec{where}:"
        return "\n  - ".join([heading, *self.problems])


class Entry(NamedTuple):
    """A selector and its regularizers; None removes the earlier regularizers of these layers."""

    selector: Selector
    regularizers: tuple[Regularizer, ...] | None

    @property
    def value(self) -> Any:
        """The value in a spec: None, a regularizer, or a list of them."""
        if not self.regularizers:
            return None
        if len(self.regularizers) == 1:
            return self.regularizers[0]
        return list(self.regularizers)


@dataclass(frozen=True, init=False, repr=False)
class Spec:
    """An ordered mapping selector → regularizers, checked as far as possible without a model.

    Example:
        >>> spec = Spec({"layer3.*": DropBlock2d(0.1), "layer4.*": [Dropout2d(0.2), ClampGrad(-1)]})
        >>> print(spec.to_yaml(), end="")
        layer3.*:
          DropBlock2d: {p: 0.1, block_size: 7}
        layer4.*:
        - Dropout2d: {p: 0.2}
        - ClampGrad: {min: -1.0}
        >>> Spec.from_yaml(spec.to_yaml()) == spec
        True

    Args:
        spec: a mapping, a list of pairs, the path of a file, or another Spec. The values are
            regularizers, observers, lists of them, modules of other libraries, or plain data as in
            files. ``None`` removes the regularizers of earlier entries from these layers.

    Raises:
        SpecError: if there are errors; it lists all.
    """

    entries: tuple[Entry, ...]

    def __init__(self, spec: Any) -> None:
        draft = spec if isinstance(spec, Draft) else Draft.of(spec)
        if draft.problems:
            raise SpecError(draft.problems, draft.source)
        store(self, entries=tuple(draft.entries))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Spec:
        """Read a file: JSON if its name ends in ``.json``, else YAML. No code in it is run.

        Raises:
            SpecError: if the file can't be read, or the spec has errors.
        """
        return cls(os.fspath(path))

    @classmethod
    def from_yaml(cls, text: str, source: str = "<yaml>") -> Spec:
        """Read YAML; `source` is its name in errors.

        Raises:
            SpecError: if the text is no YAML, or the spec has errors.
        """
        draft = Draft.of_text(text, source)
        return cls(draft)

    @classmethod
    def from_json(cls, text: str, source: str = "<json>") -> Spec:
        """Read JSON; `source` is its name in errors.

        Raises:
            SpecError: if the text is no JSON, or the spec has errors.
        """
        draft = Draft.of_text(text, source, is_json=True)
        return cls(draft)

    def to_plain(self) -> Any:
        """Return the spec as plain data: a mapping if possible, else a list of ``{select, apply}``.

        Raises:
            ValueError: if it holds code, such as a function.
        """
        mapping = {}
        items = []
        for entry in self:
            selector = _plain_selector(entry.selector)
            value = to_plain(entry.value)
            items.append({"select": selector, "apply": value})
            if isinstance(selector, str):
                mapping[selector] = value

        # a mapping can't hold a `Select`, or two entries with the same selector
        fits_in_mapping = len(mapping) == len(items)
        return mapping if fits_in_mapping else items

    def to_yaml(self) -> str:
        """Return the spec as YAML, which `from_yaml` reads back.

        Raises:
            ValueError: if it holds code, such as a function.
        """
        plain = self.to_plain()
        return yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=100)

    def to_json(self) -> str:
        """Return the spec as JSON, which `from_json` reads back.

        Raises:
            ValueError: if it holds code, such as a function.
        """
        return json.dumps(self.to_plain(), indent=2)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file: JSON if its name ends in ``.json``, else YAML.

        Raises:
            ValueError: if the spec holds code, such as a function.
        """
        file = Path(path)
        is_json = file.suffix.lower() == ".json"
        text = self.to_json() if is_json else self.to_yaml()
        file.write_text(text, encoding="utf-8")

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        entries = [f"{entry.selector!r}: {entry.value!r}" for entry in self]
        joined = ", ".join(entries)
        return f"Spec({{{joined}}})"


class Draft:
    """A spec that may have faults.

    ``attach`` raises all faults in one error, together with those that only the model shows.

    Attributes:
        source: the name of the file, or ``""``.
        problems: a text for each fault.
        entries: the entries whose selectors have no faults.
        places: the line of each entry, for the beginning of a message.
    """

    def __init__(self, data: Any, lines: Lines | None = None, source: str = "") -> None:
        self.source = source
        self.problems: list[str] = []
        self.entries: list[Entry] = []
        self.places: list[str] = []
        self._lines = lines or {}

        if isinstance(data, Mapping):
            for selector, value in data.items():
                self._read((str(selector),), selector, value)
        elif is_list(data):
            self._read_list(data)
        else:
            problem = f"{_A_SPEC}, got {shown(data)}"
            self.problems.append(problem)

        if not self.entries and not self.problems:
            self.problems.append(f"it is empty: {_A_SPEC}")

    @classmethod
    def of(cls, spec: Any, index: Index | None = None) -> Draft:
        """Make a draft of the argument of `Spec`; the index of a model tells layers from files."""
        if isinstance(spec, Spec):
            return cls(spec.entries)
        if isinstance(spec, str | os.PathLike):
            return cls._of_file(os.fsdecode(spec), index)
        return cls(spec)

    @classmethod
    def _of_file(cls, name: str, index: Index | None) -> Draft:
        """Make a draft of a file; SpecError if the file can't be read."""
        try:
            with open(name, "rb") as file:
                data = file.read(MOST_BYTES + 1)
        except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
            if index is not None and _selects(name, index):
                raise SpecError([_layer_for_file(name)]) from None
            problem = f"can't read it: {error}; {_A_SPEC}, or the path of a file"
            raise SpecError([problem], name) from error

        is_json = name.lower().endswith(".json")
        return cls.of_text(data, name, is_json)

    @classmethod
    def of_text(cls, text: str | bytes, source: str, is_json: bool = False) -> Draft:
        """Make a draft of YAML or JSON; SpecError if the text can't be parsed."""
        read = read_json if is_json else read_yaml
        try:
            data, lines = read(text)
            return cls(data, lines, source)
        except ValueError as error:
            problem = str(error)
            raise SpecError([problem], source) from None

    def _read_list(self, items: Sequence[Any]) -> None:
        """Read the items of a list. One pair without a list around it is a single problem."""
        is_pair = len(items) == 2 and isinstance(items[1], Regularizer | nn.Module)
        if is_pair and isinstance(items[0], str | Select):
            meant = quote({items[0]: items[1]})
            self.problems.append(f"a list holds entries, {_ENTRY_OF_LIST}: write {meant}")
            return
        for i, item in enumerate(items):
            self._read_item(i, item)

    def _read_item(self, i: int, item: Any) -> None:
        """Read an item of a list: a pair, or a mapping with ``select`` and ``apply``."""
        number = str(i)
        if isinstance(item, Mapping) and set(item) == {"select", "apply"}:
            self._read((number, "apply"), item["select"], item["apply"], (number, "select"))
        elif is_list(item) and len(item) == 2:
            selector, value = item
            self._read((number, "1"), selector, value, (number, "0"))
        else:
            got = quote(item, 100)
            hint = _A_SPEC
            if isinstance(item, Mapping):
                hint = f"write {got} without the list around it; in YAML, without the dash"
            self._note((number,), f"an entry of a list is {_ENTRY_OF_LIST}, got {got}: {hint}")

    def _read(
        self,
        path: Keys,
        selector: Any,
        value: Any,
        selector_path: Keys | None = None,
    ) -> None:
        """Read an entry: note its faults, and keep its valid parts.

        The selector has the path of the entry, unless it has one of its own.
        """
        regularizers = None
        if value is not None:
            regularizers = self._regularizers(path, value)

        chosen = self._made(_selector, selector, selector_path or path)
        if chosen is not None:
            entry = Entry(chosen, regularizers)
            self.entries.append(entry)
            self.places.append(self._place(path))

    def _regularizers(self, path: Keys, value: Any) -> tuple[Regularizer, ...]:
        """Make the regularizers of an entry that have no faults."""
        items = _items_of(value, path)
        if not items:
            self._note(path, "has no regularizer: write None (null) to remove earlier entries")

        regularizers = []
        for where, item in items:
            regularizer = self._made(regularizer_from, item, where)
            if regularizer:
                regularizers.append(regularizer)
        return tuple(regularizers)

    def _made(self, make: Callable[[Any, Keys], Any], value: Any, path: Keys) -> Any:
        """Call `make` with a value of the spec. If it has faults, note them, and return None."""
        try:
            return make(value, path)
        except PlainError as error:
            for where, message in error.args:
                self._note(where, message)
        except (TypeError, ValueError) as error:
            self._note(path, str(error))
        return None

    def _note(self, path: Keys, message: str) -> None:
        """Note a problem with its path of keys, and the line of the last key."""
        labels = map(label, path)
        keys = shorten(" → ".join(labels))
        place = self._place(path)
        self.problems.append(f"{place}{keys}: {message}")

    def _place(self, path: Keys) -> str:
        """Return the beginning of a message: the line of a key, or of the nearest key above it."""
        while path and path not in self._lines:
            path = path[:-1]
        if not path:
            return ""
        return f"line {self._lines[path]}: "


def _selects(text: str, index: Index) -> bool:
    """Return whether a text is a selector that matches something in a model."""
    try:
        return bool(match(text, index))
    except NoMatchError:
        return False


def _layer_for_file(selector: str) -> str:
    """Return the problem of a selector in the place of a file."""
    name = quote(selector)
    return f"{name} selects layers of this model and is no file: write {{{name}: Dropout(p=0.1)}}"


def _plain_selector(selector: Selector) -> Any:
    """Return a selector as plain data: text, or the fields of a `Select`."""
    if isinstance(selector, str):
        return selector
    return plain_fields(selector)


def _items_of(value: Any, path: Keys) -> list[tuple[Keys, Any]]:
    """Return the regularizers of an entry, as the spec gives them, with their paths of keys."""
    # A mapping with several names is a regularizer for each name. This one may also be a single
    # regularizer whose name is missing or in the wrong place, which is refused later.
    is_one_with_mistake = with_name_first(value) or without_name(value)
    if isinstance(value, Mapping) and len(value) > 1 and not is_one_with_mistake:
        return [(path, {name: fields}) for name, fields in value.items()]
    if not is_list(value):
        return [(path, value)]

    items = []
    for i, item in enumerate(value):
        below = (*path, str(i))
        items.append((below, item))
    return items


def _selector(value: Any, path: Keys) -> Any:
    """Make a selector from a text, a `Select`, or the fields of a `Select`."""
    if isinstance(value, str | Select):
        return value
    if isinstance(value, Mapping):
        return construct(Select, value, path)

    hint = ""
    if isinstance(value, type):
        hint = f": write 'type:{value.__name__}'"
    elif isinstance(value, nn.Module):
        hint = ": use its name, which layers(model) lists"
    elif is_list(value):
        names = quote(tuple(value))
        hint = f": write Select(names={names}), or a pattern such as 'layer[34]'"
    raise PlainError((path, f"a selector is text in quotes or a Select, got {shown(value)}{hint}"))
