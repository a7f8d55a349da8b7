"""How heavy the tails of values are: kurtosis, outliers, and channels far above the others.

Moments are kept as the number of values, their mean, and the sums of the second, third and fourth
powers of their distances from this mean. So the moments of two sets of values give the moments of
their union.
"""

import math
import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import in_graph
from .masks import wide_dtype
from .measures import due_call, if_due, nothing
from .operators import operator

LIMIT = 6.0
"""The distance from the mean, in standard deviations, beyond which a value is an outlier."""
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
    """The moments and the number of outliers of `add_tails` before the first call."""
    return torch.zeros(6, dtype=torch.float64)


def add_outliers(state: dict[str, Any], x: Tensor, mapped: Tensor | None) -> None:
    """Add the values of a call to a state, see `with_call`."""
    before = Tails(state["moments"], state["outliers"], state.get("peaks"))
    after = with_call(before, x, mapped)
    state["moments"] = after.moments
    state["outliers"] = after.outliers
    if after.peaks is not None:
        state["peaks"] = after.peaks


def with_call(before: Tails, x: Tensor, mapped: Tensor | None) -> Tails:
    """Add the values of a call. A call with NaN or Inf changes nothing.

    Args:
        before: of the calls before.
        x: the values, of any shape.
        mapped: the same as (N, C, ...); None if the channels are not known.
    """
    if not x.numel():
        return before

    distances, moments = central_moments(x)
    is_finite = moments[4] < math.inf  # the fourth powers: NaN, if a value is not finite
    combined = combined_moments(before.moments, moments)
    kept = torch.where(is_finite, combined, before.moments)
    outliers = before.outliers + outlier_count(distances, moments)  # 0 if there is NaN or Inf

    peaks = before.peaks
    if mapped is not None:
        peaks = _with_peaks(peaks, mapped, is_finite)
    return Tails(kept, outliers, peaks)


def _with_peaks(before: Tensor | None, mapped: Tensor, is_finite: Tensor) -> Tensor:
    """The largest magnitudes of the channels, with those of a call."""
    peaks = channel_peaks(mapped)
    if before is None or before.shape != peaks.shape:
        before = torch.zeros_like(peaks)
    larger = torch.maximum(before, peaks)
    return torch.where(is_finite, larger, before)


def _fits_graph(
    x: Tensor,
    mapped: Tensor | None,
    state: Tensor,
    tails: Tensor,
    peaks: Tensor | None,
    **others: Any,
) -> bool:
    """Whether AOTAutograd can trace into `add_tails`."""
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
    due = due_call(training, every, state)
    if due is False:
        return
    before = Tails(tails[:5], tails[5], peaks)
    after = with_call(before, x, mapped if peaks is not None else None)
    together = torch.cat((after.moments, after.outliers.reshape(1)))
    tails.copy_(if_due(due, together, tails))
    if peaks is not None and after.peaks is not None:
        peaks.copy_(if_due(due, after.peaks, peaks))


def add_tails_to(state: dict[str, Any], tails: Tensor, peaks: Tensor | None) -> None:
    """Add to a state what compiled code has counted."""
    state["moments"] = combined_moments(state["moments"], tails[:5])
    state["outliers"] = state["outliers"] + tails[5]
    if peaks is not None and tails[0] > 0:
        before: Tensor | None = state.get("peaks")
        if before is not None and before.shape == peaks.shape:
            peaks = torch.maximum(before, peaks)
        state["peaks"] = peaks


def central_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distances of the values from their mean, flat, and the moments; in float64."""
    dtype = wide_dtype(x.device)
    values = x.to(dtype)
    mean = values.mean()
    distances = values - mean
    distances = distances.flatten()

    count = torch.full_like(mean, x.numel())
    squares = distances.square()
    second = squares.sum()
    third = torch.dot(squares, distances)
    fourth = torch.dot(squares, squares)
    return distances, torch.stack((count, mean, second, third, fourth))


def combined_moments(a: Tensor, b: Tensor) -> Tensor:
    """Return the moments of two sets of values together. One set may be empty, but not both.

    The moments of each set are moved from its own mean to the common mean, and added.
    """
    both = torch.stack((a, b))
    counts, means, second, third, fourth = both.unbind(1)
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


def outlier_count(distances: Tensor, moments: Tensor) -> Tensor:
    """Return the number of values beyond `LIMIT` standard deviations of their call."""
    variance = moments[2] / moments[0]
    limit = LIMIT * variance.sqrt()
    is_beyond = distances.abs() > limit
    return is_beyond.sum()


def channel_peaks(x: Tensor) -> Tensor:
    """Return the largest magnitude of each channel of (N, C, ...), in float64."""
    others = [0, *range(2, x.ndim)]
    peaks = x.abs().amax(others)
    dtype = wide_dtype(x.device)
    return peaks.to(dtype)


def kurtosis(moments: Tensor) -> float | None:
    """Return the fourth moment over the square of the variance: 3 for normal values.

    It returns None if there are no values, or if all values are equal.
    """
    count, mean, second, _, fourth = moments.tolist()
    if not count:
        return None
    variance = second / count
    if variance <= (_EQUAL * mean) ** 2:
        return None

    mean_fourth = fourth / count
    return float(mean_fourth / variance**2)


def peak_ratio(peaks: Tensor) -> float | None:
    """Return the largest peak over the median of all peaks; None if the median is 0."""
    values = peaks.tolist()
    median = statistics.median(values)
    if not median:
        return None

    largest = max(values)
    return float(largest / median)
