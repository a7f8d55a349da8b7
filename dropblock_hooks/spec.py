"""The spec: an ordered mapping selector → regularizers; from Python, YAML or JSON, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from . import files
from .matching import Select, Selector
from .plain import PlainError, construct, is_list, plain_fields, regularizer_from, to_plain
from .regularizer import Regularizer
from .schedules import shown


class SpecError(ValueError):
    """All that is wrong with a spec, in one message; `problems` lists it."""

    def __init__(self, problems: Iterable[str], source: str = "") -> None:
        self.problems = tuple(problems)
        n = len(self.problems)
        where = f" in {source}" if source else ""
        lines = [f"{n} problem{'s' if n > 1 else ''} in the spec{where}:"]
        super().__init__("\n".join([*lines, *(f"  - {problem}" for problem in self.problems)]))

    def __reduce__(self) -> Any:
        return _restore_error, (self.problems, str(self))


def _restore_error(problems: tuple[str, ...], message: str) -> SpecError:
    error = SpecError(problems)
    error.args = (message,)
    return error


@dataclass(frozen=True)
class Entry:
    """One line of a spec: what is put on the layers of a selector; None clears earlier entries'."""

    selector: Selector
    regularizers: tuple[Regularizer, ...] | None


class Spec:
    """An ordered mapping selector → regularizer(s), checked as far as it can be without a model.

    Takes a mapping, a list of pairs, or another Spec; values are regularizers, lists of them,
    peers' modules, or plain data as files hold it. ``None`` clears what earlier entries put there.

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

    Raises:
        SpecError: with all that is wrong.
    """

    def __init__(self, spec: Any) -> None:
        self.entries: tuple[Entry, ...] = Draft.of(spec).checked()

    @classmethod
    def of(cls, spec: Any) -> Spec:
        """A Spec from all that ``attach`` takes: also the path of a YAML or JSON file."""
        return cls.load(spec) if isinstance(spec, str | os.PathLike) else cls(spec)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Spec:
        """Read a file: JSON where the name ends in ``.json``, else YAML. No code in it is run."""
        return cls(Draft.load(path).checked())

    @classmethod
    def from_yaml(cls, text: str, source: str = "<yaml>") -> Spec:
        """Read YAML; `source` names it in errors.

        Example:
            >>> Spec.from_yaml("layer4.*: DropBlock2d(p=0.1, block_size=3)")
            Spec({'layer4.*': DropBlock2d(p=0.1, block_size=3)})
        """
        return cls(Draft.read(files.read_yaml, text, source).checked())

    @classmethod
    def from_json(cls, text: str, source: str = "<json>") -> Spec:
        """Read JSON; `source` names it in errors."""
        return cls(Draft.read(files.read_json, text, source).checked())

    def to_plain(self) -> Any:
        """The spec as plain data: a mapping, or a list of ``{select, apply}`` where it must be."""
        values = [_plain_value(entry) for entry in self.entries]
        names = [entry.selector for entry in self.entries]
        if all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
            return dict(zip(names, values, strict=True))
        return [
            {"select": name if isinstance(name, str) else plain_fields(name), "apply": value}
            for name, value in zip(names, values, strict=True)
        ]

    def to_yaml(self) -> str:
        """The spec as YAML, which `from_yaml` reads back.

        Raises:
            ValueError: for what holds code (a function, a `Foreign`).
        """
        return yaml.safe_dump(self.to_plain(), sort_keys=False, default_flow_style=None, width=100)

    def to_json(self) -> str:
        """The spec as JSON, which `from_json` reads back."""
        return json.dumps(self.to_plain(), indent=2)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file: JSON where the name ends in ``.json``, else YAML."""
        is_json = Path(path).suffix.lower() == ".json"
        Path(path).write_text(self.to_json() if is_json else self.to_yaml(), encoding="utf-8")

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(self.entries)

    def __repr__(self) -> str:
        pairs = [(entry.selector, _shown_value(entry.regularizers)) for entry in self.entries]
        return f"Spec({{{', '.join(f'{key!r}: {value}' for key, value in pairs)}}})"


def _shown_value(regularizers: tuple[Regularizer, ...] | None) -> str:
    if regularizers is None or len(regularizers) != 1:
        return repr(None if regularizers is None else list(regularizers))
    return repr(regularizers[0])


def _plain_value(entry: Entry) -> Any:
    if entry.regularizers is None:
        return None
    plain = [to_plain(regularizer) for regularizer in entry.regularizers]
    return plain[0] if len(plain) == 1 else plain


class Draft:
    """A spec that may have faults: what could be read of it, and what could not.

    ``attach`` resolves on the model what could be read, so that all faults come in one error.
    """

    def __init__(self, data: Any, source: files.Source) -> None:
        self.source = source.name
        self.problems: list[str] = []
        self.entries: list[Entry] = []
        for path, selector, value in _pairs(data, source, self.problems):
            try:
                regularizers = _regularizers(value, path, source, self.problems)
            except PlainError as error:
                self.problems += _located(error, source)
                regularizers = ()
            try:
                self.entries.append(Entry(_selector(selector, path), regularizers))
            except PlainError as error:
                self.problems += _located(error, source)

    @classmethod
    def of(cls, spec: Any) -> Draft:
        """From all that ``attach`` takes."""
        if isinstance(spec, str | os.PathLike):
            return cls.load(spec)
        return cls(spec.entries if isinstance(spec, Spec) else spec, files.Source())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Draft:
        """From a file."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise SpecError(
                [f"there is no file {os.fspath(path)!r}; a spec is a mapping or the path of a file"]
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError([f"can't read it: {error}"], os.fspath(path)) from error
        read = files.read_json if Path(path).suffix.lower() == ".json" else files.read_yaml
        return cls.read(read, text, os.fspath(path))

    @classmethod
    def read(cls, read: files.Reader, text: str, source: str) -> Draft:
        """From text."""
        try:
            return cls(*read(text, source))
        except files.FileError as error:
            raise SpecError([str(error)], source) from error

    def checked(self) -> tuple[Entry, ...]:
        """The entries, or a SpecError with all faults."""
        if self.problems:
            raise SpecError(self.problems, self.source)
        return tuple(self.entries)


def _located(error: PlainError, source: files.Source) -> list[str]:
    return [source.located(path, message) for path, message in error.faults]


def _pairs(
    data: Any, source: files.Source, problems: list[str]
) -> list[tuple[tuple[str, ...], Any, Any]]:
    """Key path, selector and value of each entry; what is no entry goes to the problems."""
    pairs: list[tuple[tuple[str, ...], Any, Any]] = []
    if isinstance(data, Mapping):
        pairs = [((_label(key),), key, value) for key, value in data.items()]
    elif is_list(data):
        for i, item in enumerate(data):
            try:
                pairs.append(_pair(str(i), item))
            except PlainError as error:
                problems += _located(error, source)
    else:
        raise SpecError(
            [f"a spec is a mapping from selectors to regularizers, got {shown(data)}"], source.name
        )
    if not pairs and not problems:
        raise SpecError(["it is empty"], source.name)
    return pairs


def _pair(i: str, item: Any) -> tuple[tuple[str, ...], Any, Any]:
    if isinstance(item, Entry):
        return (_label(item.selector),), item.selector, item.regularizers
    if isinstance(item, Mapping) and set(item) == {"select", "apply"}:
        return (i, "apply"), item["select"], item["apply"]
    if is_list(item) and len(item) == 2:
        return (i, "1"), item[0], item[1]
    raise PlainError(
        (i,),
        "an entry of a list is a pair (selector, regularizers) or {select: ..., apply: ...}, "
        f"got {shown(item)}",
    )


def _label(selector: Any) -> str:
    return selector if isinstance(selector, str) else repr(selector)


def _selector(value: Any, path: tuple[str, ...]) -> Selector:
    if isinstance(value, str | Select):
        return value
    if isinstance(value, Mapping):
        select: Select = construct(Select, value, (*path[:-1], "select"))
        return select
    raise PlainError(path, f"a selector is text or a Select, got {shown(value)}: quote it")


def _regularizers(
    value: Any, path: tuple[str, ...], source: files.Source, problems: list[str]
) -> tuple[Regularizer, ...] | None:
    if value is None:
        return None
    if isinstance(value, Mapping) and len(value) > 1:
        items = [(path, {name: given}) for name, given in value.items()]
    elif is_list(value):
        items = [((*path, str(i)), item) for i, item in enumerate(value)]
    else:
        items = [(path, value)]
    if not items:
        raise PlainError(path, "has no regularizer: write None (null) to clear earlier entries'")
    found = []
    for where, item in items:
        try:
            found.append(regularizer_from(item, where))
        except PlainError as error:
            problems += _located(error, source)
    return tuple(found)
