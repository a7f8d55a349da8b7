"""Bounds of activations: a clamp, or a soft cap."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import Tensor

from .. import functional
from ..functional import clamping
from ..registry import is_number, register
from .base import Applied, Now, Positive, Rate, Regularizer


@register
class ClampActivation(Regularizer):
    """Clamps activations, or caps them softly; see `functional.clamp_activation`.
    Use it on logits, or on the projections of queries, keys and values, that grow too large.

    The realized rate is the share of the values beyond the bounds. By default, the bounds hold in
    training mode only. If the model needs them in evaluation mode, too, write ``active="always"``.

    Example:
        >>> spec = {"lm_head": ClampActivation(cap=30.0, active="always")}

    Args:
        min: lower bound, any number or a schedule; None for no bound. A number above 0 alone needs
            its name, ``min=``, because ``ClampActivation(30.0)`` is often meant as a cap.
        max: upper bound, any number, not below `min`, or a schedule; None for no bound.
        cap: bound of the magnitude, a number > 0 or a schedule, in place of `min` and `max`.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed, the bounds are missing or contradict each
            other, or the only argument is a number above 0 without a name.

    Equation:
        ``y = minimum(maximum(x, min), max)``, or ``y = cap * tanh(x / cap)``.

    Reference:
        Gemma Team, 2024, "Gemma 2", section 2 (https://arxiv.org/abs/2408.00118), for the cap.
    """

    min: Rate | None = None
    max: Rate | None = None
    cap: Positive | None = None

    function = staticmethod(functional.clamp_activation)
    unit: ClassVar[None] = None
    random: ClassVar[bool] = False
    traced: ClassVar[bool] = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # one number without a name is `min`, but often meant as a cap
        is_one_number = len(args) == 1 and is_number(args[0]) and not kwargs.keys() & {"max", "cap"}
        if is_one_number and args[0] > 0:
            bound = args[0]
            raise ValueError(
                f"ClampActivation({bound:g}) would set all smaller values to {bound:g}: write "
                f"cap={bound:g} for a soft bound of the magnitude, ({-bound:g}, {bound:g}) for a "
                f"clamp, or min={bound:g}"
            )
        return super().__new__(cls, *args, **kwargs)

    def check(self, values: Mapping[str, float]) -> None:
        clamping.check_bounds(values.get("min"), values.get("max"), values.get("cap"))

    def apply(self, x: Tensor, now: Now) -> Applied:
        rates = vars(now)  # a bound of None is not in it
        return clamping.clamp_counted(x, rates.get("min"), rates.get("max"), rates.get("cap"))
