"""Finds lists of layers from which a model chooses some in each forward, such as experts.

``first`` and ``rules`` ask for these lists, because a layer that was not chosen is no fault.
"""

from collections.abc import Iterable

from torch import nn

from ..selectors.wrappers import find_module


def routed_lists(base: nn.Module, called: Iterable[str]) -> set[str]:
    """Return the names of the lists of layers from which the model may choose some.

    The layers of such a list have the same class, and at least one of them, or a layer inside one,
    was called. Examples are experts, the heads of several tasks, and the blocks under LayerDrop.

    Args:
        base: the model.
        called: the names of layers that were called.
    """
    names: set[str] = set()
    for name in called:
        names.update(around(name))
    return {name for name in names if _is_list_of_equals(find_module(base, name))}


def _is_list_of_equals(module: nn.Module | None) -> bool:
    """Return whether a module is a list or dict of layers that have the same class."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    classes = {type(child) for child in module.children()}
    return len(classes) == 1


def around(name: str) -> list[str]:
    """Return the names of all modules that contain a layer."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))]
