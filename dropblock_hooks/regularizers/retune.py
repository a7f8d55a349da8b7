"""Retune: another rate for a layer that drops by itself."""

import copy
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

from torch import Tensor, nn

from ..registry import register
from .base import Applied, Now, Regularizer
from .dropout import DropsShare
from .droppers import Drop, zeroed
from .rates import Probability


@register
class Retune(DropsShare, Regularizer):
    """Another rate, or a schedule, for a layer that drops by itself: ``nn.Dropout``, a DropPath.

    Any layer with a number in [0, 1] as ``p``, ``drop_prob``, ``prob``, ``drop_rate`` or ``drop_p``
    can be retuned, and, by ``attr:`` selectors, rates that modules hold themselves, as
    ``nn.LSTM.dropout``. Where ours is
    the layer's own function (torch's dropouts, drop paths), the layer's rate is 0 from its first
    call on and ours acts in its place: a schedule compiles once, and counts are exact. Other layers
    go on by themselves at the rate that is set. `Attachment.remove` puts every rate back.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        >>> attached = attach(model, {"type:Dropout": Retune(p=LinearSchedule(0.0, 0.4, epochs=5))})
        >>> attached.step(2)
        >>> model[1].p
        0.2
        >>> attached.remove()
        >>> model[1].p
        0.5

    Args:
        p: the rate, in [0, 1].
    """

    p: Probability
    function: Drop | None = field(default=None, init=False, repr=False, compare=False)

    refused_options: ClassVar[tuple[str, ...]] = (
        "at",
        "index",
        "layout",
        "grid",
        "prefix_tokens",
    )
    """Options of all regularizers that mean nothing here."""

    def check(self, values: Mapping[str, float]) -> None:
        if self.at != "output" or self.index is not None or self.layout != "auto":
            raise ValueError("Retune sets a layer's own rate: it takes no at, index or layout")

    def acting_by(self, function: Drop | None) -> "Retune":
        """For a layer of which this is the function; None for one that acts by itself."""
        changed = copy.copy(self)
        object.__setattr__(changed, "function", function)
        return changed

    def with_rates(self, **rates: Any) -> "Retune":
        changed = super().with_rates(**rates)
        assert isinstance(changed, Retune)
        return changed.acting_by(self.function)

    @property
    def random(self) -> bool:  # type: ignore[override]  # a constant elsewhere
        """Whether ours draws the numbers."""
        return self.function is not None

    @property
    def traceable(self) -> bool:  # type: ignore[override]  # a constant elsewhere
        return not isinstance(self.function, Twin)

    def apply(self, x: Tensor, now: Now) -> Applied:
        if self.function is not None:
            return self.function(x, now.p)
        given = now.input  # the layer has done it: what it has zeroed is counted
        if not isinstance(given, Tensor) or given.shape != x.shape:
            return x, None
        return x, 0 if given is x else zeroed(given.detach() != 0, x)


class Twin:
    """A copy of a layer that drops, to act where an ``nn.Identity`` stands for another one."""

    def __init__(self, layer: nn.Module, attribute: str) -> None:
        self.layer, self.attribute = copy.deepcopy(layer), attribute
        self.layer._forward_hooks.clear()
        self.layer._forward_pre_hooks.clear()

    def __call__(self, x: Tensor, p: Any) -> tuple[Tensor, Tensor | int]:
        """The tensor as the layer gives it at this rate, and how many elements it has zeroed."""
        setattr(self.layer.train(), self.attribute, float(p))
        nonzero = x.detach() != 0
        y = self.layer(x)
        return y, zeroed(nonzero, y)
