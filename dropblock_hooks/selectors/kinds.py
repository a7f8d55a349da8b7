"""The kinds of targets, with their prefixes: layers, and the values that modules hold.

A new kind is an entry of `KINDS`, a class of hooks in ``sites``, and the line of
``attachment.place.HOOKS`` that joins the two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .._torch import parameters_of


@dataclass(frozen=True)
class TargetKind:
    """A kind of target.

    Attributes:
        prefix: the prefix of its selectors, before the colon; ``""`` for layers.
        noun: its name in messages. For targets other than layers, it is also ``Site.at``.
        values_in: returns the values of this kind in a module, by their names; None for layers.
        of_parameters: whether these values are parameters, which may be frozen.
        no_options: the options of a regularizer that mean nothing for such a target.
        hint: an explanation of these selectors, for the message about one that matches nothing.
        listing: the call that lists the targets, for this message if no name is close.
    """

    prefix: str
    noun: str
    values_in: Callable[[nn.Module], Mapping[str, Any]] | None = None
    of_parameters: bool = False
    no_options: tuple[str, ...] = ()
    hint: str = ""
    listing: str = ""

    @property
    def is_layer(self) -> bool:
        """Whether a target of this kind is called, and has an input and an output."""
        return self.values_in is None


def is_share(value: Any) -> bool:
    """Return whether a value is a number in [0, 1]."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def rates_in(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are named like a rate and hold a number in [0, 1]."""
    return {
        local: value
        for local, value in vars(module).items()
        if (local == "p" or "drop" in local or "prob" in local) and is_share(value)
    }


def parameters_in(module: nn.Module) -> dict[str, Any]:
    """Return the parameters that a module itself holds, by name."""
    return {local: value for local, value in parameters_of(module).items() if value is not None}


_OF_ACTIVATIONS = ("at", "index", "layout", "grid", "prefix_tokens")

LAYER = TargetKind("", "layer", listing="layers(model)")
PARAMETER = TargetKind(
    "param",
    "parameter",
    parameters_in,
    of_parameters=True,
    no_options=_OF_ACTIVATIONS,
    listing="model.named_parameters()",
)
ATTRIBUTE = TargetKind(
    "attr",
    "attribute",
    rates_in,
    no_options=_OF_ACTIVATIONS,
    hint="a rate is a number in [0, 1] that a module holds as p, *drop* or *prob*",
)
KINDS = {kind.prefix: kind for kind in (LAYER, PARAMETER, ATTRIBUTE)}
