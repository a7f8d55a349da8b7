"""Where Triton kernels run, how they are started, and their seeds and counts.

The functions of ``functional`` ask `takes` whether a tensor can go to a kernel. The kernels are
started by `start` or a `Launch`.

Triton comes with torch on Linux. Where a kernel can't run, the functions of this package use torch
operations, which compute the same with more launches. They draw other random numbers.
"""

import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ... import messages
from ..._torch import (
    COMPILING,
    current_cuda_device,
    is_tracing,
    raw_cuda_stream,
    stream_is_captured,
    transforming,
)
from ...warn import warn

Result = TypeVar("Result")
SWITCH = "DROPBLOCK_HOOKS_TRITON"
"""The environment variable that switches all kernels off if its value is 0."""
DEVICES = {"cuda"}
"""The types of devices with kernels. A test adds the CPU, where Triton's interpreter runs them."""
OLDEST = (3, 2)
"""The oldest version of Triton that was tried."""
launched = 0
"""The number of kernels that were started by this process."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# the largest offset in 32 bits, minus those that a program computes beyond the end of a tensor
_MOST_PLACES = 2**31 - 2**17
# seeds are above all sizes, so `_kind` can tell them apart, and Triton passes each as int64
_LEAST_SEED = 2**32
_CHUNK = 4096  # counts that are allocated together, which takes one launch
_failed = False  # whether a kernel could not be compiled
_ours: set[int] = set()  # the kernels that were written into a graph
_kernels: dict[int, Any] = {}  # the kernels that `start` has started, by their id


class _Thread(threading.local):
    """What each thread has by itself."""

    traced = False  # whether kernels are written into a graph

    def __init__(self) -> None:
        # by device and stream: a chunk of counts, its length, and how many of them are in use
        self.chunks: dict[Any, tuple[Tensor, int, int]] = {}
        self.counts: dict[Any, list[Tensor]] = {}  # counts that are not in use


_thread = _Thread()


class KernelError(RuntimeError):
    """A kernel can't be compiled or started here. A warning has told the reason."""


def takes(x: Tensor) -> bool:
    """Return whether kernels are used for a tensor on a GPU.

    It must be a plain tensor, unless `tracing` writes a graph.
    """
    if x.device.type not in DEVICES:  # first, because most tensors on a CPU end here
        return False
    if _thread.traced:
        return is_on(x.device, x.dtype)
    # the function is_compiling() would take longer
    if torch.compiler.is_dynamo_compiling() or getattr(torch.compiler, COMPILING, False):
        return False
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not is_tracing()
        and not transforming()
        and x.dtype in _FLOATS
        and not _failed
        and is_available()
    )


def is_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels are used on a device, also for tensors that a compiler traces."""
    return device.type in DEVICES and dtype in _FLOATS and not _failed and is_available()


@functools.cache
def is_available() -> bool:
    """Return whether Triton is on, installed and new enough. Warn if it is missing or too old."""
    if os.environ.get(SWITCH) == "0":
        return False
    try:
        version = _version_of_triton()
    except ImportError as error:
        warn(messages.NO_TRITON.format(error=error, triton="triton"))
        return False
    if version < OLDEST:
        installed = ".".join(map(str, version))
        oldest = ".".join(map(str, OLDEST))
        newer = f"triton>={oldest}"
        warn(messages.OLD_TRITON.format(version=installed, oldest=oldest, triton=newer))
        return False
    return True


def _version_of_triton() -> tuple[int, ...]:
    """Return the first two numbers of the version of Triton.

    Raises:
        ImportError: it is not installed.
    """
    version = str(importlib.import_module("triton").__version__)
    return tuple(int(part) for part in version.split(".")[:2])


class Launch:
    """A kernel with all that does not change from call to call.

    A call of a Triton kernel looks up each time which compiled form fits the arguments. This takes
    longer than many of our kernels. So a compiled form is kept for each kind of arguments.

    Args:
        kernel: a kernel of Triton.
        programs: the number of programs; with 0 nothing is started.
        numbers: the parameters that follow the arguments of `start`.
        varies: whether calls can have arguments of several kinds; see `_kind`. Without it, a form
            is found by its device alone, which takes less time. Then each dtype of the tensors
            needs its own `Launch`. So does each alignment of tensors that come from the user or
            were saved for the backward.
        constants: the parameters that follow the numbers, by name.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: tuple[int, ...],
        *,
        varies: bool = True,
        **constants: Any,
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.numbers = numbers
        self.varies = varies
        self.constants = constants
        # by kinds of arguments: what starts the compiled form, and the parameters that follow
        self.forms: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def start(self, device: torch.device, *arguments: Any) -> None:
        """Start it on a device.

        Args:
            device: the device of the tensors.
            arguments: the first parameters of the kernel: tensors, None, seeds and floats.

        Raises:
            KernelError: the kernel can't be compiled. No kernel is used from then on.
        """
        global launched
        if self.programs == 0:
            return
        if _thread.traced:
            self._write(arguments)
            return
        index = device.index
        if device.type == "cuda" and index != current_cuda_device():
            with torch.cuda.device(device):
                self.start(device, *arguments)
            return

        launched += 1
        kinds = (index, *map(_kind, arguments)) if self.varies else index
        form = self.forms.get(kinds)
        try:
            if form is None:
                self._start_first(device, kinds, arguments)
            else:
                run, others = form
                run(*arguments, *others, stream=raw_cuda_stream(index))
        except Exception as error:  # compilers and drivers have many of them
            _give_up(self.kernel, error)
            raise KernelError(str(error)) from error

    def _write(self, arguments: tuple[Any, ...]) -> None:
        """Write the call of the kernel into a graph."""
        _ours.add(id(self.kernel))
        kernel = torch.library.wrap_triton(self.kernel)
        kernel[(self.programs,)](*arguments, *self.numbers, **self.constants)

    def _start_first(self, device: torch.device, kinds: Any, arguments: tuple[Any, ...]) -> None:
        """Compile it for these kinds of arguments, start it, and keep its compiled form."""
        grid = (self.programs,)
        compiled = self.kernel[grid](*arguments, *self.numbers, **self.constants)
        # an interpreter compiles nothing
        if compiled is not None and device.type == "cuda" and _keeps_forms():
            names = self.kernel.arg_names[len(arguments) + len(self.numbers) :]
            others = (*self.numbers, *(self.constants[name] for name in names))
            self.forms[kinds] = compiled[(self.programs, 1, 1)], others


def _kind(argument: Any) -> Any:
    """Return what Triton compiles for: a tensor's type, and whether 16 divides its address.

    Floats and seeds are different each time, and have one kind. Each other integer, which is
    smaller, is a kind of its own. A kernel must name its seed in ``do_not_specialize``. Otherwise
    Triton compiles for whether 16 divides it, and a kept form is wrong for the next seed.
    """
    if isinstance(argument, Tensor):
        return argument.dtype if is_aligned(argument) else (argument.dtype, "unaligned")
    if argument.__class__ is int and argument < _LEAST_SEED:
        return argument
    return argument.__class__


def is_aligned(x: Tensor) -> bool:
    """Return whether 16 divides the address of a tensor, as of each tensor that torch allocates.

    A traced tensor has no address, and counts as aligned.
    """
    return _thread.traced or x.data_ptr() % 16 == 0


def alignment(x: Tensor, saved: Tensor) -> int:
    """Return a number that tells which of two tensors are aligned, for the key of a `Launch`.

    Args:
        x: a tensor of the user.
        saved: a tensor that was saved for the backward. A hook of the user may have moved it.
    """
    return is_aligned(x) + 2 * is_aligned(saved)


@functools.lru_cache(maxsize=4096)
def _launch(
    kernel_id: int, programs: int, numbers: tuple[int, ...], constants: tuple[tuple[str, Any], ...]
) -> Launch:
    # Triton's hash of a kernel takes long; `_kernels` keeps each kernel, so no id is used again
    return Launch(_kernels[kernel_id], programs, numbers, **dict(constants))


def start(
    kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any
) -> None:
    """Start a kernel with a number of programs on a device.

    Args:
        kernel: a kernel of Triton.
        programs: the number of programs; with 0 nothing is started.
        device: the device of the tensors.
        arguments: the first parameters of the kernel. Integers at their end must be sizes, strides
            and other numbers with few different values, because each value has its own `Launch`.
        constants: its other parameters.

    Raises:
        KernelError: the kernel can't be compiled. No kernel is used from then on.
    """
    first = len(arguments)
    while first and arguments[first - 1].__class__ is int:
        first -= 1
    _kernels[id(kernel)] = kernel
    prepared = _launch(id(kernel), programs, arguments[first:], tuple(constants.items()))
    prepared.start(device, *arguments[:first])


@functools.cache
def _keeps_forms() -> bool:
    """Return whether a compiled form takes all parameters, also constants, as of Triton 3.3."""
    return _version_of_triton() >= (3, 3)


@contextmanager
def tracing() -> Iterator[None]:
    """Let `start` write kernels into a graph in this thread, instead of starting them."""
    before = _thread.traced
    _thread.traced = True
    try:
        yield
    finally:
        _thread.traced = before


def is_traced() -> bool:
    """Return whether kernels are written into a graph now, in this thread."""
    return _thread.traced


def is_ours(kernel: Any) -> bool:
    """Return whether a kernel that was written into a graph belongs to this package."""
    return id(kernel) in _ours


def _give_up(kernel: Any, error: Exception) -> None:
    global _failed
    if _failed:
        return
    _failed = True
    reason = f"{type(error).__name__}: {str(error)[:500]}"
    warn(messages.KERNEL_FAILED.format(kernel=kernel.__name__, error=reason))


def or_else(fast: Callable[[], Result], dense: Callable[[], Result]) -> Result:
    """Return the result of the function with kernels, or without them if they can't be compiled."""
    try:
        return fast()
    except KernelError:
        return dense()


def is_capturing(device: torch.device) -> bool:
    """Return `is_captured`; False for a device that is no GPU."""
    # the expression of `is_captured`, because a call takes time
    return device.type == "cuda" and torch.cuda.is_initialized() and stream_is_captured()


def is_captured() -> bool:
    """Return whether a CUDA graph is captured on the current stream of the current device.

    The graph will be replayed without Python.
    """
    return torch.cuda.is_initialized() and stream_is_captured()


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> int | Tensor:
    """Draw a seed from torch's CPU generator, which needs no launch, or a tensor on the device.

    A tensor is needed where the user gives a generator of the device, and while a CUDA graph is
    captured, because each replay must draw another mask.
    """
    on_device = generator is not None and generator.device.type != "cpu"
    if on_device or is_capturing(device):
        options = {"dtype": torch.int64, "device": device, "generator": generator}
        drawn: Tensor = torch.randint(_LEAST_SEED, 2**62, (1,), **options)  # type: ignore[call-overload]  # torch's
        return drawn
    return int(torch.randint(_LEAST_SEED, 2**62, (1,), device="cpu", generator=generator))


def zeros(device: torch.device, number: int = 1) -> Tensor:
    """Return new counts of 0 on a device, as int64. One launch allocates many counts, a chunk.

    Operators of compiled code can't use them. Before torch.compile captures a CUDA graph, it runs
    the code once in the memory of this graph. A chunk that stayed alive there would be an error.
    """
    if is_capturing(device):  # each replay must begin at 0
        return torch.zeros(number, dtype=torch.int64, device=device)
    # an even number of counts, so that 16 divides each address, as `_kind` expects
    taken = number + number % 2
    # another stream might use a chunk before it is filled with 0
    stream = raw_cuda_stream(device.index) if device.type == "cuda" else 0
    place = device.type, device.index, stream
    chunk, length, used = _thread.chunks.get(place, (None, 0, 0))
    if chunk is None or used + taken > length:
        length = max(_CHUNK, taken)
        with torch.inference_mode(False):  # as in `count`
            chunk = torch.zeros(length, dtype=torch.int64, device=device)
        used = 0
    _thread.chunks[place] = chunk, length, used + taken
    return chunk.narrow(0, used, number)


def count(device: torch.device) -> Tensor:
    """Return a new count of 0 on a device, as a 0-dim tensor of int64.

    It is a view of a chunk, as in `zeros`. The views of a chunk are made together, because a view
    takes a large part of the time of a small kernel.
    """
    if is_capturing(device):  # each replay must begin at 0
        return torch.zeros((), dtype=torch.int64, device=device)
    stream = raw_cuda_stream(device.index) if device.type == "cuda" else 0
    place = device.type, device.index, stream
    counts = _thread.counts.get(place)
    if not counts:
        # the backward of a dropout saves its count, which autograd refuses for an inference tensor
        with torch.inference_mode(False):
            # the second column is not used, so that 16 divides all addresses
            chunk = torch.zeros((_CHUNK // 2, 2), dtype=torch.int64, device=device)
            counts = list(chunk[:, 0].unbind())
        _thread.counts[place] = counts
    return counts.pop()


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()


def parts(number: int, size: int) -> int:
    """Return how many parts of a size cover a number. The last part may be smaller."""
    return -(-number // size)


def wide(x: Tensor) -> Any:
    """Return the type in which a kernel computes: Triton's float32, or float64 for float64."""
    return wide_type(x.dtype)


@functools.cache
def wide_type(dtype: torch.dtype) -> Any:
    """Return `wide` for a type."""
    language = importlib.import_module("triton.language")
    return language.float64 if dtype == torch.float64 else language.float32


def is_big(number: int, *tensors: Tensor) -> bool:
    """Return whether a kernel must compute the places of so many elements with 64 bits."""
    return is_far(number, ()) or any(is_far(0, x.shape, x.stride()) for x in tensors)


def is_far(number: int, shape: tuple[int, ...], *strides: tuple[int, ...]) -> bool:
    """Return `is_big` for tensors with this shape and these strides."""
    if number >= _MOST_PLACES:
        return True
    return any(_reach(shape, steps) >= _MOST_PLACES for steps in strides)


@functools.lru_cache(maxsize=4096)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the distance in memory of the last element from the first one."""
    return sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
