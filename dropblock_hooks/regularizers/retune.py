"""Retune: another rate for a layer that already drops."""

import copy
from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from torch import Tensor

from ..functional.dropout import drop_samples
from ..registry import register
from .base import Applied, Now, Regularizer
from .dropout import DropsShare
from .rates import Probability


@register
class Retune(DropsShare, Regularizer):
    """Sets the rate, or a schedule of it, of a layer that already drops, as ``nn.Dropout`` does.

    The rate is a number in [0, 1] that the layer holds as ``p``, ``drop_prob``, ``prob``,
    ``drop_rate`` or ``drop_p``, or that an ``attr:`` selector names, such as ``nn.LSTM.dropout``.
    ``nn.Dropout``, ``nn.Dropout1d`` to ``3d`` and drop paths get the rate 0, and a hook of this
    package drops in their place: their realized rate is measured, and a schedule does not
    recompile. Other layers drop by themselves. `Attachment.remove` restores every rate.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        >>> attached = attach(model, {"type:Dropout": Retune(p=LinearSchedule(0.0, 0.4, epochs=5))})
        >>> attached.step(2)
        >>> attached.rates
        {'1/Retune': {'p': 0.2}}
        >>> attached.remove()
        >>> model[1].p
        0.5

    Args:
        p: the rate, in [0, 1].
    """

    p: Probability
    ours: Regularizer | None = field(default=None, init=False, repr=False, compare=False)

    random: ClassVar[bool] = False  # unless a hook of this package drops
    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True

    def check(self, values: Mapping[str, float]) -> None:
        if self.at != "output" or self.index is not None or self.layout != "auto":
            raise ValueError("Retune sets the rate of a layer: it takes no at, index or layout")

    def acting_as(self, ours: Regularizer | None) -> "Retune":
        """A copy that drops as this regularizer does; None for a layer that drops by itself."""
        changed = copy.copy(self)
        vars(changed).update(ours=ours, random=ours is not None)
        return changed

    def apply(self, x: Tensor, now: Now) -> Applied:
        if self.ours is None:
            return x, None
        spatial = self.ours.spatial
        if spatial in (1, 3) and x.ndim == spatial + 1:  # torch reads it as unbatched: (C, ...)
            return drop_samples(x, now.p)
        return self.ours.apply(x, now)
