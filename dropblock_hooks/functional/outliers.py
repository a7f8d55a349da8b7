"""How heavy the tails of values are: kurtosis, outliers, and channels far above the others.

Moments are kept as the number of values, their mean, and the sums of the second, third and fourth
powers of their distances from this mean. So the moments of two sets of values give the moments of
their union.
"""

import statistics
from typing import Any

import torch
from torch import Tensor

from .masks import wide_dtype

LIMIT = 6.0
"""The distance from the mean, in standard deviations, beyond which a value is an outlier."""
_EQUAL = 1e-13  # the ratio of deviation and mean below which float64 can't tell values apart


def new_outliers() -> dict[str, Tensor]:
    """Return the state of `add_outliers` before the first call."""
    return {
        "moments": torch.zeros(5, dtype=torch.float64),
        "outliers": torch.zeros((), dtype=torch.float64),
    }


def add_outliers(state: dict[str, Any], x: Tensor, mapped: Tensor | None) -> None:
    """Add the values of a call; a call with NaN or Inf changes nothing.

    Args:
        state: the moments, the number of outliers, and the largest magnitude of each channel.
        x: the values, of any shape.
        mapped: the same as (N, C, ...); None if the channels are not known.
    """
    if not x.numel():
        return

    distances, moments = central_moments(x)
    is_finite = moments.isfinite().all()

    before = state["moments"]
    combined = combined_moments(before, moments)
    state["moments"] = torch.where(is_finite, combined, before)
    state["outliers"] += outlier_count(distances, moments)  # 0 if there is NaN or Inf

    if mapped is not None:
        _add_peaks(state, mapped, is_finite)


def _add_peaks(state: dict[str, Any], mapped: Tensor, is_finite: Tensor) -> None:
    """Add the largest magnitudes of the channels of a call."""
    peaks = channel_peaks(mapped)
    before = state.get("peaks")
    if before is None or before.shape != peaks.shape:
        before = torch.zeros_like(peaks)

    larger = torch.maximum(before, peaks)
    state["peaks"] = torch.where(is_finite, larger, before)


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
    mean = total / count

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
