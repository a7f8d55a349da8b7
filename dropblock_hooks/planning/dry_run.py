"""A forward of a deep copy, on fake tensors where that works. The model itself is never touched.

Fake tensors have shapes and no values, so a copy of any size costs nothing. The copy must be deep:
models keep tensors in caches, and a fake one left there would break their next real forward.
"""

import copy
import logging
import random
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from ..attachment.compiled import as_written
from ..selectors.wrappers import named_modules
from . import fake_tensors

_T = TypeVar("_T")


class DryRunError(ValueError):
    """No forward of a copy ran with this input; `reason` says why."""

    def __init__(self, example: Any, reason: str) -> None:
        super().__init__(f"no forward of a copy ran with {_shown(example)}: {reason}")
        self.reason = reason


@dataclass
class DryRun:
    """A copy that is ready to be called; only for the function that `dry_run` is given.

    Attributes:
        model: the copy.
        args: its arguments.
        kwargs: its keyword arguments.
        left_out: layers whose hooks of the user's were left out.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    left_out: tuple[str, ...]
    memo: dict[int, Any]
    mode: FakeTensorMode | None

    def copy_of(self, module: nn.Module) -> nn.Module:
        """The copy of a module of the model."""
        copied: nn.Module = self.memo[id(module)]
        return copied

    def run(self) -> Any:
        """The output of one forward."""
        with self.mode or nullcontext():
            return self.model(*self.args, **self.kwargs)


def _dry_run(model: nn.Module, example: Any, look: Callable[[DryRun], _T], *, fake: bool) -> _T:
    """What `look` returns for a copy of a model and of its arguments, on fake tensors or on real.

    The states of random numbers are restored at the end.
    """
    _refuse_replaced_forward(model)
    with ExitStack() as stack:
        _keep_random_numbers(stack)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # a real forward will give these warnings
        logger = logging.getLogger("torch._subclasses.fake_tensor")  # the error says it
        stack.callback(setattr, logger, "disabled", logger.disabled)
        logger.disabled = True
        stack.enter_context(as_written())  # also a part that is compiled
        memo: dict[int, Any] = {}
        mode = DryRunMode(_device_of(model)) if fake else None
        with FakeCopyMode(mode) if mode else nullcontext():
            copied, inputs = copy.deepcopy(model, memo), copy.deepcopy(example, memo)
        args, kwargs = arguments_of(inputs)
        return look(DryRun(copied, args, kwargs, _leave_out_hooks(copied), memo, mode))


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keyword arguments that an example stands for."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def clear_away() -> list[str]:
    """Remove what dry runs have left in caches outside of their copies; what still holds some.

    Nothing may hold a tensor of a dry run when this is called.
    """
    return fake_tensors.take_out(DryRunMode)


def dry_run(model: nn.Module, example: Any, look: Callable[[DryRun], _T]) -> _T:
    """What `look` returns for a copy on fake tensors or, if that fails, on real ones.

    A model on the meta device is tried on fake tensors only.

    Args:
        model: any model.
        example: a tensor, a tuple of arguments, or a mapping of keywords.
        look: runs the copy once. What it returns must not hold tensors of the copy.

    Raises:
        DryRunError: if no forward runs.
    """
    on_meta = any(p.is_meta for p in model.parameters())
    reason = ""
    for fake in (True,) if on_meta else (True, False):
        try:
            return _dry_run(model, example, look, fake=fake)
        except Exception as error:  # a model may fail in any way
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = ": ".join([type(error).__name__, *lines[:1]])
    raise DryRunError(example, reason)


def _shown(example: Any) -> str:
    """What a model is called with, for messages."""
    if isinstance(example, Mapping):
        return f"example_input { {name: shape_of(value) for name, value in example.items()} }"
    given = example if isinstance(example, tuple | list) else (example,)
    hint = "" if any(isinstance(x, Tensor) for x in given) else " (give a tensor, not a shape)"
    return f"example_input of {', '.join(str(shape_of(x)) for x in given)}{hint}"


def shape_of(output: Any) -> Any:
    """The shape of a tensor; of a structure, its type and size."""
    if isinstance(output, Tensor):
        return tuple(output.shape)
    if isinstance(output, Mapping | tuple | list):
        return f"{type(output).__name__} of {len(output)}"
    return type(output).__name__


class DryRunMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's is not typed
    """The mode of our fake tensors, none of which is on the meta device."""

    def __init__(self, device: torch.device) -> None:
        _start_autograd()
        # functions of the model may hold tensors as constants
        super().__init__(allow_non_fake_inputs=True)
        self.device = device

    def from_tensor(  # type: ignore[override]  # takes the same options, unnamed here
        self, tensor: Tensor, **options: Any
    ) -> Tensor:
        if tensor.device.type != "meta":
            return super().from_tensor(tensor, **options)
        size, stride = tensor.size(), tensor.stride()
        with self:
            fake = torch.empty_strided(size, stride, dtype=tensor.dtype, device=self.device)
        return fake.requires_grad_(tensor.requires_grad)


def _device_of(model: nn.Module) -> torch.device:
    """The device for tensors on the meta device: that of the others, or the CPU."""
    devices = (tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return next((d for d in devices if d.type != "meta"), torch.device("cpu"))


def _start_autograd() -> None:
    """Run one backward before there are fake tensors, if there is no GPU.

    Fake tensors make torch register a GPU. A first backward after that starts a thread for it, and
    then no process forked from this one can run a backward.
    """
    if not torch.cuda.is_available():
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.backward(torch.ones((), device="cpu", requires_grad=True))


def _keep_random_numbers(stack: ExitStack) -> None:
    """Restore the states of all generators that a forward may use at the end."""
    stack.callback(random.setstate, random.getstate())
    numpy: Any = sys.modules.get("numpy.random")  # not imported: not in use
    if numpy:
        stack.callback(numpy.set_state, numpy.get_state())
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    stack.enter_context(torch.random.fork_rng(devices))


def _refuse_replaced_forward(model: nn.Module) -> None:
    """Raise ValueError where a copy would run the model's own modules."""
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, types.FunctionType) and forward.__closure__:
            raise ValueError(
                f"the forward of '{name or '.'}' was replaced by the function "
                f"{forward.__qualname__!r}, of which no copy can be made"
            )


_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _leave_out_hooks(model: nn.Module) -> tuple[str, ...]:
    """Take off all hooks but torch's own (pruning, spectral norm); layers that lost a user's.

    A user's hook may change objects outside of the copy.
    """
    left_out: dict[str, None] = {}
    for name, module in named_modules(model):
        for table in _TABLES:
            hooks: dict[int, Any] = getattr(module, table, {})
            for key, hook in list(hooks.items()):
                source = type(getattr(hook, "__self__", hook)).__module__
                if source.startswith("torch.nn.utils"):
                    continue
                del hooks[key]
                if "backward" not in table and not source.startswith("dropblock_hooks."):
                    left_out[name or "."] = None
    return tuple(left_out)
