"""How heavy the tails of values are: kurtosis, outliers, and channels far above the others.

`ActivationStats` calls `add_outliers` in eager forwards, and compiled code calls `add_tails`.

Moments are kept as the number of values, their mean, and the sums of the second, third and fourth
powers of their distances from this mean. So the moments of two sets of values give the moments of
their union.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import in_graph
from .kernels import launch
from .masks import wide_dtype
from .measures import CALLS, due_call, if_due, in_memory_order, nothing, recomputes
from .operators import operator

LIMIT = 6.0
"""The distance from the mean, in standard deviations, beyond which a value is an outlier."""
_CHUNK = 2**22  # values that a CPU measures together; fewer would wait for its threads more often
_ROW = 4096  # values that are added up in float32
_POWERS = (0, 1, 2, 3, 4)  # the power of the values in each of the five moments
_EQUAL = 1e-13  # the ratio of deviation and mean below which float64 can't tell values apart


class Tails(NamedTuple):
    """What is known of the values of some calls.

    Attributes:
        moments: the number of values, their mean, and the sums of the powers.
        outliers: the number of outliers.
        peaks: the largest magnitude of each channel; None if the channels are not known.
    """

    moments: Tensor
    outliers: Tensor
    peaks: Tensor | None = None


def new_outliers() -> dict[str, Tensor]:
    """Return the state of `add_outliers` before the first call."""
    return {
        "moments": torch.zeros(5, dtype=torch.float64),
        "outliers": torch.zeros((), dtype=torch.float64),
    }


def new_tails() -> Tensor:
    """Return the moments and the number of outliers of `add_tails` before the first call."""
    return torch.zeros(6, dtype=torch.float64)


def add_outliers(state: dict[str, Any], x: Tensor, mapped: Tensor | None) -> None:
    """Add the values of a call to a state, see `with_call`."""

    def with_kernels() -> None:
        from .kernels import tails  # imports Triton, which may be missing

        peaks = None
        if mapped is not None:
            peaks = _peaks_for(mapped, state.get("peaks"))
            state["peaks"] = peaks
        tails.add(x, mapped, state["moments"], state["outliers"], peaks, LIMIT)

    def with_torch() -> None:
        before = Tails(state["moments"], state["outliers"], state.get("peaks"))
        after = with_call(before, x, mapped)
        state["moments"] = after.moments
        state["outliers"] = after.outliers
        if after.peaks is not None:
            state["peaks"] = after.peaks

    if x.numel() and launch.takes(x):
        launch.or_else(with_kernels, with_torch)
    else:
        with_torch()


def _peaks_for(mapped: Tensor, before: Tensor | None) -> Tensor:
    """Return the largest magnitudes of the channels before a call.

    They are zeros in the first call, and if the number of channels has changed.
    """
    if before is not None and before.shape == mapped.shape[1:2]:
        return before
    dtype = wide_dtype(mapped.device)
    return torch.zeros(mapped.shape[1], dtype=dtype, device=mapped.device)


def with_call(before: Tails, x: Tensor, mapped: Tensor | None) -> Tails:
    """Add the values of a call. A call with NaN or Inf changes nothing.

    Args:
        before: of the calls before.
        x: the values, of any shape.
        mapped: the same as (N, C, ...); None if the channels are not known.
    """
    if not x.numel():
        return before

    flat = in_memory_order(x)
    moments = central_moments(flat)
    is_finite = moments[4] < math.inf  # the fourth powers: NaN, if a value is not finite
    combined = combined_moments(before.moments, moments)
    kept = torch.where(is_finite, combined, before.moments)
    counted = before.outliers + outlier_count(flat, moments)
    outliers = torch.where(is_finite, counted, before.outliers)

    peaks = before.peaks
    if mapped is not None:
        old = _peaks_for(mapped, peaks)
        larger = torch.maximum(old, channel_peaks(mapped))
        peaks = torch.where(is_finite, larger, old)
    return Tails(kept, outliers, peaks)


def _chunks_of(flat: Tensor) -> tuple[Tensor, ...]:
    """Return the values in parts. Elsewhere than on a CPU, one part needs fewer kernels."""
    size = _CHUNK if flat.device.type == "cpu" else flat.numel()
    chunks: tuple[Tensor, ...] = flat.split(size)  # type: ignore[no-untyped-call]  # torch's
    return chunks


def _fits_graph(
    x: Tensor,
    mapped: Tensor | None,
    state: Tensor,
    tails: Tensor,
    peaks: Tensor | None,
    **others: Any,
) -> bool:
    """Return whether AOTAutograd can trace into `add_tails`."""
    return in_graph.fits_kernels(x, mapped, state, tails, peaks)


@operator(
    "add_tails(Tensor x, Tensor? mapped, bool training, int every, Tensor state, "
    "Tensor(a!) tails, Tensor(b!)? peaks) -> ()",
    fake=nothing,
    fits_graph=_fits_graph,
)
@torch.no_grad()
def add_tails(
    x: Tensor,
    mapped: Tensor | None,
    training: bool,
    every: int,
    state: Tensor,
    tails: Tensor,
    peaks: Tensor | None,
) -> None:
    """Add the values of a call in compiled code, before `measures.add_statistics` counts it.

    Args:
        x: the values.
        mapped: the same as (N, C, ...); None if the channels are not known.
        training: the mode of the layer.
        every: each n-th call is measured.
        state: of `measures.add_statistics`.
        tails: the moments and the number of outliers; changed.
        peaks: the largest magnitude of each channel; changed.
    """

    def with_kernels() -> None:
        from .kernels import tails as kernels
        from .kernels.moments import Gate

        gate = Gate(state, training, counts=True, calls=CALLS, every=every)
        kernels.add(x, mapped, tails, None, peaks, LIMIT, gate)

    def with_torch() -> None:
        due = due_call(training, every, state)
        if due is False:
            return
        before = Tails(tails[:5], tails[5], peaks)
        after = with_call(before, x, mapped if peaks is not None else None)
        together = torch.cat((after.moments, after.outliers.reshape(1)))
        tails.copy_(if_due(due, together, tails))
        if peaks is not None and after.peaks is not None:
            peaks.copy_(if_due(due, after.peaks, peaks))

    if recomputes():  # the forward has added these values
        return
    if x.numel() and launch.takes(x):
        launch.or_else(with_kernels, with_torch)
    else:
        with_torch()


def add_tails_to(state: dict[str, Any], tails: Tensor, peaks: Tensor | None) -> None:
    """Add to a state what compiled code has counted."""
    state["moments"] = combined_moments(state["moments"], tails[:5])
    state["outliers"] = state["outliers"] + tails[5]
    if peaks is not None and tails[0] > 0:
        before: Tensor | None = state.get("peaks")
        if before is not None and before.shape == peaks.shape:
            peaks = torch.maximum(before, peaks)
        state["peaks"] = peaks


def central_moments(flat: Tensor) -> Tensor:
    """Return the moments of a row of values, in `wide_dtype`."""
    wide = wide_dtype(flat.device)
    if flat.device.type != "cpu" or flat.dtype is torch.float64:
        chunks = _chunks_of(flat)
        return union_of([moments_of_rows(chunk[None].to(wide)) for chunk in chunks])

    moments = []
    for chunk in _chunks_of(flat):
        exponent = _exponent_of(chunk)
        divisors = torch.tensor([2.0 ** (exponent * power) for power in _POWERS], dtype=wide)
        scaled = chunk.float() * 2.0**-exponent
        whole = len(scaled) // _ROW * _ROW
        full_rows = scaled[:whole].view(-1, _ROW)
        last_row = scaled[whole:].view(1, -1)
        for rows in (full_rows, last_row):
            if rows.numel():
                of_rows = moments_of_rows(rows)
                moments.append(of_rows * divisors)
    return union_of(moments)


def _exponent_of(chunk: Tensor) -> int:
    """Return the exponent of 2 of the largest magnitude.

    Powers of float32 could overflow or vanish, unless this magnitude is about 1.
    """
    low, high = torch.aminmax(chunk)
    largest = max(float(high), -float(low))
    _, exponent = math.frexp(largest)
    exponent = max(exponent, -126)
    return min(exponent, 126)


def moments_of_rows(rows: Tensor) -> Tensor:
    """Return the moments of each row, in `wide_dtype`. Powers are summed in the rows' type."""
    wide = wide_dtype(rows.device)
    center = rows.mean(1, keepdim=True)
    mean = center[:, 0].to(wide)
    count = torch.full_like(mean, rows.shape[1])
    distances = rows - center
    squares = distances.square()
    first = distances.sum(1).to(wide)
    second = squares.sum(1).to(wide)
    third = distances.mul_(squares).sum(1).to(wide)
    fourth = squares.square_().sum(1).to(wide)

    if rows.dtype is not wide:
        # the center was rounded: move the sums of powers to the mean, by the binomial expansion
        # of (distance - rest) ** n
        rest = first / count
        mean = mean + rest
        shift = rest * first
        of_second = 6 * second - 3 * shift
        of_third = 4 * third - rest * of_second
        fourth = fourth - rest * of_third
        third = third - rest * (3 * second - 2 * shift)
        second = second - shift
    return torch.stack((count, mean, second, third, fourth), 1)


def combined_moments(a: Tensor, b: Tensor) -> Tensor:
    """Return the moments of two sets of values together."""
    return union_of((a[None], b[None]))


def union_of(moments: Sequence[Tensor]) -> Tensor:
    """Return the moments of several sets of values together. Sets may be empty.

    The moments of each set are moved from its own mean to the common mean, and added.

    Args:
        moments: tensors with a row for each set.
    """
    rows = torch.cat(tuple(moments))
    if len(rows) == 1:
        return rows[0]

    counts, means, second, third, fourth = rows.unbind(1)
    count = counts.sum()
    total = (counts * means).sum()
    mean = total / count.clamp(min=1)

    step = means - mean
    of_means = counts * step.square()
    moved_second = second + of_means
    moved_third = third + step * (3 * second + of_means)
    moved_fourth = fourth + step * (4 * third + step * (6 * second + of_means))
    moved = (
        moved_second.sum(),
        moved_third.sum(),
        moved_fourth.sum(),
    )
    return torch.stack((count, mean, *moved))


def outlier_count(flat: Tensor, moments: Tensor) -> Tensor:
    """Return how many values of a row are beyond `LIMIT` standard deviations from their mean.

    It returns 0 if the mean is NaN.
    """
    mean = moments[1]
    variance = moments[2] / moments[0]
    limit = LIMIT * variance.sqrt()
    # two numbers, because float32 would round the mean
    dtype = torch.promote_types(flat.dtype, torch.float32)
    center = mean.to(dtype)
    rest = (mean - center).to(dtype)

    number = torch.zeros_like(mean)
    for chunk in _chunks_of(flat):
        if _is_within(chunk, mean, limit):
            continue
        distances = chunk.to(dtype) - center - rest
        is_beyond = distances.abs() > limit
        number = number + torch.count_nonzero(is_beyond)
    return number


def _is_within(chunk: Tensor, mean: Tensor, limit: Tensor) -> bool:
    """Return whether no value is beyond a limit. A CPU finds this quicker than it counts."""
    if chunk.device.type != "cpu":
        return False
    low, high = torch.aminmax(chunk)
    return bool(torch.maximum(high - mean, mean - low) <= limit)


def channel_peaks(x: Tensor) -> Tensor:
    """Return the largest magnitude of each channel of (N, C, ...), in `wide_dtype`."""
    others = [0, *range(2, x.ndim)]
    peaks = torch.maximum(x.amax(others), -x.amin(others))
    dtype = wide_dtype(x.device)
    return peaks.to(dtype)


def kurtosis(moments: Tensor) -> float | None:
    """Return the fourth moment over the square of the variance: 3 for normal values.

    It returns None if there are no values, if all values are equal, or if the square of the
    variance is too small or too large for float64.
    """
    count, mean, second, _, fourth = moments.tolist()
    if not count:
        return None
    variance = second / count
    square = variance * variance
    if variance <= (_EQUAL * mean) ** 2 or not 0 < square < math.inf:
        return None

    mean_fourth = fourth / count
    return float(mean_fourth / square)


def peak_ratio(peaks: Tensor) -> float | None:
    """Return the largest peak over the median of all peaks; None if the median is 0."""
    values = peaks.tolist()
    median = statistics.median(values)
    if not median:
        return None

    largest = max(values)
    return float(largest / median)
