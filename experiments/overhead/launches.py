"""How many kernels a step starts, and the most that a site may start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dropblock_hooks import (
    L2SP,
    ActivationStats,
    ActivityL1,
    ActivityL2,
    AdaGC,
    AdaptiveClipGrad,
    Capture,
    ClampActivation,
    ClampGrad,
    ClipGradNorm,
    Disout,
    DropBlock2d,
    DropGrad2d,
    Dropout,
    Dropout2d,
    DropPath,
    FreezeNorm,
    GaussianDropout,
    GaussianNoise,
    GradientStats,
    NEFTune,
    ScaleGrad,
    SkipUpdate,
    Watchdog,
    ZClip,
    ZeroGrad,
    ZLoss,
)
from dropblock_hooks._torch import watching_operators
from dropblock_hooks.functional.kernels import launch
from experiments.overhead.memory import Step, synchronize

AT_A_LAYER: Mapping[Any, int] = {
    DropBlock2d(0.1, 5): 5,
    DropBlock2d(0.1, 5, normalize="expected"): 5,
    DropBlock2d(0.1, 5, normalize="sample"): 5,
    DropBlock2d(0.1, 5, share_channels=True): 5,
    Disout(0.1, 5): 8,
    Dropout(0.1): 4,
    Dropout2d(0.1): 5,
    DropPath(0.1): 5,
    GaussianNoise(0.1): 3,
    GaussianDropout(0.1): 4,
    ClampGrad(-1.0, 1.0): 4,
    ClipGradNorm(1.0): 5,
    ClipGradNorm(1.0, per="sample"): 5,
    ClipGradNorm(1.0, per="channel"): 5,
    ScaleGrad(0.5): 2,
    ZeroGrad(): 2,
    DropGrad2d(0.1): 6,
    # autograd's clamp has 5 in the backward
    ClampActivation(max=1.0): 7,
    ClampActivation(-1.0, 1.0): 10,
    # 3 in the forward, 3 to count, 3 in the backward
    ClampActivation(cap=3.0): 9,
    # 3 for the value, 4 for its gradient, 2 to add it
    ZLoss(1e-4, dim=1): 9,
    ActivityL1(0.1): 6,
    ActivityL2(0.1): 5,
    Capture(): 1,
    ActivationStats(every=1): 3,
    ActivationStats(every=1, residual=True): 5,
    ActivationStats(every=1, outliers=True): 5,
    GradientStats(every=1): 3,
    Watchdog(): 4,
    Watchdog(keep=3): 4,
}
"""The most kernels that one step may start for a regularizer or observer of a layer."""
AT_A_PARAMETER: Mapping[Any, int] = {
    ClampGrad(-1.0, 1.0): 4,
    ClipGradNorm(1.0): 5,
    AdaptiveClipGrad(0.01): 6,
    L2SP(0.1): 5,
}
"""The most kernels that one step may start for a regularizer of a parameter."""
AT_AN_EMBEDDING: Mapping[Any, int] = {NEFTune(5.0): 2}
"""The most kernels that one step may start for a regularizer of an embedding."""
AT_A_NORM: Mapping[Any, int] = {FreezeNorm(): 0}
"""The most kernels that one step may start for a regularizer of a norm."""
AT_AN_UPDATE: Mapping[Any, int] = {
    ClipGradNorm(1.0, group=True): 13,
    AdaptiveClipGrad(0.01, group=True): 18,
    L2SP(0.1, when="accumulated"): 8,
    # one kernel judges all norms
    AdaGC(): 12,
    ZClip(): 13,
    ZClip(z=2.0, max_norm=1.0): 13,
    SkipUpdate(max_norm=1e9): 6,
    SkipUpdate(z=6.0): 6,
}
"""The most kernels that an update may start for all parameters of an entry, however many."""

# calls of the CUDA runtime and driver that put work on the GPU; some have a suffix, such as ExC
CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemsetAsync", "cudaMemcpyAsync")
# operators that start nothing: they allocate memory, make views, draw a seed on the host, or mark
# the time for a profiler
FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "promote_types"),
    *("detach", "alias", "_unsafe_view", "lift_fresh", "randint", "_local_scalar_dense"),
    *("_record_function_enter_new", "_record_function_exit"),
}


def launches_of(step: Step, device: torch.device) -> int:
    """Return the number of kernels that a step starts.

    On a GPU the profiler counts them, with copies and memsets. On a CPU an operator of torch counts
    as one kernel, and so does a Triton kernel.

    Example:
        >>> launches_of(lambda: torch.ones(3).exp().sum(), torch.device("cpu"))  # with the fill
        3
    """
    if device.type != "cuda":
        return operators_of(step).total()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize(device)
    return launches_in(profiler.key_averages())


def operators_of(step: Step) -> Counter[str]:
    """Return the operators of torch and the Triton kernels that a step starts, by name."""
    names: Counter[str] = Counter()

    def count(operator: Any) -> None:
        """Count an operator if it starts a kernel."""
        name = operator.overloadpacket.__name__
        if not (operator.is_view or name in FREE):
            names[name] += 1

    before = launch.launched
    with watching_operators(count):
        step()
    names["a Triton kernel"] = launch.launched - before
    return names


def launches_in(events: Iterable[Any]) -> int:
    """Return the number of launches among the averaged events of a profiler."""
    return sum(event.count for event in events if event.key.startswith(CALLS))
