"""Dropout of elements, of channels and of samples of a residual branch; Gaussian noise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from ..checks import Range
from ..functional.dropout import Mode, drop_channels, drop_residual, drop_samples, drop_shape
from ..functional.noise import add_noise, multiply_noise
from ..registry import register
from .base import Applied, MapSize, Now, Regularizer
from .rates import NonNegative, Probability, RateLike


class DropsShare:
    """Mix-in of regularizers that drop the share p on average."""

    def expected_share(self, values: Mapping[str, float], map_size: MapSize) -> float | None:
        return values["p"]


@register
class Dropout(DropsShare, Regularizer):
    """Zeroes elements, each with chance p; see `functional.dropout`.

    Example:
        >>> Dropout(0.2, active="always")
        Dropout(p=0.2, active='always')
    """

    p: Probability = 0.5
    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_shape(x, now.p, x.shape)


@dataclass(frozen=True, repr=False)
class _Channels(DropsShare):
    """Base of Dropout1d, 2d and 3d."""

    p: Probability = 0.5
    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_channels(x, now.p)


@register
class Dropout1d(_Channels, Regularizer):
    """Zeroes channels of sequences (N, C, L), each with chance p; see `functional.dropout1d`.

    Example:
        >>> Dropout1d(0.2, layout="NLC")
        Dropout1d(p=0.2, layout='NLC')
    """

    spatial: ClassVar[int] = 1


@register
class Dropout2d(_Channels, Regularizer):
    """Zeroes channels of feature maps (N, C, H, W), each with chance p; see `functional.dropout2d`.

    Example:
        >>> Dropout2d(0.2, layout="NHWC")
        Dropout2d(p=0.2, layout='NHWC')
    """

    spatial: ClassVar[int] = 2


@register
class Dropout3d(_Channels, Regularizer):
    """Zeroes channels of volumes (N, C, D, H, W), each with chance p; see `functional.dropout3d`.

    Example:
        >>> Dropout3d(0.2)
        Dropout3d(p=0.2)
    """

    spatial: ClassVar[int] = 3


@register
class DropPath(DropsShare, Regularizer):
    """Zeroes whole samples of a residual *branch*, each with chance p; see `functional.drop_path`.

    On the output of a whole block it would wipe the residual stream: there, use `StochasticDepth`.

    Example:
        >>> DropPath(p=0.1)
        DropPath(p=0.1)

    Args:
        p: chance of a sample to be dropped, in [0, 1].
        scale_by_keep: multiply the kept samples by 1 / (1 - p).
    """

    p: Probability
    scale_by_keep: bool = True
    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True
    samplewise: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_samples(x, now.p, rescale=self.scale_by_keep)


@register
class StochasticDepth(DropsShare, Regularizer):
    """Lets samples pass a residual *block* unchanged, each with chance p.

    ``input + drop(output - input)``; see `functional.stochastic_depth`. The block must keep its
    shape, which the first forward shows.

    Example:
        >>> StochasticDepth(p=0.1)
        StochasticDepth(p=0.1)

    Args:
        p: chance of a sample to skip the block, in [0, 1].
        mode: ``"row"`` decides for each sample, ``"batch"`` for all at once.
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
            raise ValueError(
                "StochasticDepth needs the block's input as its first positional argument, got "
                f"{type(now.input).__name__}"
            )
        return drop_residual(x, now.input, now.p, self.mode)


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
