"""Looks through the wrappers around models and layers, which add an attribute to each name.

An `Index`, and each function that takes a model without an `Index`, calls `unwrap` first. Other
functions here tell which wrapper spreads parameters over processes.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from .. import messages
from .._torch import children_of, is_part_of_flat, parameters_of
from ..checks import closest
from ..findings import Message
from ..quoting import listed, quote, shown

# the attribute that holds the wrapped module, by the name of the class, so that no library is
# imported
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "AveragedModel": "module",
    "_FabricModule": "_forward_module",
    "ModelEmaV2": "module",
    "ModelEmaV3": "module",
    "PeftModel": "base_model",
    "BaseTuner": "model",  # LoraModel, for example
}
_LIBRARIES = ("torch.", "lightning", "timm.", "peft.")


def _innermost(module: nn.Module) -> nn.Module:
    """Return the module inside all of its wrappers."""
    for kind in type(module).__mro__:
        attribute = _WRAPPERS.get(kind.__name__)
        if attribute and kind.__module__.startswith(_LIBRARIES):
            return _innermost(getattr(module, attribute))
    return module


def unwrap(model: object) -> nn.Module:
    """Return the model inside its wrappers.

    Raises:
        TypeError: if `model` is not a module.
        RuntimeError: if the model holds ``nn.DataParallel``.
    """
    if not isinstance(model, nn.Module):
        hint = ""
        if isinstance(model, Mapping | str):
            hint = "; the model comes first: attach(model, spec)"
        elif isinstance(model, type) and issubclass(model, nn.Module):
            hint = f": write {model.__name__}(...)"
        raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}{hint}")

    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise RuntimeError(
            "the model holds nn.DataParallel, which shares the state of hooks between threads: use "
            "DistributedDataParallel, or attach to a model without it"
        )

    return _innermost(model)


def named_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by their names without wrappers. A shared module comes with each name."""
    bare = _innermost(model)
    yield prefix, bare
    for key, child in children_of(bare).items():
        if child is not None:
            yield from named_modules(child, f"{prefix}.{key}" if prefix else key)


def find_module(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module with this name in the model without wrappers, or None."""
    module = _innermost(model)
    if not name:
        return module

    for key in name.split("."):
        child = children_of(module).get(key)
        if child is None:
            return None
        module = _innermost(child)

    return module


def bare_type(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module from before ``fully_shard`` replaced it."""
    cls = type(module)
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded is None or not issubclass(cls, sharded):
        return cls

    # the method resolution order is: replaced class, FSDP's classes, class of the model
    return next(base for base in cls.__mro__[1:] if not issubclass(base, sharded))


def is_distributed(value: object) -> bool:
    """Return whether a value is a DTensor, which may be spread over processes."""
    return type(value).__name__ == "DTensor"


def whole_value(x: Any) -> Tensor:
    """Return the whole tensor of a DTensor, or `x`. All processes of a DTensor must call this."""
    return x.full_tensor() if is_distributed(x) else x  # type: ignore[no-any-return]


MANAGED = "_is_fsdp_managed_module"
"""An attribute that fully_shard and FSDP set on modules whose parameters they shard."""


def is_managed(owner: nn.Module) -> bool:
    """Return whether FSDP shards the parameters of this module."""
    return bool(vars(owner).get(MANAGED, False))  # getattr takes longer without this attribute


def sharding_of(owner: nn.Module) -> str | None:
    """Return the name of the method that shards the parameters of this module, or None."""
    if is_managed(owner):
        return "FSDP"
    if any(map(is_distributed, parameters_of(owner).values())):
        return "tensor parallelism"
    return None


def holds_shards(module: nn.Module) -> bool:
    """Return whether parameters of a module, or of modules inside it, are sharded."""
    return any(sharding_of(owner) is not None for owner in module.modules())


def is_gathered(owner: nn.Module) -> bool:
    """Return whether ``fully_shard`` has gathered the parameters of a module for a forward."""
    parameters = parameters_of(owner).values()
    are_parts = any(is_distributed(x) or is_part_of_flat(x) for x in parameters)
    return is_managed(owner) and not are_parts


def shard_message(
    owner: nn.Module, acts_on_parts: bool, once: bool, *, anchored: bool = False
) -> Message | None:
    """Return why the gradients of this module's parameters can't be regularized, or None.

    Args:
        owner: the module that holds the parameters.
        acts_on_parts: whether the regularizer can work on a part of a gradient.
        once: whether the regularizer acts once per update, at the step of the optimizer.
        anchored: whether the regularizer needs the values of the parameters at attaching.
    """
    if sharding_of(owner) is None:
        return None
    if anchored:
        return messages.SHARDED_ANCHOR
    # FullyShardedDataParallel joins several parameters to a flat one, and splits this into parts
    is_flat = any(map(is_part_of_flat, parameters_of(owner).values()))
    if is_flat or not acts_on_parts:
        return messages.SHARDED
    # in a backward, FSDP's parameters show no gradient, and nothing adds up the norms of parts
    return None if once else messages.SHARDED_BACKWARD


def shard_refusal(
    owner: nn.Module, acts_on_parts: bool, once: bool, *, anchored: bool = False
) -> str | None:
    """Return the text of `shard_message` for this module, or None."""
    message = shard_message(owner, acts_on_parts, once, anchored=anchored)
    return None if message is None else message.text.format(sharding=sharding_of(owner))


def _choices(model: nn.Module) -> str:
    """Return the names of the children of a model, for the message about a wrong one."""
    children = children_of(_innermost(model))
    if not children:
        return ", which has none"
    return f". Its children are {listed(children, 8)}, and layers(model) lists all names"


def submodule(model: nn.Module, root: str) -> nn.Module:
    """Return the submodule that an argument `root` names.

    Raises:
        ValueError: if there is no such submodule.
    """
    module = find_module(model, root) if isinstance(root, str) else None
    if module is None:
        hint = closest(str(root), dict(named_modules(model))) or _choices(model)
        raise ValueError(f"root={quote(root)} is not a submodule of the model{hint}")
    return module
