"""The modules and parameters of a model by name."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ..checks import closest
from .wrappers import bare_type, named_modules

_HINTS = 11  # as many problems as an error shows, and one


class NoMatchError(ValueError):
    """A selector means nothing on this model; the message says why."""


@dataclass(frozen=True)
class Target:
    """A layer, or a parameter or a number that it holds."""

    name: str
    module: nn.Module
    parameter: str | None = None
    aliases: tuple[str, ...] = ()
    attribute: str | None = None

    @property
    def owner(self) -> str:
        """The name of the module."""
        return self.name.rpartition(".")[0] if self.form else self.name

    @property
    def form(self) -> str:
        """The form of selector that names it: ``"param"``, ``"attr"``, or nothing of a layer."""
        return "param" if self.parameter else "attr" if self.attribute else ""


class Index:
    """The modules and parameters of a model by name; a shared one has its first name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, Target] = {}
        self.parameters: dict[str, Target] = {}
        self.hints = _HINTS
        by_identity: dict[int, list[str]] = {}
        for name, module in named_modules(model):
            by_identity.setdefault(id(module), []).append(name)
            self.modules[name] = Target(name, module)
        self.positions = {name: i for i, name in enumerate(self.modules)}
        first: dict[int, str] = {}
        for name, target in list(self.modules.items()):
            names = by_identity[id(target.module)]
            self.modules[name] = Target(names[0], target.module, None, tuple(names[1:]))
            for local, parameter in target.module._parameters.items():
                if parameter is not None:
                    full = f"{name}.{local}" if name else local
                    owner = first.setdefault(id(parameter), full)
                    self.positions[f"param:{full}"] = len(self.positions)
                    self.parameters[full] = (
                        self.parameters[owner]
                        if owner != full
                        else Target(full, target.module, local)
                    )

    @cached_property
    def attributes(self) -> dict[str, Target]:
        """The numbers in [0, 1] that modules hold under a name of a rate."""
        found = {}
        for name, target in self.modules.items():
            for local, value in vars(target.module).items() if name == target.name else ():
                if _names_rate(local) and is_share(value):
                    full = f"{name}.{local}" if name else local
                    found[full] = self._attribute(full, target.module, local)
        return found

    def _attribute(self, name: str, module: nn.Module, local: str) -> Target:
        self.positions.setdefault(f"attr:{name}", len(self.positions))
        return Target(name, module, attribute=local)

    @cached_property
    def types(self) -> frozenset[str]:
        """The names of the layers' classes."""
        return frozenset(bare_type(target.module).__name__ for target in self.modules.values())

    def closest(self, word: str, known: Iterable[str]) -> str:
        """The names that resemble a word; for the first problems only, since it takes long."""
        self.hints = max(self.hints - 1, 0)
        return closest(word, known) if self.hints else ""

    def order(self, targets: Iterable[Target]) -> list[Target]:
        """The targets without repetition, in model order."""
        wanted = {_key(target): target for target in targets}
        return sorted(wanted.values(), key=lambda target: self.positions[_key(target)])


def _key(target: Target) -> str:
    return f"{target.form}:{target.name}" if target.form else target.name


def is_share(value: Any) -> bool:
    """Whether a value is a number in [0, 1]."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _names_rate(local: str) -> bool:
    return "drop" in local or "prob" in local or local == "p"
