"""Dropout of elements, of channels and of samples of a residual branch; Gaussian noise."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from torch import Tensor

from ..checks import Range
from ..functional.dropout import Mode, add_noise, drop_residual, drop_units, multiply_noise
from ..registry import register
from .base import Applied, MapSize, Now, Regularizer
from .rates import NonNegative, Probability, RateLike


class DropsShare:
    """Mix-in of regularizers that drop the share p on average.

    Args:
        p: expected share of the elements to drop or distort, a number in [0, 1] or a schedule.
    """

    def expected_share(self, values: Mapping[str, float], map_size: MapSize) -> float | None:
        return values["p"]


class _DropsUnits(DropsShare):
    """Base of dropouts of elements, channels and samples.

    Equation:
        ``y = x * keep / (1 - p)``, where ``keep`` is 0 with chance p, else 1. It has one number for
        each element, channel or sample.
    """

    unit_axes: ClassVar[int | None] = None  # of `drop_units`
    scale_by_keep: bool = True
    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_units(x, now.p, self.unit_axes, rescale=self.scale_by_keep)


@register
class Dropout(_DropsUnits, Regularizer):
    """Zeroes elements, each with chance p; see `functional.dropout`.
    Use it on the outputs of linear layers. Neighbors in a feature map are correlated, so there
    `Dropout2d` or `DropBlock2d` removes more information.

    Example:
        >>> Dropout(0.2, active="always")
        Dropout(p=0.2, active='always')
    """

    p: Probability = 0.5


@register
class Dropout1d(_DropsUnits, Regularizer):
    """Zeroes channels of sequences (N, C, L), each with chance p; see `functional.dropout1d`.
    Use it for audio, text or tokens, between convolutions or blocks.

    Example:
        >>> Dropout1d(0.2, layout="NLC")
        Dropout1d(p=0.2, layout='NLC')
    """

    p: Probability = 0.5
    spatial: ClassVar[int] = 1
    unit_axes: ClassVar[int] = 2


@register
class Dropout2d(_DropsUnits, Regularizer):
    """Zeroes channels of feature maps (N, C, H, W), each with chance p; see `functional.dropout2d`.
    Use it for images, where a layer has many channels.

    Example:
        >>> Dropout2d(0.2, layout="NHWC")
        Dropout2d(p=0.2, layout='NHWC')
    """

    p: Probability = 0.5
    spatial: ClassVar[int] = 2
    unit_axes: ClassVar[int] = 2


@register
class Dropout3d(_DropsUnits, Regularizer):
    """Zeroes channels of volumes (N, C, D, H, W), each with chance p; see `functional.dropout3d`.
    Use it for video and medical scans, where a layer has many channels.

    Example:
        >>> Dropout3d(0.2)
        Dropout3d(p=0.2)
    """

    p: Probability = 0.5
    spatial: ClassVar[int] = 3
    unit_axes: ClassVar[int] = 2


@register
class DropPath(_DropsUnits, Regularizer):
    """Zeroes whole samples of a residual *branch*, each with chance p; see `functional.drop_path`.
    Use it on the last layer of a residual branch. On the output of a whole block it would set the
    residual stream to 0: there, use `StochasticDepth`.

    Example:
        >>> DropPath(p=0.1)
        DropPath(p=0.1)
    """

    p: Probability
    scale_by_keep: bool = True
    samplewise: ClassVar[bool] = True
    unit_axes: ClassVar[int] = 1


@register
class StochasticDepth(DropsShare, Regularizer):
    """Lets samples pass a residual *block* unchanged; see `functional.stochastic_depth`.
    Use it on residual blocks whose output has the shape of their input; the first forward checks
    this.

    Example:
        >>> StochasticDepth(p=0.1)
        StochasticDepth(p=0.1)

    Equation:
        ``y = x + (block(x) - x) * keep / (1 - p)``, where ``keep`` is 0 with chance p, else 1.
    """

    p: Probability
    mode: Mode = "row"
    needs_input: ClassVar[bool] = True

    def check(self, values: Mapping[str, float]) -> None:
        vars(self).update(samplewise=self.mode == "row")
        if self.at != "output":
            raise ValueError("StochasticDepth works on the output of a block: at='output'")

    def apply(self, x: Tensor, now: Now) -> Applied:
        if not isinstance(now.input, Tensor):
            needs = "StochasticDepth needs the block's input as its first positional argument"
            raise ValueError(f"{needs}, got {type(now.input).__name__}")
        return drop_residual(x, now.input, now.p, self.mode)


@register
class GaussianNoise(Regularizer):
    """Adds zero-mean normal noise; see `functional.gaussian_noise`.
    Use it at the input of a network, or on activations of a known scale, as after a norm.

    Example:
        >>> GaussianNoise(std=0.1, at="input")
        GaussianNoise(std=0.1, at='input')

    Equation:
        ``y = x + std * z``, where z is standard normal noise.
    """

    std: NonNegative
    idle_at_zero: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        return add_noise(x, now.std), None


@register
class GaussianDropout(Regularizer):
    """Multiplies by normal noise of mean 1; see `functional.gaussian_dropout`.
    Use it in place of `Dropout`, at the same layers. It has the same variance and no zeros.

    Example:
        >>> GaussianDropout(p=0.2)
        GaussianDropout(p=0.2)

    Equation:
        ``y = x * (1 + sqrt(p / (1 - p)) * z)``, where z is standard normal noise.
    """

    p: Annotated[RateLike, Range(0, 1, open_high=True)]
    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        return multiply_noise(x, now.p), None
