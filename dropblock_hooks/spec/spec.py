"""The spec: an ordered mapping selector → regularizers; from Python, YAML and JSON, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from . import files
from .convert import plain_fields, to_plain
from .draft import Draft, Entries, Entry


class Spec(Entries):
    """An ordered mapping selector → regularizers, checked as far as possible without a model.

    Takes a mapping, a list of pairs, or another Spec. Values are regularizers, observers, lists of
    them, modules of other libraries, or plain data as in files. ``None`` removes what earlier
    entries put on these layers.

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
        self.entries = Draft.of(spec).checked()

    @classmethod
    def of(cls, spec: Any) -> Spec:
        """A Spec from all that ``attach`` takes: also the path of a YAML or JSON file."""
        return cls(spec)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Spec:
        """Read a file: JSON if its name ends in ``.json``, else YAML. No code in it is run."""
        return cls(Draft.load(path).checked())

    @classmethod
    def from_yaml(cls, text: str, source: str = "<yaml>") -> Spec:
        """Read YAML; `source` is its name in errors.

        Example:
            >>> Spec.from_yaml("layer4.*: DropBlock2d(p=0.1, block_size=3)")
            Spec({'layer4.*': DropBlock2d(p=0.1, block_size=3)})
        """
        return cls(Draft.read(files.read_yaml, text, source).checked())

    @classmethod
    def from_json(cls, text: str, source: str = "<json>") -> Spec:
        """Read JSON; `source` is its name in errors."""
        return cls(Draft.read(files.read_json, text, source).checked())

    def to_plain(self) -> Any:
        """The spec as plain data: a mapping, or a list of ``{select, apply}`` where it must be."""
        selectors = [entry.selector for entry in self.entries]
        values = [_one_or_several([to_plain(r) for r in e.regularizers or ()]) for e in self]
        if all(isinstance(each, str) for each in selectors) and len(set(selectors)) == len(self):
            return dict(zip(selectors, values, strict=True))
        return [
            {"select": each if isinstance(each, str) else plain_fields(each), "apply": value}
            for each, value in zip(selectors, values, strict=True)
        ]

    def to_yaml(self) -> str:
        """The spec as YAML, which `from_yaml` reads back.

        Raises:
            ValueError: for a function, a `Foreign`, or a class that is not registered.
        """
        return yaml.safe_dump(self.to_plain(), sort_keys=False, default_flow_style=None, width=100)

    def to_json(self) -> str:
        """The spec as JSON, which `from_json` reads back."""
        return json.dumps(self.to_plain(), indent=2)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file: JSON if its name ends in ``.json``, else YAML."""
        name = Path(path)
        text = self.to_json() if name.suffix.lower() == ".json" else self.to_yaml()
        name.write_text(text, encoding="utf-8")

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(self.entries)

    def __repr__(self) -> str:
        pairs = [(e.selector, _one_or_several(list(e.regularizers or ()))) for e in self]
        return f"Spec({{{', '.join(f'{key!r}: {value!r}' for key, value in pairs)}}})"


def _one_or_several(items: list[Any]) -> Any:
    """The value of an entry: None, one item, or a list."""
    return items[0] if len(items) == 1 else items or None
