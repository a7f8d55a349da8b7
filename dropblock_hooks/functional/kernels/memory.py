"""Bounds of norms from those of earlier updates, on a GPU: one kernel for all norms of an entry.

The functions of `functional.memory` call these kernels. They have the same equations in torch
operations.

adagc    a multiple of the moving average of each norm
moving   a bound on the distance from the moving mean, for `zclip` and `skip_update`
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch

_SIZE = 1024  # norms of a program


@triton.jit
def _adagc_kernel(
    norms,
    memory,
    bounds,
    new,
    ratio,
    max_norm,
    number,
    warmup,
    DECAY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Each program adds up the squares of all norms, and judges its own ones."""
    squares = tl.zeros([SIZE], dtype=tl.float64)
    for first in range(0, number, SIZE):
        place = first + tl.arange(0, SIZE)
        other = tl.load(norms + place, mask=place < number, other=0.0).to(tl.float64)
        squares += other * other
    common = tl.sqrt(tl.sum(squares, axis=0))

    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    exists = at < number
    norm = tl.load(norms + at, mask=exists, other=0.0).to(tl.float64)
    mean = tl.load(memory + 2 * at, mask=exists, other=0.0)
    count = tl.load(memory + 2 * at + 1, mask=exists, other=0.0)
    warms_up = count < warmup

    # a float argument is a float32 in Triton
    most = tl.full([], max_norm, tl.float64)
    factor = tl.where(common < float("inf"), most / tl.maximum(common, most), 1.0)
    bound = tl.where(warms_up, norm * factor, mean * tl.full([], ratio, tl.float64))
    tl.store(bounds + at, bound, mask=exists)

    clipped = tl.minimum(norm, bound)
    smallest = tl.where(count > 0, tl.minimum(mean, clipped), clipped)
    average = mean * DECAY + clipped * (1 - DECAY)
    is_remembered = tl.where(common < float("inf"), norm, 0.0) > 0
    new_mean = tl.where(is_remembered, tl.where(warms_up, smallest, average), mean)
    tl.store(new + 2 * at, new_mean, mask=exists)
    tl.store(new + 2 * at + 1, count + is_remembered.to(tl.float64), mask=exists)


@triton.jit
def _moving_kernel(
    norms,
    memory,
    result,
    new,
    z,
    max_norm,
    number,
    warmup,
    DECAY: tl.constexpr,
    EPS: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_MAX: tl.constexpr,
    SKIPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write the new memory and the bounds, or with SKIPS which updates to skip."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    exists = at < number
    norm = tl.load(norms + at, mask=exists, other=0.0).to(tl.float64)
    mean = tl.load(memory + 3 * at, mask=exists, other=0.0)
    variance = tl.load(memory + 3 * at + 1, mask=exists, other=0.0)
    count = tl.load(memory + 3 * at + 2, mask=exists, other=0.0)
    warms_up = count < warmup

    most_z = tl.full([], z, tl.float64)
    most = tl.full([], max_norm, tl.float64)
    deviation = tl.sqrt(variance)
    limit = tl.full([SIZE], float("inf"), tl.float64)
    if SKIPS:
        if HAS_Z:
            limit = tl.where(warms_up, limit, mean + most_z * (deviation + EPS))
        usual = (norm < float("inf")) & (norm <= limit)
        if HAS_MAX:
            usual = usual & (norm <= most)
        tl.store(result + at, (usual == 0).to(tl.int8), mask=exists)
    else:
        score = (norm - mean) / (deviation + EPS)
        is_high = (score > most_z) & (warms_up == 0)
        divisor = tl.where(is_high, score, 1.0)  # 1 where the quotient is not used
        limit = tl.where(is_high, mean + most_z * deviation * (most_z / divisor), limit)
        bound = limit
        if HAS_MAX:
            bound = tl.minimum(limit, most)
        tl.store(result + at, bound, mask=exists)

    is_remembered = norm < float("inf")
    value = tl.where(is_remembered, tl.minimum(norm, limit), mean)
    weight = tl.where(warms_up, 1 / (count + 1), 1 - DECAY)
    from_old_mean = value - mean
    new_mean = mean + weight * from_old_mean
    from_new_mean = value - new_mean
    square = tl.where(warms_up, from_old_mean, from_new_mean) * from_new_mean
    new_variance = variance + weight * (square - variance)

    tl.store(new + 3 * at, tl.where(is_remembered, new_mean, mean), mask=exists)
    tl.store(new + 3 * at + 1, tl.where(is_remembered, new_variance, variance), mask=exists)
    tl.store(new + 3 * at + 2, count + is_remembered.to(tl.float64), mask=exists)


def adagc(
    norms: Tensor, memory: Tensor, ratio: float, max_norm: float, decay: float, warmup: int
) -> tuple[Tensor, Tensor]:
    """The bounds and the new memory of `functional.adagc`."""
    norms = norms.contiguous()
    memory = memory.contiguous()
    bounds = torch.empty_like(norms)
    new = torch.empty_like(memory)
    launch.start(
        _adagc_kernel,
        launch.parts(len(norms), _SIZE),
        norms.device,
        norms,
        memory,
        bounds,
        new,
        float(ratio),
        float(max_norm),
        len(norms),
        warmup,
        DECAY=decay,
        SIZE=_SIZE,
    )
    return bounds, new


def moving(
    norms: Tensor,
    memory: Tensor,
    z: float | None,
    max_norm: float | None,
    decay: float,
    warmup: int,
    eps: float,
    skips: bool,
) -> tuple[Tensor, Tensor]:
    """The result and the new memory of `functional.zclip`, or with `skips` of `skip_update`."""
    norms = norms.contiguous()
    memory = memory.contiguous()
    result = torch.empty_like(norms, dtype=torch.bool if skips else norms.dtype)
    new = torch.empty_like(memory)
    launch.start(
        _moving_kernel,
        launch.parts(len(norms), _SIZE),
        norms.device,
        norms,
        memory,
        result.view(torch.int8) if skips else result,  # the kernel stores int8
        new,
        1.0 if z is None else float(z),  # not read if it is None; see HAS_Z and HAS_MAX
        1.0 if max_norm is None else float(max_norm),
        len(norms),
        warmup,
        DECAY=decay,
        EPS=eps,
        HAS_Z=z is not None,
        HAS_MAX=max_norm is not None,
        SKIPS=skips,
        SIZE=_SIZE,
    )
    return result, new
