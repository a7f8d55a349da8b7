"""Disout: blocks of the map that are distorted."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from ..functional.disout import distort_blocks
from ..registry import register
from .base import Applied, Now, Regularizer
from .dropblock import Blocks
from .rates import NonNegative


@register
class Disout(Blocks, Regularizer):
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
        return distort_blocks(x, now.p, self.edges, now.alpha, share_channels=self.share_channels)

    def expected_share(
        self, values: Mapping[str, float], map_size: tuple[int, ...] | None
    ) -> float | None:
        return values["p"] if values["alpha"] else 0.0
