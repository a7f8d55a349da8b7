"""The modules, parameters and rates of a model by name."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from .wrappers import bare_type, named_modules


class NoMatchError(ValueError):
    """A selector matches nothing on this model; the message says why."""


@dataclass(frozen=True)
class Target:
    """A layer, or a parameter or a rate that it holds."""

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
        """The form of its selector: ``"param"``, ``"attr"``, or ``""`` for a layer."""
        return "param" if self.parameter else "attr" if self.attribute else ""


class Index:
    """The modules, parameters and rates of a model by name.

    A shared module or parameter has several names, and is the target of its first one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, Target] = {}
        self.parameters: dict[str, Target] = {}
        names: dict[int, list[str]] = {}
        modules = list(named_modules(model))
        for name, module in modules:
            names.setdefault(id(module), []).append(name)
        first: dict[int, Target] = {}
        for name, module in modules:
            own, *aliases = names[id(module)]
            self.modules[name] = Target(own, module, None, tuple(aliases))
            for local, parameter in module._parameters.items():
                if parameter is not None:
                    full = f"{name}.{local}" if name else local
                    target = Target(full, module, local)
                    self.parameters[full] = first.setdefault(id(parameter), target)

    @cached_property
    def attributes(self) -> dict[str, Target]:
        """The attributes with a name of a rate and a number in [0, 1]."""
        found = {}
        for name, target in self.modules.items():
            for local, value in vars(target.module).items() if name == target.name else ():
                if _names_rate(local) and is_share(value):
                    full = f"{name}.{local}" if name else local
                    found[full] = Target(full, target.module, attribute=local)
        return found

    def table(self, form: str) -> dict[str, Target]:
        """The choices of a form of selector: attributes, parameters or modules."""
        if form == "attr":
            return self.attributes
        return self.parameters if form == "param" else self.modules

    def order(self, targets: Iterable[Target]) -> list[Target]:
        """The targets without repetition, in model order."""
        found = []
        wanted = {(target.form, target.name) for target in targets}
        for form in sorted({form for form, _ in wanted}):
            table = self.table(form).items()
            found += [t for name, t in table if name == t.name and (form, name) in wanted]
        return found

    @cached_property
    def types(self) -> frozenset[str]:
        """The names of the layers' classes."""
        return frozenset(bare_type(target.module).__name__ for target in self.modules.values())


def is_share(value: Any) -> bool:
    """Whether a value is a number in [0, 1]."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _names_rate(local: str) -> bool:
    return "drop" in local or "prob" in local or local == "p"
