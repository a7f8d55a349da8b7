"""Where Triton kernels run, how they are started, and their seeds and counts.

Triton comes with torch on Linux. Where a kernel can't run, the functions of this package use torch
operations, which give the same results with more launches.
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
from ..._torch import current_cuda_device, is_tracing, raw_cuda_stream, transforming
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
_MOST_PLACES = 2**31 - 2**17  # places that 32 bits can count, less the places of a program
_LEAST_SEED = 2**32
_CHUNK = 4096  # counts that are allocated together, which takes one launch
_failed = False  # whether a kernel could not be compiled
_counts = threading.local()
_thread = threading.local()
_ours: set[int] = set()  # the kernels that were written into a graph


class KernelError(RuntimeError):
    """A kernel can't be compiled or started here. A warning has told the reason."""


def takes(x: Tensor) -> bool:
    """Return whether kernels are used for a tensor on a GPU: a plain one, or one of `tracing`."""
    if x.device.type not in DEVICES:  # first, because most tensors on a CPU end here
        return False
    if is_traced():
        return is_on(x.device, x.dtype)
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and not is_tracing()
        and not transforming()
        and is_on(x.device, x.dtype)
    )


def is_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels are used on a device, also for tensors that a compiler traces."""
    return device.type in DEVICES and dtype in _FLOATS and not _failed and is_available()


@functools.cache
def is_available() -> bool:
    """Return whether Triton is switched on, installed and new enough; otherwise, warn why not."""
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
        numbers: the parameters behind the arguments of `start`.
        constants: the parameters behind the numbers, by name.
    """

    def __init__(
        self, kernel: Any, programs: int, numbers: tuple[int, ...], **constants: Any
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.numbers = numbers
        self.constants = constants
        # for kinds of arguments: what starts the compiled form, and the parameters behind them
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
        if is_traced():
            _ours.add(id(self.kernel))
            kernel = torch.library.wrap_triton(self.kernel)
            kernel[(self.programs,)](*arguments, *self.numbers, **self.constants)
            return
        launched += 1
        try:
            if device.type == "cuda" and device.index != current_cuda_device():
                with torch.cuda.device(device):
                    self._start_here(device, arguments)
            else:
                self._start_here(device, arguments)
        except Exception as error:  # compilers and drivers have many of them
            _give_up(self.kernel, error)
            raise KernelError(str(error)) from error

    def _start_here(self, device: torch.device, arguments: tuple[Any, ...]) -> None:
        """Start it on the current device."""
        key = (device.index, *[_kind(argument) for argument in arguments])
        form = self.forms.get(key)
        if form is not None:
            run, others = form
            run(*arguments, *others, stream=raw_cuda_stream(device.index))
            return

        grid = (self.programs,)
        compiled = self.kernel[grid](*arguments, *self.numbers, **self.constants)
        # an interpreter compiles nothing
        if compiled is not None and device.type == "cuda" and _keeps_forms():
            names = self.kernel.arg_names[len(arguments) + len(self.numbers) :]
            others = (*self.numbers, *(self.constants[name] for name in names))
            self.forms[key] = compiled[(self.programs, 1, 1)], others


def _kind(argument: Any) -> Any:
    """Return what Triton compiles for: a tensor's type, and whether 16 divides its address.

    Floats and seeds are different each time, and have one kind. Other integers are smaller.
    """
    if isinstance(argument, Tensor):
        return argument.dtype if argument.data_ptr() % 16 == 0 else (argument.dtype, "unaligned")
    if argument.__class__ is int and argument < _LEAST_SEED:
        return argument
    return argument.__class__


@functools.lru_cache(maxsize=4096)
def _launch(
    kernel: Any, programs: int, numbers: tuple[int, ...], constants: tuple[tuple[str, Any], ...]
) -> Launch:
    return Launch(kernel, programs, numbers, **dict(constants))


def start(
    kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any
) -> None:
    """Start a kernel with a number of programs on a device.

    Args:
        kernel: a kernel of Triton.
        programs: the number of programs; with 0 nothing is started.
        device: the device of the tensors.
        arguments: the first parameters of the kernel. Integers at their end must be sizes, strides
            and other numbers with few different values.
        constants: its other parameters.

    Raises:
        KernelError: the kernel can't be compiled. No kernel is used from then on.
    """
    first = len(arguments)
    while first and arguments[first - 1].__class__ is int:
        first -= 1
    prepared = _launch(kernel, programs, arguments[first:], tuple(constants.items()))
    prepared.start(device, *arguments[:first])


@functools.cache
def _keeps_forms() -> bool:
    """Return whether compiled forms can be started by all arguments, as of Triton 3.3."""
    return _version_of_triton() >= (3, 3)


@contextmanager
def tracing() -> Iterator[None]:
    """Let `start` write kernels into a graph in this thread, instead of starting them."""
    before = is_traced()
    _thread.traced = True
    try:
        yield
    finally:
        _thread.traced = before


def is_traced() -> bool:
    """Return whether kernels are written into a graph now, in this thread."""
    return getattr(_thread, "traced", False)


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
    """Return whether a CUDA graph is captured, which will be replayed without Python."""
    return device.type == "cuda" and is_captured()


def is_captured() -> bool:
    """Return whether a CUDA graph is captured on the current stream of any device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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

    Operators of compiled code can't use them, because torch.compile runs code once in the memory of
    a CUDA graph before it captures the graph. A chunk that stayed alive there would be an error.
    """
    if is_capturing(device):  # each replay must begin at 0
        return torch.zeros(number, dtype=torch.int64, device=device)
    wanted = number
    number += number % 2  # Triton compiles another form for addresses that 16 does not divide
    stream = raw_cuda_stream(device.index) if device.type == "cuda" else 0
    chunks: dict[Any, tuple[Tensor, int]] = _counts.__dict__.setdefault("chunks", {})
    chunk, used = chunks.get((device, stream), (None, _CHUNK))
    if chunk is None or used + number > len(chunk):
        with torch.inference_mode(False):
            chunk = torch.zeros(max(_CHUNK, number), dtype=torch.int64, device=device)
        used = 0
    chunks[device, stream] = chunk, used + number
    return chunk.narrow(0, used, wanted)


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
