"""Norms that keep their running statistics while the model trains.

The class only has the options. A `FreezeHook` of ``sites.held`` sets the mode of the norm.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from torch import Tensor, nn

from ..checks import NON_NEGATIVE, as_number
from ..quoting import with_article
from ..registry import register
from ..schedules import StepSchedule
from .base import Applied, Now, Probability, RateLike, Regularizer

_STATISTICS = ("running_mean", "running_var")


@register
class FreezeNorm(Regularizer):
    """Keeps norms with running statistics in evaluation mode, despite ``model.train()``.
    Use it to fine-tune with small batches, and late in a training.

    The norm normalizes with its running statistics and does not change them. Its ``training`` flag
    is changed during its forward only, so it is always the one that you have set. In compiled code,
    torch compiles a second training graph when the norm begins to be frozen, and keeps both.

    Example:
        >>> spec = {"type:_BatchNorm": FreezeNorm(begin=5)}

    Args:
        frozen: the norm is frozen while this is above 0, a number in [0, 1] or a schedule.
        parameters: True also freezes the weight and the bias of the norm: their ``requires_grad``
            is False while the norm is frozen. With DistributedDataParallel, attach before you wrap
            the model, and leave `begin` at 0. The wrapper waits for the gradient of each parameter
            that was trained when the model was wrapped.
        at: ``"output"``; no other value is allowed.
        index: None; no other value is allowed.
        layout: ``"auto"``; no other value is allowed.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"``; no other value is allowed.
        begin: epoch at which the norm is frozen, a number >= 0. It trains as usual before. Call
            ``attached.step(epoch)`` at the start of each epoch. `active` also counts the calls
            before `begin`, as it does for a dropout at rate 0.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed, or `frozen` is a schedule and
            `begin` is above 0.

    Equation:
        ``y = (x - running_mean) / sqrt(running_var + eps) * weight + bias``

    Reference:
        Wu and Johnson, 2021, "Rethinking 'Batch' in BatchNorm", section 3
        (https://arxiv.org/abs/2105.07576).
    """

    frozen: Probability = 1.0
    parameters: bool = False
    begin: float = field(default=0.0, kw_only=True)

    states_defaults: ClassVar[bool] = False
    unit: ClassVar[None] = None
    random: ClassVar[bool] = False
    idle_at_zero: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"frozen": 0.0}

    def check(self, values: Mapping[str, float]) -> None:
        begin = as_number("begin", self.begin, allowed=NON_NEGATIVE)
        if begin and callable(self.frozen):
            raise ValueError("a schedule and begin= both say when FreezeNorm begins: give one")
        # `check_axes` refuses `grid` and `prefix_tokens`
        given = (self.at, self.index, self.layout, self.active)
        if given != ("output", None, "auto", "train"):
            raise ValueError(
                "FreezeNorm sets the mode of a layer: it takes no at, index, layout or active"
            )

    @property
    def rates(self) -> dict[str, RateLike]:
        rates = super().rates
        # rates are read before `check` refuses a `begin` that is no number
        begins_later = isinstance(self.begin, int | float) and self.begin > 0
        if begins_later and not callable(self.frozen):
            rates["frozen"] = StepSchedule({0.0: 0.0, self.begin: self.frozen})
        return rates

    def refusal(self, module: nn.Module, parameter: nn.Parameter | None) -> str | None:
        if any(isinstance(getattr(module, name, None), Tensor) for name in _STATISTICS):
            return None
        return (
            f"{with_article(type(module).__name__)} without running statistics (running_mean) does "
            "not change in evaluation mode: select layers that have some, such as a BatchNorm2d "
            "with track_running_stats=True"
        )

    def apply(self, x: Tensor, now: Now) -> Applied:
        return x, None  # the hook sets the mode of the layer before its forward
