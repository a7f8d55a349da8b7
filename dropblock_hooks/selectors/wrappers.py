"""Wrappers around models and layers: told by their type, and looked through.

A wrapper is no part of the bare model: ``torch.compile``, data parallelism, activation
checkpointing and averaged copies put another module around one, and its attribute into every name
below. Names here are without it, wherever in the model the wrapper is.
"""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..checks import closest
from ..quoting import kind_of, quote

# where the class is defined, its name, the attribute that holds what is wrapped
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    ("torch.optim.swa_utils", "AveragedModel", "module"),
    ("lightning.fabric.wrappers", "_FabricModule", "_forward_module"),
    ("lightning_fabric.wrappers", "_FabricModule", "_forward_module"),
    ("timm.utils.model_ema", "ModelEmaV2", "module"),
    ("timm.utils.model_ema", "ModelEmaV3", "module"),
)


def _kinds() -> list[tuple[type, str]]:
    """The wrapper classes that are imported (others are not in use), and their attributes."""
    found = []
    for module, name, attribute in _WRAPPERS:
        wrapper = getattr(sys.modules.get(module), name, None)
        if wrapper is not None:
            found.append((wrapper, attribute))
    return found


def _innermost(module: nn.Module, kinds: list[tuple[type, str]]) -> nn.Module:
    while kinds:
        attribute = next((name for kind, name in kinds if isinstance(module, kind)), None)
        if attribute is None:
            break
        inner: nn.Module = getattr(module, attribute)
        module = inner
    return module


def unwrap(model: nn.Module, spec: object = None) -> nn.Module:
    """The model inside its wrappers; `spec` is what was given beside it.

    Raises:
        TypeError: for what is no module.
        RuntimeError: for ``nn.DataParallel``, anywhere in the model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_no_model(model, spec)}")
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel):
            where = f"its submodule '{name}' is" if name else "the model is"
            raise RuntimeError(
                f"{where} nn.DataParallel, which shares the state of hooks between threads: use "
                "DistributedDataParallel, or attach to a model without it"
            )
    return _innermost(model, _kinds())


def _no_model(given: object, spec: object) -> str:
    if isinstance(given, type) and issubclass(given, nn.Module):
        name = given.__name__
        return f"the class {name}: write {name}()"
    swapped = isinstance(spec, nn.Module)
    return kind_of(given) + ("; the model comes first: attach(model, spec)" if swapped else "")


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by the names of the bare model, aliases of shared ones too."""
    return _named(model, "", _kinds())


def _named(
    module: nn.Module, name: str, kinds: list[tuple[type, str]]
) -> Iterator[tuple[str, nn.Module]]:
    module = _innermost(module, kinds)
    yield name, module
    for key, child in module._modules.items():
        if child is not None:
            yield from _named(child, f"{name}.{key}" if name else key, kinds)


def find_module(model: nn.Module, name: str) -> nn.Module | None:
    """The submodule that the bare model has by this name, or None."""
    kinds = _kinds()
    module = _innermost(model, kinds)
    for key in name.split(".") if name else ():
        child = module._modules.get(key)
        if child is None:
            return None
        module = _innermost(child, kinds)
    return module


def attribute_of(module: nn.Module, name: str) -> Any:
    """An attribute, or None: soon where there is none, for which torch prepares an error."""
    kind = type(module)
    tables = module.__dict__, module._modules, module._buffers, module._parameters
    ordinary = kind.__getattr__ is nn.Module.__getattr__
    if ordinary and not hasattr(kind, name) and not any(name in table for table in tables):
        return None
    return getattr(module, name, None)


def bare_type(module: nn.Module) -> type[nn.Module]:
    """The class of a module; the one it had before ``fully_shard`` swapped it."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    kind = type(module)
    if sharded is not None and issubclass(kind, sharded):
        # the swapped class stands before these two, and the class of the model behind them
        return next(c for c in kind.__mro__[1:] if not issubclass(c, sharded))
    return kind


def shard_refusal(owner: nn.Module) -> str | None:
    """Why a hook on a parameter of this module can't work, or None: FSDP holds the parameters."""
    if not getattr(owner, "_is_fsdp_managed_module", False):  # fully_shard sets it, so does FSDP
        return None
    return (
        "FSDP shards the parameter, and a hook on it sees no gradient: regularize the gradient at "
        "the output of the layer, or clip after the backward (torch.nn.utils.clip_grad_norm_; with "
        "fully_shard also when='accumulated')"
    )


def update_refusal(owner: nn.Module, parameter: object) -> str | None:
    """Why its gradient can't be regularized at the step of the optimizer, or None.

    What ``fully_shard`` has sharded is a DTensor but while it is gathered, for a forward say.
    """
    if shard_refusal(owner) is None or is_dtensor(parameter):
        return None
    return (
        "FSDP shards the parameter, and does not show its part of it as a DTensor: use "
        "fully_shard; if you do, it is gathered now: attach before a forward, or after "
        "model.reshard()"
    )


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is one that is spread over processes, and knows how."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def submodule(model: nn.Module, root: str) -> nn.Module:
    """The submodule where names begin.

    Raises:
        TypeError, ValueError: for a root that is no name, or of no submodule, with the closest.
    """
    if not isinstance(root, str):
        raise TypeError(f"root must be the name of a submodule, got {quote(root)}")
    if not root:
        return model
    found = find_module(model, root)
    if found is None:
        names = [name for name, _ in named_modules(model)]
        raise ValueError(
            f"root={quote(root)} is not a submodule of the model{closest(root, names)}"
        )
    return found
