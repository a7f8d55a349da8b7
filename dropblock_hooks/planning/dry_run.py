"""Runs a forward of a deep copy, if possible on fake tensors, which have shapes but no values.

`plan_placements`, for `plan` and ``attach``, and `record_forward` call `dry_run`.

The copy must be deep, because a fake tensor in a cache of the model would break its next forward.
"""

import copy
import functools
import gc
import logging
import random
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._torch import (
    FakeTensor,
    all_hooks,
    copying_as_fake,
    fake_mode,
    tree_leaves,
    tree_map,
    tree_map_only,
)
from ..compiling import as_written
from ..quoting import described, quote

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_T = TypeVar("_T")
_DEEPEST = 4  # the most levels of containers between a tensor and the cache that holds it
_LRU: type = type(functools.lru_cache(lambda: None))


def dry_run(model: nn.Module, example: Any, run: Callable[[nn.Module, Arguments], _T]) -> _T:
    """Call `run` with a copy on fake tensors or, if that fails, on real tensors.

    Args:
        model: the model.
        example: the arguments of the model; None uses the size in a timm model.
        run: gets the copy and its arguments, and runs the copy once. The result must not hold
            tensors of the copy.

    Raises:
        ValueError: if no forward runs. It holds the error on real tensors, because an error on
            fake tensors may come only from their limits.
    """
    if example is None:
        example = own_input(model)
    if example is None:
        raise ValueError("no forward of a copy ran: give example_input=, the model tells no size")

    # a fake mode also allows real tensors, because functions of the model may hold constants
    fake = fake_mode()
    modes = [None] if fake is None else [fake, None]
    if any(parameter.is_meta for parameter in model.parameters()):
        # tensors on the meta device hold no numbers and cost nothing, as fake tensors do
        modes = [None]
        example = tree_map_only(Tensor, lambda x: x.to("meta"), example)

    for mode in modes:
        try:
            return _run_copy(model, example, run, mode)
        except Exception as error:  # a model may fail in any way
            reason = described(error)
        finally:
            if mode is not None:
                _remove_from_caches(mode)

    shapes = quote(tree_map(shape_of, example))
    hint = _hint(example)
    raise ValueError(f"no forward of a copy ran with example_input of {shapes}: {reason}{hint}")


def _hint(example: Any) -> str:
    """Return what to give in place of an example with which no forward ran; "" if unknown."""
    leaves = tree_leaves(example)
    if leaves and all(isinstance(leaf, int) for leaf in leaves):
        return ". Give a tensor in place of its shape, such as torch.zeros(2, 3, 64, 64)"
    if isinstance(example, tuple | list) and len(example) > 1:
        meaning = "Each item of a tuple" if isinstance(example, tuple) else "A whole list"
        return f". {meaning} is an argument of the model. Of a batch (x, y), give only x"
    return ""


def _run_copy(
    model: nn.Module, example: Any, run: Callable[[nn.Module, Arguments], _T], mode: Any
) -> _T:
    """Call `run` with a copy, on fake tensors if there is a mode."""
    with _undisturbed():
        with copying_as_fake(mode) if mode else nullcontext():
            copies = [copy.deepcopy((model, arguments_of(example)))]
        _clear_hooks(copies[0][0])

        # `copies` holds the only reference to the copy, so the copy is freed after the call
        with mode or nullcontext():
            return run(*copies.pop())


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore random states after a ``with`` block, and hide warnings inside it.

    The states are those of Python, of torch on the CPU and of the current GPU. NumPy and other GPUs
    are left out. A real forward will repeat the warnings.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # what it logs is also raised
    was_disabled = logger.disabled
    state = random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []

    logger.disabled = True
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings(), as_written():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = was_disabled
        random.setstate(state)


def _clear_hooks(copied: nn.Module) -> None:
    """Remove all hooks of forwards and backwards from a copy, also those of this package.

    Hooks of the user may change objects outside of the copy.
    """
    for name, module in copied.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, types.FunctionType) and forward.__closure__:
            # a deep copy shares functions, so this one would run the modules of the model
            raise ValueError(f"the forward of '{name or '.'}' was replaced by a function")

        for hooks in all_hooks(module):
            hooks.clear()


def own_input(model: nn.Module) -> Tensor | None:
    """Return two images of zeros, in the size that a timm model states; None for other models."""
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, Mapping) or not config.get("input_size"):
        return None

    # the model may have been built for other images than its configuration says
    channels, *edges = config["input_size"]
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    first = next(convolutions, None)
    if first is not None:
        channels = first.in_channels
    built_edges = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return empty_input(model, (channels, *(built_edges or edges)))


def empty_input(model: nn.Module, size: Sequence[int]) -> Tensor:
    """Return two samples of zeros of this size, on the device of the model."""
    floating = (x for x in model.parameters() if x.is_floating_point())
    like = next(floating, torch.empty(0))
    return torch.zeros(2, *size, dtype=like.dtype, device=like.device)


def arguments_of(example: Any) -> Arguments:
    """Return the arguments and keyword arguments of an example."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    return (example,), {}


def with_graph(arguments: Any) -> Any:
    """Copy all tensors.

    Floating-point copies have a ``grad_fn`` and are no leaves, so that a graph begins at them, and
    in-place operations may change them.
    """

    def copied(x: Tensor) -> Tensor:
        leaf = x.detach().clone()
        return leaf.requires_grad_().clone() if leaf.is_floating_point() else leaf

    return tree_map_only(Tensor, copied, arguments)


def shape_of(output: Any) -> Any:
    """Return the shape of a tensor, or the type and size of a structure."""
    if isinstance(output, Tensor):
        return tuple(output.shape)

    type_name = type(output).__name__
    if isinstance(output, Mapping | tuple | list):
        return f"{type_name} of {len(output)}"
    return type_name


def _remove_from_caches(mode: Any) -> None:
    """Remove the fake tensors of a mode from caches, where they would break a later forward."""
    gc.collect()
    # `type` instead of `isinstance`, because some objects report a false `__class__`
    fake_tensors: list[Any] = [item for item in gc.get_objects() if type(item) is FakeTensor]
    held = [tensor for tensor in fake_tensors if tensor.fake_mode is mode]
    del fake_tensors  # the list refers to the tensors, so it would count as a holder

    for _ in range(_DEEPEST + 1):
        if not held:
            return
        held = _remove_from_holders(held)


def _remove_from_holders(held: list[Any]) -> list[Any]:
    """Remove objects from the dicts and caches that hold them.

    Returns the other containers that hold them, which may be in a cache.
    """
    ids = set(map(id, held))
    containers: list[Any] = []
    for holder in gc.get_referrers(*held):
        if type(holder) is _LRU:
            holder.cache_clear()  # type: ignore[attr-defined]  # mypy knows nothing of `_LRU`
        elif type(holder) is dict:
            for key in [key for key, value in holder.items() if id(value) in ids]:
                del holder[key]
        elif holder is not held and _may_be_in_cache(holder):
            containers.append(holder)
    return containers


def _may_be_in_cache(holder: Any) -> bool:
    """Return whether an object may be a container in a cache, or an entry of the cache."""
    return isinstance(holder, tuple | list) or type(holder).__name__ == "_lru_list_elem"
