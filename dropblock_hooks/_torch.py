"""Private names of torch, each behind a name that describes its use.

They were tried with torch 2.6 to 2.14. The package can be imported without any of them. The text of
a name describes the consequence if it is missing: often a less precise answer, or a
`MissingNameError` in one feature.
"""

import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., Any])


class MissingNameError(RuntimeError):
    """This version of torch lacks a private name that a feature needs."""


def find_private(path: str, otherwise: Any) -> Any:
    """Return an object of a module of torch by its path, such as ``torch._C._is_tracing``."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return otherwise


def _of_c(name: str, otherwise: Any) -> Any:
    """Return an object by its path in ``torch._C``, such as ``DispatchKey``."""
    value: Any = getattr(torch, "_C", None)
    for part in name.split("."):
        value = getattr(value, part, None)
    return otherwise if value is None else value


def _missing(name: str, feature: str) -> NoReturn:
    """Raise the error that a feature needs a name that this version of torch lacks."""
    raise MissingNameError(
        f"torch {torch.__version__} has no {name}, which {feature} needs: use another version of "
        "torch, or ask for support of this one"
    )


# What runs now ------------------------------------------------------------------------------------

NO_TASK = -1
graph_task: Callable[[], int] = _of_c("_current_graph_task_id", lambda: NO_TASK)
"""Returns the number of the backward that runs in this thread; `NO_TASK` outside of a backward. A
checkpoint calls layers again in a backward. Without the private name, such calls count twice.
"""
current_cuda_device: Callable[[], int] = _of_c("_cuda_getDevice", torch.cuda.current_device)
"""Returns the number of the current CUDA device. The public function takes longer."""
raw_cuda_stream: Callable[[int], int] = _of_c(
    "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
"""Returns the current stream of a CUDA device as a number. The public function takes longer."""


stream_is_captured: Callable[[], bool] = _of_c(
    "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Says whether a CUDA graph is captured on the current stream. The public function takes longer."""


def recomputes_checkpoint() -> bool:
    """Return in a backward whether a checkpoint that is not reentrant recomputes its forward.

    Without the private name, this is never known.
    """
    top = _of_c("_autograd._top_saved_tensors_default_hooks", None)
    ignore_is_tracing = True
    hooks = None if top is None else top(ignore_is_tracing)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator from which a device draws random numbers."""
    if device.type != "mps":
        generators: Any = torch.get_device_module(device).default_generators
        generator: torch.Generator = generators[device.index]
        return generator

    # MPS has one device, and no list of generators
    find = find_private("torch.mps._get_default_mps_generator", None)
    if find is None:
        _missing("torch.mps._get_default_mps_generator", "same_masks on MPS")
    generator_of_mps: torch.Generator = find()
    return generator_of_mps


transforming: Callable[[], bool] = _of_c("_are_functorch_transforms_active", lambda: False)
"""Says whether a transform of torch.func is active. Without it, `vmap` is not refused."""
is_tracing: Callable[[], bool] = _of_c("_is_tracing", lambda: False)
"""Says whether torch.jit.trace records. Without it, traces of active regularizers are allowed."""
is_transformed: Callable[[Tensor], bool] = _of_c(
    "_functorch.is_functorch_wrapped_tensor", lambda x: False
)
"""Says whether a tensor belongs to a transform of torch.func. Without it, gradients of such tensors
are not regularized.
"""
_transforms: Callable[[], Any] = _of_c("_functorch.get_interpreter_stack", lambda: None)
_innermost_transform: Callable[[], Any] = _of_c("_functorch.peek_interpreter_stack", lambda: None)
_is_batched: Callable[[Tensor], bool] = _of_c("_functorch.is_legacy_batchedtensor", lambda x: False)
_dispatch_modes: Callable[[], int] = _of_c("_len_torch_dispatch_stack", lambda: 0)
_dispatch_mode: Callable[[Any], Any] = _of_c("_get_dispatch_mode", lambda key: None)
_MODE_KEYS: Any = _of_c("_TorchDispatchModeKey", None)
COMPILING = "_is_compiling_flag"
EXPORTING = "_is_exporting_flag"
"""Attributes of ``torch.compiler``, true while code is compiled or exported. Hooks read them in
each call, and a function around them would take time. Without them, an export is not recognized.
"""
set_eval_frame: Callable[[Any], Any] = _of_c(
    "_dynamo.eval_frame.set_eval_frame", lambda callback: None
)
"""Switches dynamo off (None), or on again with the value that this call returned. Without it,
dynamo may compile functions of the package between compiled code.
"""
FakeTensor: type = find_private("torch._subclasses.fake_tensor.FakeTensor", type(None))
"""The class of tensors without values, in traces. Without it, such tensors are not recognized."""
do_not_compile: Callable[[Function], Function] = find_private(
    "torch._compile._disable_dynamo", lambda function: function
)
"""Decorates a function that dynamo shall not trace. ``torch.compiler.disable`` would import dynamo,
which takes a second. Without it, dynamo traces the function.
"""


def transforms_now() -> set[str]:
    """Return the kinds of the active transforms of torch.func, such as ``{"Grad", "Vmap"}``."""
    return {transform.key().name for transform in _transforms() or ()}


def is_batched_gradient(grad: Tensor) -> bool:
    """Return whether a gradient may hold several gradients, as for a Jacobian.

    Each transform of torch.func counts. ``is_grads_batched=True`` uses an older ``vmap``, which is
    no such transform.
    """
    return _innermost_transform() is not None or _is_batched(grad)


def _is_traced_by_mode() -> bool:
    """Return whether a mode of torch traces the operators.

    Other modes, such as a FlopCounterMode, may be on in a forward and off in its recomputation by a
    checkpoint, so they must make no difference. Without the private names, all modes count.
    """
    if not _dispatch_modes():
        return False
    if _MODE_KEYS is None:
        return True
    keys = (_MODE_KEYS.FAKE, _MODE_KEYS.PROXY, _MODE_KEYS.FUNCTIONAL)
    return any(_dispatch_mode(key) is not None for key in keys)


def is_plain_call(x: Tensor) -> bool:
    """Return whether a tensor is plain, and its operators are not traced and not transformed."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and not is_tracing()
        and not _is_traced_by_mode()
        and _innermost_transform() is None
    )


@contextmanager
def recording_autograd() -> Iterator[None]:
    """Record a graph inside an operator, where torch has switched autograd off.

    Without the private names, regularizers of users that are not linear can't be compiled.
    """
    guard = _of_c("_ForceDispatchKeyGuard", None)
    included = _of_c("_dispatch_tls_local_include_set", None)
    excluded = _of_c("_dispatch_tls_local_exclude_set", None)
    keys = _of_c("DispatchKey", None)
    if None in (guard, included, excluded, keys):
        _missing("_ForceDispatchKeyGuard", "a compiled regularizer that is not linear")
    still_excluded = excluded()
    for key in _AUTOGRAD_KEYS:
        still_excluded = still_excluded.remove(getattr(keys, key))
    with guard(included(), still_excluded), torch.enable_grad():
        yield


_AUTOGRAD_KEYS = (
    "AutogradFunctionality",
    "AutogradOther",
    "AutogradNestedTensor",
    "AutogradCPU",
    "AutogradCUDA",
    "ADInplaceOrView",
)


# Modules, tensors and gradients -------------------------------------------------------------------


def children_of(module: nn.Module) -> dict[str, Any]:
    """Return the children of a module by name, also None for empty places.

    ``named_children`` leaves out empty places, and the other names of a shared module. Without the
    private name, these are missing here, too.
    """
    children = getattr(module, "_modules", None)
    return dict(module.named_children()) if children is None else children


PARAMETERS = "_parameters"
NO_PARAMETERS: dict[str, Any] = {}
"""The attribute in which a module keeps its parameters, and the value to use without it. Hooks read
the attribute for each parameter, and a function around it would take time. They call
`parameters_of` where a parameter is not found.
"""


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return the parameters of a module itself by name, also None for empty places."""
    parameters = getattr(module, PARAMETERS, None)
    return dict(module.named_parameters(recurse=False)) if parameters is None else parameters


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the dict of forward hooks of a module, in their order, to read and to change."""
    hooks: dict[int, Any] | None = getattr(module, "_forward_hooks", None)
    return _missing("Module._forward_hooks", "attach") if hooks is None else hooks


def forward_pre_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the dict of forward pre-hooks of a module, in their order, to read and to change."""
    hooks: dict[int, Any] | None = getattr(module, "_forward_pre_hooks", None)
    return _missing("Module._forward_pre_hooks", "attach") if hooks is None else hooks


def all_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Return the hooks of a module in forward and backward, as a dict for each kind."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hooks for name in names if (hooks := getattr(module, name, None)) is not None]


_FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""The attributes in which a module keeps its forward hooks, or their options, by number."""


def remove_forward_hook(module: nn.Module, number: int) -> None:
    """Remove the forward hook or pre-hook with this number."""
    attributes = vars(module)
    for name in _FORWARD_HOOKS:
        hooks = attributes.get(name)
        if hooks:
            hooks.pop(number, None)


def hooks_of_tensor(x: Tensor) -> dict[int, Any]:
    """Return the hooks on the gradient of a tensor; no hooks without the private name."""
    return getattr(x, "_backward_hooks", None) or {}


def accumulate_hooks_of(x: Tensor) -> dict[int, Any]:
    """Return the hooks of a parameter that run after its gradient was accumulated.

    Without the private name, it returns no hooks.
    """
    return getattr(x, "_post_accumulate_grad_hooks", None) or {}


def set_hooks_of_tensor(x: Tensor, hooks: dict[int, Any]) -> None:
    """Set the hooks of a tensor, without which torch calls none of them after ``swap_tensors``."""
    x._backward_hooks = hooks


def address_of(x: Tensor) -> int:
    """Return a number of the C++ object of a tensor. ``torch.utils.swap_tensors`` changes it."""
    return int(getattr(x, "_cdata", 0))


def is_view(x: Tensor) -> bool:
    """Return whether a tensor may be a view of another; always True without the private name."""
    method = getattr(x, "_is_view", None)
    return True if method is None else bool(method())


_is_alias: Any = _of_c("_is_alias_of", None)


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors share their memory."""
    if _is_alias is not None:
        return bool(_is_alias(x, y))
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def local_values(x: Tensor) -> Tensor:
    """Return the part of a DTensor on this process; `x` without the private name."""
    part: Tensor = getattr(x, "_local_tensor", x)
    return part


def is_part_of_flat(x: Tensor) -> bool:
    """Return whether a parameter is a part of a flat parameter of FullyShardedDataParallel."""
    return bool(getattr(x, "_fsdp_flattened", False))


def version_of(x: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 without the private name."""
    version: int = getattr(x, "_version", 0)
    return version


def scale_tensor(scaler: Any) -> Tensor | None:
    """Return the tensor in which a GradScaler keeps its scale; None before its first use."""
    scale: Tensor | None = getattr(scaler, "_scale", None)
    return scale


def has_scale_tensor(scaler: Any) -> bool:
    """Return whether a GradScaler keeps its scale in a tensor, like the class of torch."""
    return hasattr(scaler, "_scale")


# Nested structures --------------------------------------------------------------------------------


def _no_tree(*args: Any, **kwargs: Any) -> NoReturn:
    _missing("torch.utils._pytree", "reading a nested input or output")


tree_flatten: Callable[..., Any] = find_private("torch.utils._pytree.tree_flatten", _no_tree)
tree_unflatten: Callable[..., Any] = find_private("torch.utils._pytree.tree_unflatten", _no_tree)
tree_leaves: Callable[..., list[Any]] = find_private("torch.utils._pytree.tree_leaves", _no_tree)
tree_map: Callable[..., Any] = find_private("torch.utils._pytree.tree_map", _no_tree)
tree_map_only: Callable[..., Any] = find_private("torch.utils._pytree.tree_map_only", _no_tree)
"""Functions for the leaves in nested lists, tuples and dicts. torch has no public form of them."""


# Runs without values, and processes ---------------------------------------------------------------


def fake_mode() -> Any:
    """Return a mode in which tensors have no values.

    Without a private name it is None, and the dry run of `plan` uses tensors with values.
    """
    mode = find_private("torch._subclasses.fake_tensor.FakeTensorMode", None)
    if mode is None or _fake_copies() is None:
        return None
    return mode(allow_non_fake_inputs=True)


def _fake_copies() -> Any:
    """Return the class of `copying_as_fake`; None without the private name."""
    return find_private("torch._subclasses.fake_tensor.FakeCopyMode", None)


def copying_as_fake(mode: Any) -> Any:
    """Return a context manager in which ``copy.deepcopy`` makes tensors of a `fake_mode`."""
    return _fake_copies()(mode)


def watching_operators(see: Callable[[Any], None]) -> Any:
    """Return a context manager that calls `see` with each operator before it runs."""
    base = find_private("torch.utils._python_dispatch.TorchDispatchMode", None)
    if base is None:
        _missing("TorchDispatchMode", "a benchmark that counts operators")

    class Watching(base):  # type: ignore[misc, valid-type]  # a class that is looked up
        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            see(operator)
            return operator(*args, **(kwargs or {}))

    return Watching()


def store_of_processes() -> Any:
    """Return the key-value store that all processes share; None without the private name."""
    find = find_private("torch.distributed.distributed_c10d._get_default_store", None)
    return None if find is None else find()


# Operators on lists of tensors --------------------------------------------------------------------


def foreach_norm(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """Compute the norms of all tensors by one operator; without the private name, one by one."""
    if hasattr(torch, "_foreach_norm"):
        return list(torch._foreach_norm(list(tensors), norm_type, dtype=dtype))
    return [torch.linalg.vector_norm(x, norm_type, dtype=dtype) for x in tensors]


def foreach_mul_(tensors: Sequence[Tensor], factors: Tensor | float | Sequence[Tensor]) -> None:
    """Multiply all tensors in place, by one number or by a factor for each tensor."""
    if hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(list(tensors), factors)  # type: ignore[arg-type]  # one of three overloads
        return
    if isinstance(factors, Tensor | float):
        factors = [torch.as_tensor(factors)] * len(tensors)
    for x, factor in zip(tensors, factors, strict=True):
        x.mul_(factor)


def foreach_sub_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Subtract a tensor from each tensor, in place."""
    if hasattr(torch, "_foreach_sub_"):
        torch._foreach_sub_(list(tensors), list(others))
        return
    for x, other in zip(tensors, others, strict=True):
        x.sub_(other)


def foreach_sub(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Subtract a tensor from each tensor, and return new tensors."""
    if hasattr(torch, "_foreach_sub"):
        return list(torch._foreach_sub(list(tensors), list(others)))
    return [x - other for x, other in zip(tensors, others, strict=True)]


def foreach_add_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add a tensor to each tensor, in place."""
    if hasattr(torch, "_foreach_add_"):
        torch._foreach_add_(list(tensors), list(others))
        return
    for x, other in zip(tensors, others, strict=True):
        x.add_(other)


def foreach_copy_(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors, whose dtypes may differ."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(list(tensors), list(values))
        return
    for x, value in zip(tensors, values, strict=True):
        x.copy_(value)


def foreach_zero_(tensors: Sequence[Tensor]) -> None:
    """Set all elements of the tensors to 0."""
    if hasattr(torch, "_foreach_zero_"):
        torch._foreach_zero_(list(tensors))
        return
    for x in tensors:
        x.zero_()


# torch.compile ------------------------------------------------------------------------------------

_run_as_python: list[Any] = []
_DYNAMO_CONFIG = "torch._dynamo.config"
_DYNAMO_FRAMES = "torch._dynamo.eval_frame"


def constant_when_traced(function: Function) -> Function:
    """Decorate a function that torch.compile calls while it traces. The result is a constant.

    This sets the attribute of ``torch.compiler.assume_constant_result``, which would import dynamo
    and take a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # on a function
    return function


@constant_when_traced
def is_short_of_memory() -> bool:
    """Return whether settings let torch.compile run any operator again in the backward.

    Then it also runs random operators again, although they draw other numbers.
    """
    config = find_private("torch._functorch.config", None)
    budget: float = getattr(config, "activation_memory_budget", 1.0)
    return budget < 1.0 or bool(getattr(config, "aggressive_recomputation", False))


def run_as_python(function: Function) -> Function:
    """Decorate a function that dynamo must not compile alone. Inside other code it is traced.

    ``torch.compiler.disable`` would break the graph of the other code. `skip_functions` passes the
    function to dynamo.
    """
    _run_as_python.append(function)
    return function


def skip_functions() -> None:
    """Pass the functions of `run_as_python` to dynamo, now or when it is imported.

    It runs in `attach`. It runs again while torch.compile traces a hook, because
    ``torch._dynamo.reset`` forgets the functions. Without ``skip_code``, dynamo compiles them. Then
    the hook of a compiled model does not count its forwards, a `Watchdog` looks only in ``step``,
    and the hook of each parameter of the model itself is compiled alone.
    """
    _when_imported(_DYNAMO_FRAMES, _skip_functions_in)


def _skip_functions_in(eval_frame: ModuleType) -> None:
    skip_code = getattr(eval_frame, "skip_code", None)
    if skip_code is None:
        return
    for function in _run_as_python:
        skip_code(function.__code__)


def keep_equal_calls(*operators: Any) -> None:
    """Tell torch.compile that two equal calls of a random operator have different results.

    Before torch 2.14, AOTAutograd joins equal calls in one graph. It spares only the operators in
    the list ``rand_ops``, and does not read the tags of an operator. Without this private name, two
    calls of a layer with one input draw the same mask there.
    """
    packets = [getattr(operator, "overloadpacket", operator) for operator in operators]

    def add(compile_utils: ModuleType) -> None:
        random = getattr(compile_utils, "rand_ops", None)
        if isinstance(random, list):
            random.extend(packets)

    _when_imported("torch._functorch.compile_utils", add)


def keep_address(tensor: Tensor) -> None:
    """Tell torch.compile that a tensor keeps its address in memory.

    Otherwise a graph that changes the tensor would run without CUDA graphs. The address is no
    guard, so equal blocks of a model share compiled code.
    """
    mark = find_private("torch._dynamo.mark_static_address", None)
    if mark is not None:
        mark(tensor, guard=False)


def look_into_operator(name: str, rule: Callable[..., Any], library: torch.library.Library) -> None:
    """Have AOTAutograd call ``rule(mode, operator, types, args, kwargs)`` in place of an operator.

    ``torch.library.triton_op`` does the same. Without the private name, the operator stays opaque.
    """
    mode = find_private("torch._subclasses.functional_tensor.FunctionalTensorMode", None)
    register = getattr(torch.library, "register_torch_dispatch", None)
    if mode is not None and register is not None:
        register(name, mode, rule, lib=library)


def outside_of_trace() -> Any:
    """Return a context manager in which tensors have values, also while operators are traced.

    Without the private name, a trace of operators raises a `MissingNameError`.
    """
    if not _dispatch_modes():
        return nullcontext()
    disable = find_private("torch.utils._python_dispatch._disable_current_modes", None)
    if disable is not None:
        return disable()
    if _is_traced_by_mode():
        _missing("_disable_current_modes", "a trace")
    return nullcontext()


@contextmanager
def allowing_constants() -> Iterator[None]:
    """Let traced operators use tensors with values, which become constants of the graph.

    Without the private names, torch may refuse such tensors.
    """
    fake = None if _MODE_KEYS is None else _dispatch_mode(_MODE_KEYS.FAKE)
    before = getattr(fake, _ALLOWED, None)
    if before is not None:
        setattr(fake, _ALLOWED, True)
    try:
        yield
    finally:
        if before is not None:
            setattr(fake, _ALLOWED, before)


_ALLOWED = "allow_non_fake_inputs"


def analyze_kernels_once(is_ours: Callable[[Any], bool]) -> None:
    """Have torch analyze the writes of each variant of our Triton kernels only once.

    By default, torch compiles a kernel three times for this analysis, for every launch in a graph.
    Without the private names, it does this for our kernels, too.
    """
    module = sys.modules.get("torch._higher_order_ops.triton_kernel_wrap")
    for name in ("identify_accessed_tensors", "identify_mutated_tensors"):
        analyze = getattr(module, name, None)
        if analyze is not None and not hasattr(analyze, "_known"):
            setattr(module, name, _analyzing_once(analyze, is_ours))


def _analyzing_once(
    analyze: Callable[..., Any], is_ours: Callable[[Any], bool]
) -> Callable[..., Any]:
    """Return the function with a memory of its results for our kernels."""
    known: dict[Any, Any] = {}

    @functools.wraps(analyze)
    def analyze_once(kernel: Any, arguments: dict[str, Any], *others: Any) -> Any:
        if not is_ours(kernel):
            return analyze(kernel, arguments, *others)
        constants = {param.name for param in kernel.params if param.is_constexpr}
        kinds = [
            (name, str(value) if name in constants else _kind_of(value))
            for name, value in arguments.items()
        ]
        key = id(kernel), *kinds
        if key not in known:
            known[key] = analyze(kernel, arguments, *others)
        return known[key]

    analyze_once._known = known  # type: ignore[attr-defined]  # on a function
    return analyze_once


def _kind_of(value: Any) -> str:
    """Return the part of an argument that decides the code of a kernel: its dtype or type."""
    return str(getattr(value, "dtype", type(value)))


def forget_compiled() -> None:
    """Have everything compiled anew, because compiled code does not see new hooks.

    ``torch.compiler.reset()`` would also end CUDA graphs, callbacks and compiled autograd. It is
    used only if the private names are missing.
    """
    if "torch._dynamo.convert_frame" not in sys.modules:
        return  # nothing has ever been compiled
    entries = _of_c("_dynamo.eval_frame._debug_get_cache_entry_list", None)
    reset = _of_c("_dynamo.eval_frame.reset_code", None)
    codes = find_private("torch._dynamo.convert_frame.input_codes", None)
    if None in (entries, reset, codes):
        torch.compiler.reset()
        return
    for code in [reference() for reference in codes.seen]:
        is_alive = code is not None  # `seen` holds weak references
        if is_alive and entries(code):
            reset(code)


def guard_hooks() -> None:
    """Make torch.compile check that a module has the same hooks as when it was compiled.

    By default dynamo does not check the hooks (``skip_nnmodule_hook_guards``). Then a module with
    hooks may run the compiled code of a module of the same class without hooks.
    """
    _when_imported(_DYNAMO_CONFIG, _guard_hooks_in)


def _guard_hooks_in(config: ModuleType) -> None:
    if hasattr(config, "skip_nnmodule_hook_guards"):
        config.skip_nnmodule_hook_guards = False  # type: ignore[attr-defined]  # of dynamo


def _when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module of dynamo, now or when it is imported.

    Its import takes a second, and a process that compiles nothing does not need it.
    """
    module = sys.modules.get(name)
    if module is not None:
        change(module)
    elif not any(isinstance(finder, _Import) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Import(name, change))


class _Import(importlib.abc.MetaPathFinder):
    """Waits for the import of a module, and then changes it."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.change = change

    def _leave(self) -> None:
        if self in sys.meta_path:  # other code may have replaced the list
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        self._leave()  # otherwise the next call would come back here
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # the caller may only ask, and import the module later
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            self._leave()
            self.change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]  # of this one import
        return spec
