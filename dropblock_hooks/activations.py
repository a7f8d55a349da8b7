"""Regularizers of activations: classes hold the parameters, ``functional`` the equations.

All take the options of `Regularizer` (``at``, ``index``, ``layout``, ``active``) as keywords.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from .functional.disout import distort_blocks
from .functional.dropblock import Normalize, check_normalize, drop_blocks
from .functional.gamma import (
    Calibration,
    check_block_size,
    check_calibration,
    clipped_block,
    expected_share,
)
from .functional.masks import check_mode
from .functional.noise import add_noise, multiply_noise
from .functional.units import drop_channels, drop_residual, drop_samples, drop_shape
from .registry import register
from .regularizer import Applied, NonNegative, Now, Probability, Range, RateLike, Regularizer


@register
class Dropout(Regularizer):
    """Zeroes elements, each with chance p; see `functional.dropout`.

    Example:
        >>> Dropout(0.2, active="always")
        Dropout(p=0.2, active='always')
    """

    p: Probability = 0.5
    idle_at_zero: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_shape(x, now.p, x.shape)

    def expected_share(
        self, values: Mapping[str, float], map_size: tuple[int, ...] | None
    ) -> float | None:
        return values["p"]


@register
class Dropout1d(Regularizer):
    """Zeroes channels of sequences (N, C, L), each with chance p; see `functional.dropout1d`.

    Example:
        >>> Dropout1d(0.2, layout="NLC")
        Dropout1d(p=0.2, layout='NLC')
    """

    p: Probability = 0.5
    idle_at_zero: ClassVar[bool] = True
    spatial: ClassVar[int] = 1

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_channels(x, now.p)

    def expected_share(
        self, values: Mapping[str, float], map_size: tuple[int, ...] | None
    ) -> float | None:
        return values["p"]


@register
class Dropout2d(Regularizer):
    """Zeroes channels of feature maps (N, C, H, W), each with chance p; see `functional.dropout2d`.

    Example:
        >>> Dropout2d(0.2, layout="NHWC")
        Dropout2d(p=0.2, layout='NHWC')
    """

    p: Probability = 0.5
    idle_at_zero: ClassVar[bool] = True
    spatial: ClassVar[int] = 2

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_channels(x, now.p)

    def expected_share(
        self, values: Mapping[str, float], map_size: tuple[int, ...] | None
    ) -> float | None:
        return values["p"]


@register
class Dropout3d(Regularizer):
    """Zeroes channels of volumes (N, C, D, H, W), each with chance p; see `functional.dropout3d`.

    Example:
        >>> Dropout3d(0.2)
        Dropout3d(p=0.2)
    """

    p: Probability = 0.5
    idle_at_zero: ClassVar[bool] = True
    spatial: ClassVar[int] = 3

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_channels(x, now.p)

    def expected_share(
        self, values: Mapping[str, float], map_size: tuple[int, ...] | None
    ) -> float | None:
        return values["p"]


@dataclass(frozen=True, repr=False)
class _Blocks:
    """What acts in blocks: a share p of the map, in blocks that are clipped to it."""

    p: Probability = 0.1
    block_size: int | tuple[int, ...] = 7
    idle_at_zero: ClassVar[bool] = True
    spatial: ClassVar[int]

    def check(self, values: Mapping[str, float]) -> None:
        edges = check_block_size(self.block_size, self.spatial)
        object.__setattr__(self, "block_size", edges if len(set(edges)) > 1 else edges[0])

    def block_in_force(self, map_size: tuple[int, ...]) -> tuple[int, ...]:
        return clipped_block(map_size, check_block_size(self.block_size, self.spatial))


@dataclass(frozen=True, repr=False)
class _DropBlocks(_Blocks):
    """What DropBlock1d, 2d and 3d share: all but the number of axes."""

    calibration: Calibration = "exact"
    normalize: Normalize = "batch"
    share_channels: bool = False

    def check(self, values: Mapping[str, float]) -> None:
        super().check(values)
        check_calibration(self.calibration)
        check_normalize(self.normalize)

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_blocks(
            x,
            now.p,
            self.block_size,
            calibration=self.calibration,
            normalize=self.normalize,
            share_channels=self.share_channels,
        )

    def expected_share(
        self, values: Mapping[str, float], map_size: tuple[int, ...] | None
    ) -> float | None:
        if self.calibration == "exact":
            return values["p"]
        if map_size is None:
            return None
        return expected_share(values["p"], map_size, self.block_size, self.calibration)


@register
class DropBlock1d(_DropBlocks, Regularizer):
    """Drops runs of sequences (N, C, L); see `functional.drop_block1d`.

    Example:
        >>> DropBlock1d(p=0.1, block_size=5)
        DropBlock1d(p=0.1, block_size=5)
    """

    spatial: ClassVar[int] = 1


@register
class DropBlock2d(_DropBlocks, Regularizer):
    """Drops blocks of feature maps (N, C, H, W); see `functional.drop_block2d`.

    Example:
        >>> DropBlock2d(p=0.2, block_size=(3, 5), normalize="sample")
        DropBlock2d(p=0.2, block_size=(3, 5), normalize='sample')

    Args:
        p: share of the elements to drop, in [0, 1], on average exactly this.
        block_size: edge of the block in elements, or (height, width); larger than the map is
            clipped, and the report says so.
        calibration: ``"exact"``, or ``"paper"`` for the γ of Ghiasi et al., 2018.
        normalize: ``"batch"``, ``"sample"``, ``"expected"`` or None.
        share_channels: one mask for all channels of a sample.
    """

    spatial: ClassVar[int] = 2


@register
class DropBlock3d(_DropBlocks, Regularizer):
    """Drops blocks of volumes (N, C, D, H, W); see `functional.drop_block3d`.

    Example:
        >>> DropBlock3d(p=0.2, block_size=3)
        DropBlock3d(p=0.2, block_size=3)
    """

    spatial: ClassVar[int] = 3


@register
class Disout(_Blocks, Regularizer):
    """Distorts blocks of feature maps (N, C, H, W) by noise; see `functional.disout`.

    The realized rate is the share that is distorted. What differs from Tang et al., 2020, the
    function says.

    Example:
        >>> Disout(p=0.2, block_size=5, alpha=0.5)
        Disout(p=0.2, block_size=5, alpha=0.5)

    Args:
        p: share of the elements to distort, in [0, 1], on average exactly this.
        block_size: edge of the block in elements, or (height, width); larger than the map is
            clipped, and the report says so.
        alpha: strength of the noise, in standard deviations of the layer's tensor, at least 0.
        share_channels: the same blocks in all channels of a sample.
    """

    alpha: NonNegative = 1.0
    share_channels: bool = False
    spatial: ClassVar[int] = 2

    def apply(self, x: Tensor, now: Now) -> Applied:
        return distort_blocks(
            x, now.p, self.block_size, now.alpha, share_channels=self.share_channels
        )

    def expected_share(
        self, values: Mapping[str, float], map_size: tuple[int, ...] | None
    ) -> float | None:
        return values["p"] if values["alpha"] else 0.0


@register
class DropPath(Regularizer):
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
    idle_at_zero: ClassVar[bool] = True

    @property
    def samplewise(self) -> bool:
        return True

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_samples(x, now.p, rescale=self.scale_by_keep)

    def expected_share(
        self, values: Mapping[str, float], map_size: tuple[int, ...] | None
    ) -> float | None:
        return values["p"]


@register
class StochasticDepth(Regularizer):
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
    mode: Literal["row", "batch"] = "row"
    needs_input: ClassVar[bool] = True

    @property
    def samplewise(self) -> bool:
        return self.mode == "row"

    def check(self, values: Mapping[str, float]) -> None:
        check_mode(self.mode)
        if self.at != "output":
            raise ValueError("StochasticDepth works on the output of a block: at='output'")

    def apply(self, x: Tensor, now: Now) -> Applied:
        if not isinstance(now.input, Tensor):
            raise ValueError(
                "StochasticDepth needs the block's input as its first positional argument, got "
                f"{type(now.input).__name__}"
            )
        return drop_residual(x, now.input, now.p, self.mode)

    def expected_share(
        self, values: Mapping[str, float], map_size: tuple[int, ...] | None
    ) -> float | None:
        return values["p"]


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
    idle_at_zero: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        return multiply_noise(x, now.p), None
