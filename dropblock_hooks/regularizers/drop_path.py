"""DropPath and StochasticDepth: whole samples of a residual branch."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from ..functional.dropout import Mode, drop_residual, drop_samples
from ..registry import register
from .base import Applied, Now, Regularizer
from .dropout import DropsShare
from .rates import Probability


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
    idle_at_zero: ClassVar[bool] = False  # the shapes of block and input are compared

    @property
    def samplewise(self) -> bool:  # type: ignore[override]  # a constant elsewhere
        return self.mode == "row"

    def check(self, values: Mapping[str, float]) -> None:
        if self.at != "output":
            raise ValueError("StochasticDepth works on the output of a block: at='output'")

    def apply(self, x: Tensor, now: Now) -> Applied:
        if not isinstance(now.input, Tensor):
            raise ValueError(
                "StochasticDepth needs the block's input as its first positional argument, got "
                f"{type(now.input).__name__}"
            )
        return drop_residual(x, now.input, now.p, self.mode)
