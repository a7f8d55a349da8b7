"""Dropout: of elements, and of the channels of sequences, maps and volumes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..functional.dropout import drop_channels, drop_shape
from ..registry import register
from .base import Applied, Now, Regularizer
from .rates import Probability


class DropsShare:
    """What drops a share p on average, and leaves the tensor alone at p = 0."""

    idle_at_zero: ClassVar[bool] = True

    def expected_share(
        self, values: Mapping[str, float], map_size: tuple[int, ...] | None
    ) -> float | None:
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

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_shape(x, now.p, x.shape)


@dataclass(frozen=True, repr=False)
class _Channels(DropsShare):
    """What Dropout1d, 2d and 3d share: all but the number of axes."""

    p: Probability = 0.5
    linear: ClassVar[bool] = True

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
