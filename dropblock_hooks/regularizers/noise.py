"""Gaussian noise, added or multiplied."""

from typing import Annotated, ClassVar

from torch import Tensor

from ..functional.noise import add_noise, multiply_noise
from ..registry import register
from .base import Applied, Now, Regularizer
from .rates import NonNegative, Range, RateLike


@register
class GaussianNoise(Regularizer):
    """Adds zero-mean normal noise; see `functional.gaussian_noise`.

    Example:
        >>> GaussianNoise(std=0.1, at="input")
        GaussianNoise(std=0.1, at='input')
    """

    std: NonNegative
    idle_at_zero: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        return add_noise(x, now.std), None


@register
class GaussianDropout(Regularizer):
    """Multiplies by normal noise of mean 1; see `functional.gaussian_dropout`.

    Example:
        >>> GaussianDropout(p=0.2)
        GaussianDropout(p=0.2)
    """

    p: Annotated[RateLike, Range(0, 1, open_high=True)]
    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        return multiply_noise(x, now.p), None
