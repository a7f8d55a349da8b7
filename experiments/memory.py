"""The memory that a step takes: what autograd keeps for backward, and the peak."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], object]

_STATUS = Path("/proc/self/status")


def synchronize(device: torch.device) -> None:
    """Wait for what runs on a device by itself."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def saved_bytes(step: Step, known: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd keeps for backward in one step: each storage once, `known` ones not.

    Example:
        >>> x = torch.ones(10, requires_grad=True)
        >>> saved_bytes(lambda: x.exp().sum().backward())
        40
    """
    seen = {tensor.untyped_storage().data_ptr() for tensor in known}
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return total


def peak_bytes(step: Step, device: torch.device) -> int:
    """Most bytes that one step holds at a time, above what was held before it."""
    step()  # what is made once, such as the buffers of an optimizer, is not counted
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


class PeakMemory:
    """The most bytes that this process held at a time since this was made.

    On a GPU, those that torch allocated there. Where the operating system can't start the count
    anew (all but Linux), it is the most since the process began.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif _STATUS.exists():
            try:
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            except OSError:  # not allowed in some containers
                warnings.warn("memory is counted from the process's start", stacklevel=2)

    def read(self) -> int:
        """The most until now."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if _STATUS.exists():
            lines = _STATUS.read_text(encoding="ascii").splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
        import resource  # of POSIX alone

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
