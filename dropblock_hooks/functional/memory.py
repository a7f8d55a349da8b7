"""Bounds of gradient norms that follow from the norms of earlier updates.

At each step of the optimizer, the method ``judge`` of `AdaGC`, `ZClip` or `SkipUpdate` calls the
function of the same name.

A *memory* is a tensor with a row of numbers for each norm. Each function returns its result and the
new memory, and changes nothing. A row of zeros, as `new_memory` makes it, has seen no norm yet.

    adagc        mean of the norms after clipping, number of norms
    zclip        mean of the norms after clipping by `z`, their variance, number of norms
    skip_update  mean of the norms, each cut at the bound of `z`, their variance, number of norms

The option `max_norm` of `zclip` and `skip_update` does not change what is remembered.

Norms that are not finite are never remembered. If one norm is not finite, `adagc` remembers no norm
of this update, because the common norm is not finite. It also leaves norms of 0 out, because a mean
of 0 would be a bound of 0 for ever. The first gradient of a low-rank adapter is 0, for example.

On a GPU, one kernel of `kernels.memory` does the same, unless a bound is in a tensor.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ..checks import POSITIVE, Range, as_count, as_number
from .gradients import Bound
from .kernels import launch
from .masks import wide_dtype

Remembered: TypeAlias = tuple[Tensor, Tensor]
"""A result, and the new memory."""

_DECAY = Range(0, 1, open_high=True)
_EPS = 1e-6  # added to deviations, as in the code of the authors of ZClip
_WIDTHS = {"adagc": 2, "zclip": 3, "skip_update": 3}


def check_average(decay: float, warmup: int) -> None:
    """Check the options of a moving average.

    Raises:
        TypeError: if `decay` is no number.
        ValueError: if `decay` or `warmup` is outside its range.
    """
    as_number("decay", decay, allowed=_DECAY)
    as_count("warmup", warmup)


def _check(decay: float, warmup: int, **bounds: Bound | None) -> None:
    """Check the arguments of a function; a bound may be missing, or in a tensor."""
    check_average(decay, warmup)
    for name, bound in bounds.items():
        if bound is not None and not isinstance(bound, Tensor):
            as_number(name, bound, allowed=POSITIVE)


def _by_kernel_or_torch(
    with_kernel: Callable[[], Remembered],
    with_torch: Callable[[], Remembered],
    norms: Tensor,
    memory: Tensor,
    *bounds: Bound | None,
) -> Remembered:
    """Return the result of a kernel, or of torch operations where no kernel can be used.

    A kernel needs tensors in float64 on a GPU, and bounds that are numbers.
    """
    has_tensors = any(isinstance(bound, Tensor) for bound in bounds)
    is_wide = norms.dtype is memory.dtype is torch.float64
    if has_tensors or not is_wide:
        return with_torch()
    if launch.takes(norms) and launch.takes(memory):
        return launch.or_else(with_kernel, with_torch)
    return with_torch()


def new_memory(name: str, number: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the memory of `adagc`, `zclip` or `skip_update` before the first norm.

    Example:
        >>> new_memory("adagc", 2)
        tensor([[0., 0.],
                [0., 0.]], dtype=torch.float64)

    Args:
        name: ``"adagc"``, ``"zclip"`` or ``"skip_update"``.
        number: the number of norms.
        device: the device of the norms.
    """
    dtype = wide_dtype(torch.device(device))
    return torch.zeros((number, _WIDTHS[name]), dtype=dtype, device=device)


def adagc(
    norms: Tensor,
    memory: Tensor,
    ratio: Bound = 1.05,
    max_norm: Bound = 1.0,
    decay: float = 0.98,
    warmup: int = 100,
) -> Remembered:
    """Return the bound of each norm: a multiple of the moving average of this norm.

    In the first `warmup` updates all gradients are scaled by one factor instead, which bounds their
    common norm by `max_norm`. The average is then the smallest norm after this scaling.

    Example:
        >>> memory = new_memory("adagc", 2)
        >>> for norms in ([0.3, 0.4], [3.0, 0.4]):
        ...     norms = torch.tensor(norms, dtype=torch.float64)
        ...     bounds, memory = adagc(norms, memory, warmup=1)
        >>> bounds
        tensor([0.3150, 0.4200], dtype=torch.float64)

    Args:
        norms: the norm of the gradient of each parameter, (N,) in float64.
        memory: the memory before this update, (N, 2); see `new_memory`.
        ratio: largest ratio of a norm to its average, a number > 0.
        max_norm: largest common norm in the first updates, a number > 0.
        decay: weight of the old average, in [0, 1).
        warmup: number of the first updates, at least 1.

    Raises:
        TypeError: if a number other than `warmup` has a wrong type.
        ValueError: if an argument is outside its range.

    Reference:
        Wang et al., 2025 (https://arxiv.org/abs/2502.11034), algorithm 1.
    """
    _check(decay, warmup, ratio=ratio, max_norm=max_norm)

    def with_kernel() -> Remembered:
        from .kernels import memory as kernels

        return kernels.adagc(norms, memory, ratio, max_norm, decay, warmup)  # type: ignore[arg-type]  # numbers

    def with_torch() -> Remembered:
        return _adagc(norms, memory, ratio, max_norm, decay, warmup)

    return _by_kernel_or_torch(with_kernel, with_torch, norms, memory, ratio, max_norm)


def _adagc(
    norms: Tensor, memory: Tensor, ratio: Bound, max_norm: Bound, decay: float, warmup: int
) -> Remembered:
    """Do the work of `adagc` in torch operations."""
    mean, number = memory.unbind(1)
    common = torch.linalg.vector_norm(norms)
    is_finite = common < math.inf  # False for NaN, too
    warms_up = number < warmup

    factor = torch.where(common > max_norm, max_norm / common, 1.0)
    factor = torch.where(is_finite, factor, 1.0)
    bounds = torch.where(warms_up, norms * factor, ratio * mean)

    clipped = torch.minimum(norms, bounds)
    smallest = torch.where(number > 0, torch.minimum(mean, clipped), clipped)
    average = decay * mean + (1 - decay) * clipped
    new_mean = torch.where(warms_up, smallest, average)
    new = torch.stack([new_mean, number + 1], dim=1)

    is_remembered = is_finite & (norms > 0)
    return bounds, torch.where(is_remembered.unsqueeze(1), new, memory)


def zclip(
    norms: Tensor,
    memory: Tensor,
    z: Bound = 2.5,
    max_norm: Bound | None = None,
    decay: float = 0.97,
    warmup: int = 25,
) -> Remembered:
    """Return the bound of each norm: Inf, or a lower bound if its z-score is above `z`.

    The z-score is the distance from the moving mean, in standard deviations. The larger it is, the
    closer is the bound to the mean. In the first `warmup` updates, `z` bounds nothing.

    Example:
        >>> memory = new_memory("zclip", 1)
        >>> for norm in (1.0, 3.0, 12.0):
        ...     norms = torch.tensor([norm], dtype=torch.float64)
        ...     bounds, memory = zclip(norms, memory, warmup=2)
        >>> bounds
        tensor([2.6250], dtype=torch.float64)

    Args:
        norms: norms of gradients, (N,) in float64.
        memory: the memory before this update, (N, 3); see `new_memory`.
        z: largest z-score, a number > 0.
        max_norm: largest norm in all updates, a number > 0; None for no such bound.
        decay: weight of the old mean and variance, in [0, 1).
        warmup: number of the first updates, at least 1.

    Raises:
        TypeError: if a number other than `warmup` has a wrong type.
        ValueError: if an argument is outside its range.

    Reference:
        Kumar et al., 2025 (https://arxiv.org/abs/2504.02507), algorithm 1.
    """
    _check(decay, warmup, z=z, max_norm=max_norm)

    def with_kernel() -> Remembered:
        from .kernels import memory as kernels

        return kernels.moving(norms, memory, z, max_norm, decay, warmup, _EPS, skips=False)  # type: ignore[arg-type]  # numbers

    def with_torch() -> Remembered:
        return _zclip(norms, memory, z, max_norm, decay, warmup)

    return _by_kernel_or_torch(with_kernel, with_torch, norms, memory, z, max_norm)


def _zclip(
    norms: Tensor, memory: Tensor, z: Bound, max_norm: Bound | None, decay: float, warmup: int
) -> Remembered:
    """Do the work of `zclip` in torch operations."""
    mean, variance, number = memory.unbind(1)
    deviation = variance.sqrt()
    score = (norms - mean) / (deviation + _EPS)

    is_high = (score > z) & (number >= warmup)
    lowered = mean + z * deviation * (z / score)
    bounds = torch.where(is_high, lowered, math.inf)
    new = _with_norms(memory, norms, bounds, decay, warmup)

    if max_norm is not None:
        bounds = bounds.clamp(max=max_norm)
    return bounds, new


def skip_update(
    norms: Tensor,
    memory: Tensor,
    max_norm: Bound | None = None,
    z: Bound | None = None,
    decay: float = 0.97,
    warmup: int = 25,
) -> Remembered:
    """Return for each norm whether to skip the update: it is above a bound, or not finite.

    The bounds are `max_norm` and, after the first `warmup` updates, the moving mean plus `z`
    standard deviations. A norm above the second bound is remembered as this bound, so that the
    mean follows norms that stay higher.

    Example:
        >>> norms = torch.tensor([1.0, 30.0, float("nan")], dtype=torch.float64)
        >>> skipped, memory = skip_update(norms, new_memory("skip_update", 3), max_norm=10.0)
        >>> skipped
        tensor([False,  True,  True])

    Args:
        norms: norms of gradients, (N,) in float64.
        memory: the memory before this update, (N, 3); see `new_memory`.
        max_norm: largest norm, a number > 0; None for no such bound.
        z: largest z-score, a number > 0; None for no such bound.
        decay: weight of the old mean and variance, in [0, 1).
        warmup: number of the first updates, at least 1.

    Raises:
        TypeError: if a number other than `warmup` has a wrong type.
        ValueError: if an argument is outside its range.
    """
    _check(decay, warmup, z=z, max_norm=max_norm)

    def with_kernel() -> Remembered:
        from .kernels import memory as kernels

        return kernels.moving(norms, memory, z, max_norm, decay, warmup, _EPS, skips=True)  # type: ignore[arg-type]  # numbers

    def with_torch() -> Remembered:
        return _skip_update(norms, memory, max_norm, z, decay, warmup)

    return _by_kernel_or_torch(with_kernel, with_torch, norms, memory, z, max_norm)


def _skip_update(
    norms: Tensor,
    memory: Tensor,
    max_norm: Bound | None,
    z: Bound | None,
    decay: float,
    warmup: int,
) -> Remembered:
    """Do the work of `skip_update` in torch operations."""
    mean, variance, number = memory.unbind(1)
    limit = torch.full_like(norms, math.inf)
    if z is not None:
        above = mean + z * (variance.sqrt() + _EPS)
        limit = torch.where(number >= warmup, above, math.inf)

    is_usual = (norms < math.inf) & (norms <= limit)
    if max_norm is not None:
        is_usual = is_usual & (norms <= max_norm)

    new = _with_norms(memory, norms, limit, decay, warmup)
    return ~is_usual, new


def _with_norms(memory: Tensor, norms: Tensor, limits: Tensor, decay: float, warmup: int) -> Tensor:
    """Return the memory with one more norm in each moving mean and variance.

    A norm above its limit counts as the limit. In the first `warmup` updates, the mean and the
    variance are exact.
    """
    is_remembered = norms < math.inf
    norms = torch.minimum(norms, limits)
    mean, variance, number = memory.unbind(1)
    count = number + 1
    warms_up = number < warmup

    weight = torch.where(warms_up, 1 / count, 1 - decay)  # the weight of the new norm
    from_old_mean = norms - mean
    new_mean = mean + weight * from_old_mean
    from_new_mean = norms - new_mean
    # Welford's algorithm in the warm-up, and the squared distance from the new mean after it
    square = torch.where(warms_up, from_old_mean, from_new_mean) * from_new_mean
    new_variance = variance + weight * (square - variance)

    new = torch.stack([new_mean, new_variance, count], dim=1)
    return torch.where(is_remembered.unsqueeze(1), new, memory)
