"""Bounds of activations: a clamp, or a soft cap.

y = min(max(x, lower bound), upper bound)   clamp
y = cap * tanh(x / cap)                     soft cap
"""

from typing import Any

import torch
from torch import Tensor

from ..checks import POSITIVE, as_number, check_floating
from .gradients import Bound, fit


def check_bounds(min: float | None, max: float | None, cap: float | None) -> None:
    """Check the bounds of activations.

    Raises:
        ValueError: if all bounds are missing, `cap` comes with another one, or `min` is above
            `max`.
    """
    is_clamp = min is not None or max is not None
    if is_clamp == (cap is not None):
        raise ValueError("give min, max or both; or cap alone")
    if min is not None and max is not None and min > max:
        raise ValueError(f"min must be <= max, got min={min:g}, max={max:g}")


def clamp_counted(
    x: Tensor, min: Bound | None, max: Bound | None, cap: Bound | None
) -> tuple[Tensor, Tensor]:
    """Bound an activation; return it, and the number of values beyond the bounds.

    Compiled code passes bounds as tensors, so that one graph serves all bounds.
    """
    if cap is None:
        low = fit(min, x.dtype)
        high = fit(max, x.dtype)
        y = x.clamp(low, high).to(x.dtype)  # a bound in a tensor may have changed the dtype
        return y, _number_beyond(x, low, high)

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = torch.tanh(wide / cap) * cap
    return y.to(x.dtype), (wide.abs() > cap).sum()


def _number_beyond(x: Tensor, low: Any, high: Any) -> Tensor:
    """Return the number of values below `low` or above `high`. A bound may be None.

    NaN is not counted.
    """
    if low is None:
        beyond = x > high
    elif high is None:
        beyond = x < low
    else:
        beyond = (x < low) | (x > high)
    number: Tensor = beyond.sum()
    return number


def clamp_activation(
    input: Tensor,
    min: float | None = None,
    max: float | None = None,
    *,
    cap: float | None = None,
) -> Tensor:
    """Clamps each value to [min, max], or caps it softly: ``cap * tanh(input / cap)``.

    NaN passes. A clamped value gets no gradient. A capped value gets the gradient of the tanh.

    Example:
        >>> clamp_activation(torch.tensor([-8.0, 0.5, 8.0]), -6.0, 6.0)
        tensor([-6.0000,  0.5000,  6.0000])
        >>> clamp_activation(torch.tensor([0.0, 10.0, 1000.0]), cap=30.0)
        tensor([ 0.0000,  9.6454, 30.0000])

    Args:
        input: floating-point tensor of any shape.
        min: lower bound, any number; None for no bound.
        max: upper bound, any number, not below `min`; None for no bound.
        cap: bound of the magnitude, above 0, in place of `min` and `max`.

    Raises:
        TypeError: if `input` is no floating-point tensor, or a rate is no number.
        ValueError: if an argument is outside its range, or the bounds are missing or contradict
            each other.

    Reference:
        Gemma Team, 2024, "Gemma 2", section 2 (https://arxiv.org/abs/2408.00118), for the cap.
    """
    check_floating(input)
    low = None if min is None else as_number("min", min)
    high = None if max is None else as_number("max", max)
    bound = None if cap is None else as_number("cap", cap, allowed=POSITIVE)
    check_bounds(low, high, bound)
    return clamp_counted(input, low, high, bound)[0]
