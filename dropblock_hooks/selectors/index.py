"""The modules of a model, and the parameters and rates that they hold, by name."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .._torch import parameters_of
from .wrappers import named_modules

# the kinds of values that can be targets, by the form of their selectors
HELD = {"param": "parameter", "attr": "attribute"}


class NoMatchError(ValueError):
    """A selector matches nothing on this model; the message says why."""


@dataclass(frozen=True, eq=False)  # hashed as an object, which is faster
class Target:
    """A layer, or a value that it holds."""

    name: str
    module: nn.Module
    form: str = ""  # of its selectors: a key of `HELD`, or "" for a layer
    local: str = ""  # the name of the value in the module, or "" for a layer
    aliases: tuple[str, ...] = ()  # other names of the same, shared, layer

    @property
    def owner(self) -> str:  # the name of the module
        return self.name.rpartition(".")[0] if self.form else self.name

    @property
    def selected(self) -> Any:  # the parameter, or the module
        return parameters_of(self.module)[self.local] if self.form == "param" else self.module

    @property
    def frozen(self) -> bool:  # whether it is a parameter that gets no gradient
        return self.form == "param" and not self.selected.requires_grad


class Index:
    """The modules of a model and what they hold; a shared one is the target of its first name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        names: dict[nn.Module, list[str]] = {}
        for name, module in named_modules(model):
            names.setdefault(module, []).append(name)
        self.modules: dict[str, Target] = {}
        for module, every in names.items():
            target = Target(every[0], module, aliases=tuple(every[1:]))
            self.modules |= dict.fromkeys(every, target)
        self._tables = {"": self.modules}

    def table(self, form: str) -> dict[str, Target]:
        """The targets of a form of selector: a key of `HELD`, or ``""`` for the modules."""
        if form not in self._tables:
            values_in = rates_in if form == "attr" else _parameters_in
            table: dict[str, Target] = {}
            first: dict[Any, Target] = {}
            for name, layer in self.modules.items():
                for local, value in values_in(layer.module).items():
                    target = Target(f"{name}.{local}".lstrip("."), layer.module, form, local)
                    # a tensor may be shared, and equal numbers may be the same object
                    key = id(value) if isinstance(value, Tensor) else (id(layer.module), local)
                    table[target.name] = first.setdefault(key, target)
            self._tables[form] = table
        return self._tables[form]

    def order(self, targets: Iterable[Target]) -> list[Target]:
        """The targets without repetition, in model order."""
        wanted = set(targets)
        if len(wanted) < 2:  # as of most texts
            return list(wanted)
        tables = [self.table(form) for form in sorted({target.form for target in wanted})]
        ordered = dict.fromkeys([target for table in tables for target in table.values()])
        return [target for target in ordered if target in wanted]


def is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _parameters_in(module: nn.Module) -> dict[str, Any]:
    return {local: value for local, value in parameters_of(module).items() if value is not None}


def rates_in(module: nn.Module) -> dict[str, Any]:
    """The attributes with a name of a rate and a number in [0, 1]."""
    return {
        local: value
        for local, value in vars(module).items()
        if ("drop" in local or "prob" in local or local == "p") and is_share(value)
    }
