"""A forward of a deep copy, on fake tensors where that works: they have shapes and no values.

The copy must be deep, since a fake tensor in a cache of the model would break its next forward.
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
_DEEPEST = 4  # containers between a tensor and the cache that holds it
_LRU: type = type(functools.lru_cache(lambda: None))


def dry_run(model: nn.Module, example: Any, look: Callable[[nn.Module, Arguments], _T]) -> _T:
    """What `look` returns for a copy on fake tensors or, if that fails, on real ones.

    `look` runs the copy once with its arguments. Its result must not hold tensors of the copy. A
    ValueError says why no forward ran.
    """
    example = own_input(model) if example is None else example
    if example is None:
        raise ValueError("no forward of a copy ran: give example_input=, the model tells no size")
    # functions of the model may hold tensors as constants
    fake = fake_mode()
    modes: list[Any] = [None] if fake is None else [fake, None]
    if any(p.is_meta for p in model.parameters()):  # they hold no numbers, and cost nothing
        modes, example = [None], tree_map_only(Tensor, lambda x: x.to("meta"), example)
    for mode in modes:
        try:
            with _undisturbed():
                with copying_as_fake(mode) if mode else nullcontext():
                    copied = [copy.deepcopy((model, arguments_of(example)))]
                _clear_hooks(copied[0][0])
                with mode or nullcontext():
                    return look(*copied.pop())  # the only reference, so the copy is gone then
        except Exception as error:  # a model may fail in any way
            reason = described(error)
        finally:
            if mode is not None:
                _take_out(mode)
    if all(isinstance(each, int) for each in tree_leaves(example)):
        reason += ". Give a tensor in place of its shape, such as torch.zeros(2, 3, 64, 64)"
    given = quote(tree_map(shape_of, example))
    raise ValueError(f"no forward of a copy ran with example_input of {given}: {reason}")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore the states of random numbers, and hide warnings, which a real forward will give."""
    state = random.getstate()
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # the error says it
    disabled, logger.disabled = logger.disabled, True
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings(), as_written():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = disabled
        random.setstate(state)


def _clear_hooks(copied: nn.Module) -> None:
    """Remove all hooks of the user from a copy: they may change objects outside of it."""
    for name, module in copied.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, types.FunctionType) and forward.__closure__:
            # the copy would run the model's own modules
            raise ValueError(f"the forward of '{name or '.'}' was replaced by a function")
        for hooks in all_hooks(module):
            hooks.clear()


def own_input(model: nn.Module) -> Tensor | None:
    """Two empty images of the size in the configuration of a timm model; None without one."""
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, Mapping) or not config.get("input_size"):
        return None
    channels, *edges = config["input_size"]
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    built = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return empty_input(model, (first.in_channels if first else channels, *(built or edges)))


def empty_input(model: nn.Module, size: Sequence[int]) -> Tensor:
    """Two samples of zeros of this size, on the device of the model."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return torch.zeros(2, *size, dtype=like.dtype, device=like.device)


def arguments_of(example: Any) -> Arguments:
    """The arguments and keyword arguments that an example stands for."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def with_graph(given: Any) -> Any:
    """Copies of all tensors inside, from which a graph begins; a layer may change them in place."""

    def copied(x: Tensor) -> Tensor:
        x = x.detach().clone()
        return x.requires_grad_().clone() if x.is_floating_point() else x

    return tree_map_only(Tensor, copied, given)


def shape_of(output: Any) -> Any:
    """The shape of a tensor; of a structure, its type and size."""
    if isinstance(output, Tensor):
        return tuple(output.shape)
    sized = isinstance(output, Mapping | tuple | list)
    return f"{type(output).__name__}{f' of {len(output)}' if sized else ''}"


def _take_out(mode: Any) -> None:
    """Remove the fake tensors of a mode from caches, where they would break a later forward."""
    gc.collect()
    # some objects lie about their class when asked, so the type is taken
    fake: list[Any] = [each for each in gc.get_objects() if type(each) is FakeTensor]
    held = [each for each in fake if each.fake_mode is mode]
    del fake
    for _ in range(_DEEPEST + 1):
        ids, inside, held = set(map(id, held)), held, []
        for holder in gc.get_referrers(*inside) if inside else ():
            if type(holder) is _LRU:
                holder.cache_clear()  # type: ignore[attr-defined]  # mypy knows nothing of `_LRU`
            elif type(holder) is dict:
                for key in [key for key, value in holder.items() if id(value) in ids]:
                    del holder[key]
            elif isinstance(holder, tuple | list) or type(holder).__name__ == "_lru_list_elem":
                held += [holder] if holder is not inside else []
