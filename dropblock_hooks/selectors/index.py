"""The modules of a model, and the parameters and rates that they hold, by name.

Each function that matches selectors, such as ``attach`` or `plan`, makes an `Index` of the model
for this call.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .kinds import KINDS, LAYER, TargetKind
from .wrappers import bare_type, named_modules, submodule, unwrap


class NoMatchError(ValueError):
    """A selector matches nothing in this model. The message says why."""


@dataclass(frozen=True, eq=False)  # hashed as an object, which is faster
class Target:
    """A layer, or a value that it holds.

    Attributes:
        name: the name of the layer or of the value in the model.
        module: the layer, or the module that holds the value.
        kind: the kind of target, which knows the prefix of its selectors.
        local: the name of the value in the module; ``""`` for a layer.
        aliases: other names of a shared layer.
        layer_number: the number of the module in the order of the model.
    """

    name: str
    module: nn.Module
    kind: TargetKind = LAYER
    local: str = ""
    aliases: tuple[str, ...] = ()
    layer_number: int = 0

    @property
    def owner(self) -> str:
        """The name of the module."""
        return self.name if self.kind.is_layer else self.name.rpartition(".")[0]

    @property
    def type_name(self) -> str:
        """The name of the class of the module."""
        return bare_type(self.module).__name__

    @property
    def value(self) -> Any:
        """The value that the module holds now; for a layer, the layer."""
        return getattr(self.module, self.local) if self.local else self.module

    @property
    def selected(self) -> Any:
        """The argument of ``Select(where=)``: a tensor, or the module for a layer or a number."""
        value = self.value
        return value if isinstance(value, Tensor) else self.module

    @property
    def frozen(self) -> bool:
        """Whether the target is a parameter that gets no gradient."""
        return self.kind.of_parameters and not self.value.requires_grad


class Index:
    """The targets of a model by name. All names of a shared module have the same target.

    Attributes:
        whole: the model without its wrappers.
        model: the submodule where names begin.
        modules: the layers by name.
    """

    def __init__(self, model: object, root: str = "") -> None:
        self.whole = unwrap(model)
        self.model = submodule(self.whole, root)

        names_of: dict[nn.Module, list[str]] = {}
        for name, module in named_modules(self.model):
            names_of.setdefault(module, []).append(name)

        self.modules: dict[str, Target] = {}
        for number, (module, names) in enumerate(names_of.items()):
            aliases = tuple(names[1:])
            target = Target(names[0], module, aliases=aliases, layer_number=number)
            self.modules |= dict.fromkeys(names, target)

        self._tables = {LAYER: self.modules}

    @property
    def model_type(self) -> str:
        """The name of the class of the model."""
        return self.modules[""].type_name

    def table(self, kind: TargetKind) -> dict[str, Target]:
        """Return the targets of a kind, by name."""
        if kind not in self._tables:
            self._tables[kind] = self._values(kind)
        return self._tables[kind]

    def _values(self, kind: TargetKind) -> dict[str, Target]:
        """Collect the values of a kind. All names of a shared value have the same target."""
        assert kind.values_in is not None
        table: dict[str, Target] = {}
        first: dict[Any, Target] = {}  # the target of the first name of each value

        for name, layer in self.modules.items():
            module = layer.module
            for local, value in kind.values_in(module).items():
                full_name = f"{name}.{local}".lstrip(".")
                target = Target(full_name, module, kind, local, layer_number=layer.layer_number)

                # a tensor may be shared, but equal numbers may be the same object by chance
                key = id(value) if isinstance(value, Tensor) else (id(module), local)
                table[full_name] = first.setdefault(key, target)

        return table

    def order(self, targets: Iterable[Target]) -> list[Target]:
        """Return the targets without repetition, in model order.

        Layers come first, then the other kinds, such as parameters.
        """
        wanted = set(targets)
        if len(wanted) < 2:  # most selectors match one layer, and the loop below is slower
            return list(wanted)

        kinds = {target.kind for target in wanted}
        ordered: dict[Target, None] = {}
        for kind in KINDS.values():
            if kind in kinds:
                ordered |= dict.fromkeys(self.table(kind).values())
        return [target for target in ordered if target in wanted]
