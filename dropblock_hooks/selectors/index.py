"""The modules and parameters of a model by name."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from ..checks import closest
from .globs import Names
from .patterns import Effort
from .wrappers import bare_type, named_modules

_PARAMETER = "param:"
_HINTS = 11  # as many problems as an error shows, and one


class NoMatchError(ValueError):
    """A selector means nothing on this model; the message says why."""


@dataclass(frozen=True)
class Target:
    """A layer, or a parameter of it."""

    name: str
    module: nn.Module
    parameter: str | None = None
    aliases: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """The name of the module."""
        return self.name.rpartition(".")[0] if self.parameter else self.name


class Index:
    """The modules and parameters of a model by name; a shared one has its first name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, Target] = {}
        self.parameters: dict[str, Target] = {}
        self.hints = _HINTS
        self.effort = Effort()
        self._names: dict[str, Names] = {}
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
                    self.positions[f"{_PARAMETER}{full}"] = len(self.positions)
                    self.parameters[full] = (
                        self.parameters[owner]
                        if owner != full
                        else Target(full, target.module, local)
                    )

    def names(self, table: dict[str, Target]) -> Names:
        """The names of one of the two tables, to be matched by globs."""
        kind = "modules" if table is self.modules else "parameters"
        if kind not in self._names:
            self._names[kind] = Names(table)
        return self._names[kind]

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
        wanted = {(target.name, target.parameter is None): target for target in targets}
        return sorted(wanted.values(), key=self._position)

    def _position(self, target: Target) -> int:
        return self.positions[(_PARAMETER if target.parameter else "") + target.name]
