"""The modules of a model, and the parameters and rates that they hold, by name."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .._torch import parameters_of
from .wrappers import named_modules

# the kinds of values that a selector can name besides layers, by the prefix of the selector
HELD = {"param": "parameter", "attr": "attribute"}


class NoMatchError(ValueError):
    """A selector matches nothing on this model; the message says why."""


@dataclass(frozen=True, eq=False)  # hashed as an object, which is faster
class Target:
    """A layer, or a value that it holds.

    Attributes:
        name: the name of the layer or of the value in the model.
        module: the layer, or the module that holds the value.
        form: the prefix of its selectors, a key of `HELD`; ``""`` for a layer.
        local: the name of the value in the module; ``""`` for a layer.
        aliases: other names of the same, shared, layer.
    """

    name: str
    module: nn.Module
    form: str = ""
    local: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """The name of the module."""
        return self.name.rpartition(".")[0] if self.form else self.name

    @property
    def selected(self) -> Any:
        """The parameter; for layers and attributes the module."""
        return parameters_of(self.module)[self.local] if self.form == "param" else self.module

    @property
    def frozen(self) -> bool:
        """Whether the target is a parameter that gets no gradient."""
        return self.form == "param" and not self.selected.requires_grad


class Index:
    """The modules of a model and what they hold; a shared one is the target of its first name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

        names_of: dict[nn.Module, list[str]] = {}
        for name, module in named_modules(model):
            names_of.setdefault(module, []).append(name)

        self.modules: dict[str, Target] = {}
        for module, names in names_of.items():
            target = Target(names[0], module, aliases=tuple(names[1:]))
            self.modules |= dict.fromkeys(names, target)

        self._tables = {"": self.modules}

    def table(self, form: str) -> dict[str, Target]:
        """The targets of a form of selector: a key of `HELD`, or ``""`` for the modules."""
        if form not in self._tables:
            self._tables[form] = self._values(form)
        return self._tables[form]

    def _values(self, form: str) -> dict[str, Target]:
        """The parameters or rates of all modules; a shared one is the target of its first name."""
        values_in = rates_in if form == "attr" else _parameters_in
        table: dict[str, Target] = {}
        first: dict[Any, Target] = {}  # the target of the first name of each value

        for name, layer in self.modules.items():
            module = layer.module
            for local, value in values_in(module).items():
                full_name = f"{name}.{local}".lstrip(".")
                target = Target(full_name, module, form, local)

                # a tensor may be shared, but equal numbers may be the same object by chance
                key = id(value) if isinstance(value, Tensor) else (id(module), local)
                table[full_name] = first.setdefault(key, target)

        return table

    def order(self, targets: Iterable[Target]) -> list[Target]:
        """The targets without repetition, in model order."""
        wanted = set(targets)
        if len(wanted) < 2:  # most selectors match one layer, and the loop below is slower
            return list(wanted)

        ordered: dict[Target, None] = {}
        for form in sorted({target.form for target in wanted}):
            ordered |= dict.fromkeys(self.table(form).values())
        return [target for target in ordered if target in wanted]


def is_share(value: Any) -> bool:
    """Whether a value is a number in [0, 1]."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def rates_in(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are named like a rate and hold a number in [0, 1]."""
    return {
        local: value
        for local, value in vars(module).items()
        if _is_name_of_rate(local) and is_share(value)
    }


def _is_name_of_rate(local: str) -> bool:
    return local == "p" or "drop" in local or "prob" in local


def _parameters_in(module: nn.Module) -> dict[str, Any]:
    return {local: value for local, value in parameters_of(module).items() if value is not None}
