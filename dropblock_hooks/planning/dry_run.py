"""A forward of a deep copy, on fake tensors where that works: the model itself is never touched.

Fake tensors have shapes and no values, so a copy of any size costs nothing. The copy must be deep:
models keep tensors in caches, and a fake one left there would break their next real forward.
"""

from __future__ import annotations

import copy
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from ..attachment.activity import ModelHook
from ..layouts.map_sizes import SizeHook, StartHook
from ..selectors.wrappers import named_modules
from ..sites.hooks import KeeperHook, SiteHook
from . import fake_tensors
from .record import shape_of

_T = TypeVar("_T")


class DryRunError(Exception):
    """No forward of a copy succeeded; the message says why."""


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
    refuse_replaced_forward(model)
    with ExitStack() as stack:
        stack.enter_context(_kept_random_numbers())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # a real forward will give them
        stack.enter_context(_without_log("torch._subclasses.fake_tensor"))  # it is told as a reason
        if "torch._dynamo" in sys.modules:  # a compiled part is run as it was written
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        memo: dict[int, Any] = {}
        # constants that a function of the model holds are faked where they are met
        mode = DryRunMode(allow_non_fake_inputs=True) if fake else None
        with nullcontext() if mode is None else _FakeCopies(mode, _device_of(model)):
            copied, inputs = copy.deepcopy(model, memo), copy.deepcopy(example, memo)
        args, kwargs = (inputs if isinstance(inputs, tuple) else (inputs,)), {}
        if isinstance(inputs, Mapping):
            args, kwargs = (), dict(inputs)
        yield DryRun(copied, args, kwargs, _leave_out_hooks(copied), memo, mode)


@contextmanager
def _without_log(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def clear_away() -> list[str]:
    """Take out what dry runs have left in caches outside of their copies; what is still there.

    To be called when no dry run and nothing of it is held any more.
    """
    return fake_tensors.take_out(DryRunMode)


def first_success(attempts: Mapping[str, Callable[[], _T]]) -> tuple[str, _T, list[str]]:
    """The first attempt that does not fail, what it gives, and why those before it failed.

    Raises:
        DryRunError: where all fail.
    """
    reasons: dict[str, str] = {}
    for name, attempt in attempts.items():
        try:
            return name, attempt(), [f"{failed}: {why}" for failed, why in reasons.items()]
        except Exception as error:  # a model may fail in any way on tensors it isn't made for
            reasons[name] = reason_of(error)
    raise DryRunError(_each_once(reasons))


def _each_once(reasons: Mapping[str, str]) -> str:
    """Why all attempts failed: a real forward is the proof, of which fake ones are a likeness."""
    real = {name: why for name, why in reasons.items() if name.startswith("real ")} or reasons
    attempts: dict[str, list[str]] = {}
    for name, why in real.items():
        attempts.setdefault(why, []).append(name)
    if len(attempts) == 1:
        return next(iter(attempts))
    return "; ".join(f"{' and '.join(names)}: {why}" for why, names in attempts.items())


def no_forward(example: Any, error: DryRunError) -> str:
    """That no forward succeeded with this input, and why."""
    return f"no forward of a copy ran with {_shown(example)}: {error}"


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


def reason_of(error: BaseException) -> str:
    """The first line that says something, and the type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class DryRunMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors of its own, told from those of torch and of the user."""


class _FakeCopies(TorchFunctionMode):
    """While it is on, `copy.deepcopy` gives fake tensors; one for each tensor, so sharing stays."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()
        self.mode = mode
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor)
            return memo[id(tensor)]
        if func is torch._C.TensorBase.clone:  # what the deep copy of a Parameter calls
            return self._fake(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _fake(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.device.type != "meta":
                return self.mode.from_tensor(tensor, static_shapes=True)
            with self.mode:
                fake = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device
                )
            return fake.requires_grad_(tensor.requires_grad)


def _device_of(model: nn.Module) -> torch.device:
    """Where tensors are put that are on the meta device: beside the others, or on the CPU."""
    devices = (tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return next((d for d in devices if d.type != "meta"), torch.device("cpu"))


@contextmanager
def _kept_random_numbers() -> Iterator[None]:
    """The states of all generators that a forward may use, put back."""
    numpy: Any = sys.modules.get("numpy.random")  # not imported: not in use
    state, numpy_state = random.getstate(), numpy.get_state() if numpy else None
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.set_state(numpy_state)


def refuse_replaced_forward(model: nn.Module) -> None:
    """Raise DryRunError where a copy would run the model's own modules."""
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, types.FunctionType) and forward.__closure__:
            raise DryRunError(
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
                if "backward" in table or isinstance(hook, _OURS):
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
