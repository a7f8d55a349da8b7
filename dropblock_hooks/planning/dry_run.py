"""A forward of a deep copy, on fake tensors where that works: the model itself is never touched.

Fake tensors have shapes and no values, so a copy of any size costs nothing. The copy must be deep:
models keep tensors in caches, and a fake one left there would break their next real forward.
"""

import copy
import functools
import logging
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from ..attachment.activity import ModelHook
from ..attachment.compiled import as_written
from ..layouts.map_sizes import SizeHook, StartHook
from ..selectors.wrappers import named_modules
from ..sites.hooks import SiteHook, ours
from ..sites.parameters import KeeperHook
from . import fake_tensors

_T = TypeVar("_T")


class DryRunError(ValueError):
    """No forward of a copy succeeded with this input; `reason` says why."""

    def __init__(self, example: Any, reason: str) -> None:
        super().__init__(f"no forward of a copy ran with {_shown(example)}: {reason}")
        self.reason = reason


@dataclass
class DryRun:
    """A copy, ready to be called: `run` calls it once, and must happen inside `dry_run`.

    Attributes:
        model: the copy.
        args: what it is called with.
        kwargs: and by keyword.
        left_out: layers that lost hooks of the user's, which could have reached out of a copy.
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


@contextmanager
def dry_run(model: nn.Module, example: Any, *, fake: bool) -> Iterator[DryRun]:
    """A copy of a model and of what it is called with; random numbers are put back at the end.

    Args:
        model: any model.
        example: a tensor, a tuple of arguments, or a mapping of keywords.
        fake: on fake tensors; otherwise on real ones.
    """
    _refuse_replaced_forward(model)
    with ExitStack() as stack:
        _keep_random_numbers(stack)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # a real forward will give them
        logger = logging.getLogger("torch._subclasses.fake_tensor")  # it is told as a reason
        stack.callback(setattr, logger, "disabled", logger.disabled)
        logger.disabled = True
        stack.enter_context(as_written())  # also a part that is compiled
        memo: dict[int, Any] = {}
        mode = DryRunMode(_device_of(model)) if fake else None
        with FakeCopyMode(mode) if mode else nullcontext():
            copied, inputs = copy.deepcopy(model, memo), copy.deepcopy(example, memo)
        args, kwargs = arguments_of(inputs)
        yield DryRun(copied, args, kwargs, _leave_out_hooks(copied), memo, mode)


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords: of a tensor, a tuple of arguments, or a mapping of keywords."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def clear_away() -> list[str]:
    """Take out what dry runs have left in caches outside of their copies; what is still there.

    To be called when no dry run and nothing of it is held any more.
    """
    return fake_tensors.take_out(DryRunMode)


def first_success(
    attempts: Mapping[str, Callable[[], _T]], example: Any
) -> tuple[str, _T, list[str]]:
    """The first attempt that does not fail, what it gives, and why those before it failed.

    Args:
        attempts: by name; of one that begins with "real" the reason counts more.
        example: what the model is called with.

    Raises:
        DryRunError: where all fail.
    """
    reasons: dict[str, str] = {}
    for name, attempt in attempts.items():
        try:
            return name, attempt(), [f"{failed}: {why}" for failed, why in reasons.items()]
        except Exception as error:  # a model may fail in any way on tensors it isn't made for
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reasons[name] = ": ".join([type(error).__name__, *lines[:1]])
    real = {name: why for name, why in reasons.items() if name.startswith("real ")} or reasons
    failed: dict[str, list[str]] = {}
    for name, why in real.items():
        failed.setdefault(why, []).append(name)
    told = [f"{' and '.join(names)}: {why}" for why, names in failed.items()]
    raise DryRunError(example, "; ".join(told if len(failed) > 1 else failed))


def observed(model: nn.Module, example: Any, look: Callable[[DryRun], _T]) -> _T:
    """What a forward shows, on fake tensors or, where that fails, on real ones.

    Args:
        model: any model.
        example: what it is called with.
        look: runs the copy once, and tells what it has seen.

    Raises:
        DryRunError: where both fail.
    """

    def attempt(fake: bool) -> _T:
        with dry_run(model, example, fake=fake) as run:
            return look(run)

    attempts = {
        f"{kind} tensors": functools.partial(attempt, kind == "fake") for kind in ("fake", "real")
    }
    try:
        return first_success(attempts, example)[1]
    finally:
        clear_away()


def _is_shape(example: Any) -> bool:
    plain = isinstance(example, tuple | list) and len(example) > 0
    return plain and all(type(n) is int or _is_shape(n) for n in example)


def _shown(example: Any) -> str:
    """What a model is called with, in words."""
    if _is_shape(example):
        return f"example_input={example!r} (give a tensor, not a shape)"
    if isinstance(example, Tensor):
        return f"example_input of shape {shape_of(example)}"
    if isinstance(example, Mapping):
        return f"example_input { {name: shape_of(value) for name, value in example.items()} }"
    if isinstance(example, tuple):
        return f"example_input of {', '.join(map(str, map(shape_of, example)))}"
    return f"example_input of type {type(example).__name__}"


def shape_of(output: Any) -> Any:
    """The shape of a tensor; of a structure, its type and size."""
    if isinstance(output, Tensor):
        return tuple(output.shape)
    if isinstance(output, Mapping | tuple | list):
        return f"{type(output).__name__} of {len(output)}"
    return type(output).__name__


class DryRunMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's is not typed
    """Fake tensors, told from those of torch and of the user; none is on the meta device."""

    def __init__(self, device: torch.device) -> None:
        _start_autograd()
        # constants that a function of the model holds are faked where they are met
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
    """Where tensors are put that are on the meta device: beside the others, or on the CPU."""
    devices = (tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return next((d for d in devices if d.type != "meta"), torch.device("cpu"))


def _start_autograd() -> None:
    """Go backward once, before there are fake tensors, where there is no GPU.

    Fake tensors make torch register a GPU that is not there. A first backward pass after that
    starts a thread for it, and no process forked from this one could go backward any more.
    """
    if not torch.cuda.is_available():
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.backward(torch.ones((), device="cpu", requires_grad=True))


def _keep_random_numbers(stack: ExitStack) -> None:
    """Put the states of all generators that a forward may use back at the end."""
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


_OURS = (SiteHook, KeeperHook, ModelHook, SizeHook, StartHook)
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _leave_out_hooks(model: nn.Module) -> tuple[str, ...]:
    """Take off our hooks, and what could reach out of a copy: functions with a memory.

    Backward hooks have no turn in a forward.
    """
    left_out: dict[str, None] = {}
    for name, module in named_modules(model):
        for table in _TABLES:
            hooks: dict[int, Any] = getattr(module, table, {})
            for key, hook in list(hooks.items()):
                if "backward" in table or isinstance(ours(hook), _OURS):
                    del hooks[key]
                elif _remembers(hook):
                    del hooks[key]
                    left_out[name or "."] = None
    return tuple(left_out)


def _remembers(hook: Any) -> bool:
    """Whether a function may hold something that is not its argument; a copy would share it."""
    if isinstance(hook, types.BuiltinFunctionType):
        return True  # the append of a list
    if not isinstance(hook, types.FunctionType):
        return False  # objects, methods and partials are copied with what they hold
    if hook.__closure__ or any(isinstance(c, types.CodeType) for c in hook.__code__.co_consts):
        return True
    used = [hook.__globals__[n] for n in hook.__code__.co_names if n in hook.__globals__]
    plain = (types.ModuleType, type, types.FunctionType, int, float, str, type(None), torch.dtype)
    return not all(isinstance(value, plain) for value in used)
