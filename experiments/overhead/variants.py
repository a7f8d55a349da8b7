"""Variants that are ready to be timed: in this process, or each in a process of its own.

Compiled models need processes of their own. torch's compiler keeps its state for the whole process,
so one variant could run code that was compiled for another. A process that crashes does not take
the other measurements with it.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments.overhead.launches import launches_of
from experiments.overhead.memory import Step, peak_bytes, saved_share, synchronize
from experiments.overhead.replay import replayed

Clock = Callable[[], float]
Recipe = Callable[[torch.device], Step]
"""Makes a step in another process. It can be pickled, such as a `partial` of a function."""
_LONGEST = 300  # characters of a reason
_clock: Clock = time.perf_counter  # see `set_up`


@dataclass(frozen=True)
class Facts:
    """The numbers that are measured once for a variant.

    Attributes:
        first_s: seconds of the first call.
        kept: bytes kept for the backward, as a share of the activation.
        peak_mb: peak memory of a step, above the memory in use before it.
        launches: kernels that a step starts.
    """

    first_s: float
    kept: float | None = None
    peak_mb: float | None = None
    launches: int | None = None


class Variant(Protocol):
    """A variant that is ready to be timed."""

    def look(self, deadline: float) -> Facts:
        """Run the step for the first times, and return the numbers that are measured once."""

    def seconds(self, repeats: int) -> float:
        """Return the seconds of a call, as the mean of several calls."""

    def close(self) -> None:
        """Free the memory and the process of the variant."""


class Here:
    """A variant in this process.

    Args:
        step: does the work once.
        device: the device of the step.
        activation: saved bytes are counted as a share of it. None does not count them.
        replays: whether replays of a CUDA graph are timed in place of calls.
        counts: whether launches are counted.
    """

    def __init__(
        self,
        step: Step,
        device: torch.device,
        activation: Tensor | None = None,
        replays: bool = False,
        counts: bool = False,
    ) -> None:
        self.step = step
        self.device = device
        self.activation = activation
        self.replays = replays
        self.counts = counts
        self.timed = step
        self.runs = 1

    def look(self, deadline: float) -> Facts:
        """Run the step for the first times, and return the numbers that are measured once."""
        first = seconds_of(self.step, 1, self.device)
        kept = saved_share(self.step, self.activation)
        peak = peak_bytes(self.step, self.device) / 1e6
        launches = launches_of(self.step, self.device) if self.counts else None
        if self.replays:
            self.timed, self.runs = replayed(self.step, self.device)
        return Facts(first, kept, peak, launches)

    def seconds(self, repeats: int) -> float:
        """Return the seconds of a call, as the mean of several calls."""
        return seconds_of(self.timed, repeats, self.device) / self.runs

    def close(self) -> None:
        """Do nothing, because the memory is freed with the object."""


class Apart:
    """A variant in a process of its own, which is started at once.

    Args:
        recipe: makes the step in the other process.
        device: the device of the step.
        threads: the number of threads with which the compiler makes kernels.
    """

    def __init__(self, recipe: Recipe, device: torch.device, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.connection, other_end = spawn.Pipe()
        self.cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.process = spawn.Process(
            target=serve,
            args=(other_end, recipe, device, torch.get_num_threads(), _clock),
            daemon=False,  # the compiler starts processes, too
        )
        of_compiler = {
            "TORCHINDUCTOR_CACHE_DIR": self.cache.name,  # the first call must find no old kernels
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        }
        with environment(of_compiler):
            self.process.start()
        other_end.close()

    def look(self, deadline: float) -> Facts:
        """Wait for the numbers that are measured once, until a time of `time.monotonic`."""
        left = max(0.0, deadline - time.monotonic())
        facts: Facts = self._receive(min(left, 1e6))
        return facts

    def seconds(self, repeats: int) -> float:
        """Return the seconds of a call, as the mean of several calls."""
        self.connection.send(repeats)
        taken: float = self._receive(None)
        return taken

    def _receive(self, timeout: float | None) -> Any:
        """Return the next answer of the process.

        Raises:
            RuntimeError: if the process has failed, ended, or not answered in time.
        """
        if not self.connection.poll(timeout):
            raise RuntimeError("not ready in time: the limit of its set was reached")
        try:
            answer = self.connection.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            raise RuntimeError(f"its process ended with the exit code {code}") from None
        if isinstance(answer, Failure):
            raise RuntimeError(answer.reason)
        return answer

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.join(timeout=0.1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.cache.cleanup()


@dataclass(frozen=True)
class Failure:
    """The answer of a process that can't continue."""

    reason: str


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which a process that is started meanwhile inherits."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def serve(
    connection: Connection, recipe: Recipe, device: torch.device, threads: int, clock: Clock
) -> None:
    """Make a step, send the numbers that are measured once, and answer each request for a time."""
    try:
        set_up(device, threads, clock)
        variant = Here(recipe(device), device)
        connection.send(variant.look(deadline=0.0))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # other processes measure on the same GPU
        while True:
            repeats = connection.recv()
            connection.send(variant.seconds(repeats))
    except EOFError:  # the parent has all it wanted
        return
    except Exception as error:  # the row of this variant shows any error
        connection.send(Failure(reason_of(error)))


def set_up(device: torch.device, threads: int, clock: Clock = time.perf_counter) -> None:
    """Set the options of a whole process: threads, the choice of convolutions, and the clock."""
    global _clock
    _clock = clock
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = device.type == "cuda"


def reason_of(error: BaseException) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    line = text if name == "RuntimeError" and text else f"{name}: {text}"
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


def seconds_of(step: Step, repeats: int, device: torch.device) -> float:
    """Return the seconds of a call, as the mean of several calls."""
    synchronize(device)
    began = _clock()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (_clock() - began) / repeats
