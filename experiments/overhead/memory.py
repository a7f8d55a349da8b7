"""The memory that a step takes: what autograd saves for the backward, and the peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], object]


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def saved_share(step: Step, activation: Tensor | None) -> float | None:
    """Return the bytes that a step saves for the backward, as a share of its activation's."""
    return None if activation is None else saved_bytes(step, [activation]) / activation.nbytes


def saved_bytes(step: Step, known: Iterable[Tensor] = ()) -> int:
    """Return bytes that autograd saves for the backward in one step; `known` tensors do not count.

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
    """Return the peak memory of a step in bytes, above the memory held before it."""
    step()  # buffers that are made once, such as an optimizer's, do not count
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
