"""DropBlock and Disout: blocks of the map that are dropped or distorted together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..checks import check_block_size
from ..functional.dropblock import (
    Calibration,
    Normalize,
    distort_blocks,
    drop_blocks,
    expected_share,
)
from ..registry import register
from .base import Applied, MapSize, Now, Regularizer
from .dropout import DropsShare
from .rates import NonNegative, Probability


@dataclass(frozen=True, repr=False)
class _Blocks(DropsShare):
    p: Probability = 0.1
    block_size: int | tuple[int, ...] = 7
    spatial: ClassVar[int]
    edges: ClassVar[tuple[int, ...]]  # of each object: the edges of its block

    def check(self, values: Mapping[str, float]) -> None:
        edges = check_block_size(self.block_size, self.spatial)
        block_size = edges if len(set(edges)) > 1 else edges[0]
        vars(self).update(block_size=block_size, edges=edges)

    def block_in_force(self, map_size: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(min, map_size, self.edges))


@dataclass(frozen=True, repr=False)
class _DropBlocks(_Blocks):
    """Base of DropBlock1d, 2d and 3d.

    Equation:
        ``y = x * keep * scale``, where ``keep`` is 0 in the blocks and 1 elsewhere. A block begins
        with chance γ at each position where it fits; see `functional.block_gamma`.
    """

    calibration: Calibration = "exact"
    normalize: Normalize = "batch"
    share_channels: bool = False
    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        options = (self.calibration, self.normalize, self.share_channels)
        return drop_blocks(x, now.p, self.edges, *options)

    def expected_share(self, values: Mapping[str, float], map_size: MapSize) -> float | None:
        return expected_share(values["p"], map_size, self.edges, self.calibration)


@register
class DropBlock1d(_DropBlocks, Regularizer):
    """Drops runs of sequences (N, C, L); see `functional.drop_block1d`.
    Use it for audio, text or signals, after convolutions over time.

    Example:
        >>> DropBlock1d(p=0.1, block_size=5)
        DropBlock1d(p=0.1, block_size=5)
    """

    spatial: ClassVar[int] = 1


@register
class DropBlock2d(_DropBlocks, Regularizer):
    """Drops blocks of feature maps (N, C, H, W); see `functional.drop_block2d`.
    Use it for images, at the outputs of the last two stages of a network. Its blocks should be
    smaller than the map: on a map of 7×7, a block of 7 drops whole channels.

    Example:
        >>> DropBlock2d(p=0.2, block_size=(3, 5), normalize="sample")
        DropBlock2d(p=0.2, block_size=(3, 5), normalize='sample')
    """

    spatial: ClassVar[int] = 2


@register
class DropBlock3d(_DropBlocks, Regularizer):
    """Drops blocks of volumes (N, C, D, H, W); see `functional.drop_block3d`.
    Use it for video and medical scans, at the outputs of the last stages.

    Example:
        >>> DropBlock3d(p=0.2, block_size=3)
        DropBlock3d(p=0.2, block_size=3)
    """

    spatial: ClassVar[int] = 3


@register
class Disout(_Blocks, Regularizer):
    """Distorts blocks of feature maps (N, C, H, W) by noise; see `functional.disout`.
    The realized rate is the share that is distorted. Use it in place of `DropBlock2d`, at the
    same layers, if zeros harm the training.

    Example:
        >>> Disout(p=0.2, block_size=5, alpha=0.5)
        Disout(p=0.2, block_size=5, alpha=0.5)

    Equation:
        ``y = x + m * alpha * std(x) * z`` with standard normal z; m is 1 in blocks, else 0.
    """

    alpha: NonNegative = 1.0
    share_channels: bool = False
    spatial: ClassVar[int] = 2
    idle_at_zero: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        return distort_blocks(x, now.p, self.edges, now.alpha, share_channels=self.share_channels)

    def expected_share(self, values: Mapping[str, float], map_size: MapSize) -> float | None:
        return values["p"] if values["alpha"] else 0.0
