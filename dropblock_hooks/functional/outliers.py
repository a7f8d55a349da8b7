"""How heavy the tails of values are: kurtosis, outliers, and channels far above the others.

Moments are kept as the number of values, their mean, and the sums of the second, third and fourth
powers of their distances from this mean. So those of two sets of values give those of their union.
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
    """The state of `add_outliers` before the first call."""
    return {
        "moments": torch.zeros(5, dtype=torch.float64),
        "outliers": torch.zeros((), dtype=torch.float64),
    }


def add_outliers(state: dict[str, Any], x: Tensor, mapped: Tensor | None) -> None:
    """Add the values of a call; one with NaN or Inf changes nothing.

    Args:
        state: the moments, the number of outliers, and the largest magnitude of each channel.
        x: the values, of any shape.
        mapped: the same as (N, C, ...); None if the channels are not known.
    """
    if not x.numel():
        return

    distances, moments = central_moments(x)
    is_finite = moments.isfinite().all()
    combined = combined_moments(state["moments"], moments)
    state["moments"] = torch.where(is_finite, combined, state["moments"])
    state["outliers"] = state["outliers"] + outlier_count(distances, moments)  # NaN is not above

    if mapped is None:
        return
    peaks = channel_peaks(mapped)
    before = state.get("peaks")
    if before is None or before.shape != peaks.shape:
        before = torch.zeros_like(peaks)
    state["peaks"] = torch.where(is_finite, torch.maximum(before, peaks), before)


def central_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The distances of the values from their mean, flat, and the moments; in float64."""
    values = x.to(wide_dtype(x.device))
    mean = values.mean()
    distances = (values - mean).flatten()
    squares = distances.square()

    count = torch.full_like(mean, x.numel())
    second = squares.sum()
    third = torch.dot(squares, distances)
    fourth = torch.dot(squares, squares)
    return distances, torch.stack((count, mean, second, third, fourth))


def combined_moments(a: Tensor, b: Tensor) -> Tensor:
    """The moments of two sets of values together. One set may be empty, but not both.

    The moments of each set are moved from its own mean to that of both, and added.
    """
    counts, means, second, third, fourth = torch.stack((a, b)).unbind(1)
    count = counts.sum()
    mean = (counts * means).sum() / count

    step = means - mean
    of_means = counts * step.square()
    moved_second = second + of_means
    moved_third = third + step * (3 * second + of_means)
    moved_fourth = fourth + step * (4 * third + step * (6 * second + of_means))
    sums = torch.stack((moved_second, moved_third, moved_fourth)).sum(1)
    return torch.cat((torch.stack((count, mean)), sums))


def outlier_count(distances: Tensor, moments: Tensor) -> Tensor:
    """The number of values beyond `LIMIT` standard deviations of their call."""
    variance = moments[2] / moments[0]
    is_beyond = distances.abs() > LIMIT * variance.sqrt()
    return is_beyond.sum()


def channel_peaks(x: Tensor) -> Tensor:
    """The largest magnitude of each channel of (N, C, ...), in float64."""
    others = [0, *range(2, x.ndim)]
    return x.abs().amax(others).to(wide_dtype(x.device))


def kurtosis(moments: Tensor) -> float | None:
    """The fourth moment over the square of the variance: 3 for normal values.

    None without values, or if they are all equal.
    """
    count, mean, second, _, fourth = moments.tolist()
    if not count:
        return None
    variance = second / count
    if variance <= (_EQUAL * mean) ** 2:
        return None
    return float(fourth / count / variance**2)


def peak_ratio(peaks: Tensor) -> float | None:
    """The largest peak over the median of all peaks; None if the median is 0."""
    values = peaks.tolist()
    median = statistics.median(values)
    if not median:
        return None
    return float(max(values) / median)
