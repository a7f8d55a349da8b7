"""ZClip: the norm of a group is bounded where its z-score is high."""

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from torch import Tensor

from .. import functional
from ..functional.memory import Remembered, zclip
from ..registry import register
from .base import Now, Positive
from .memory import WithMemory


@register
class ZClip(WithMemory):
    """Clips the norm of a group of gradients if its z-score is high; see `functional.zclip`.

    Use it against spikes of the loss, where a fixed bound would be too high late in the training.
    The mean and the variance of the norm are moving averages. It acts once per update, so
    ``attach`` needs the optimizer. Norms that are not finite are not remembered. See Kumar et al.,
    2025 (https://arxiv.org/abs/2504.02507).

    Example:
        >>> spec = {"param:**": ZClip(2.5)}
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> attached = attach(model, spec, optimizer=optimizer)

    Args:
        z: largest z-score, a number > 0 or a schedule.
        max_norm: largest norm in all updates, a number > 0 or a schedule; None for no such bound.
        at: ``"output"``; no other value is allowed.
        index: None; no other value is allowed.
        layout: ``"auto"``; no other value is allowed.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: ``"accumulated"``; no other value is allowed.
        group: True takes one norm over all parameters of the entry; False takes one for each.
        decay: weight of the old mean and variance, in [0, 1).
        warmup: number of the first updates, at least 1, in which `z` bounds nothing. A very large
            norm among them raises the mean and the deviation, so later spikes may pass.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``score = (norm(g) - mean) / std``; if ``score > z``,
        ``g' = g * (mean + z ** 2 * std / score) / norm(g)``.
    """

    z: Positive = 2.5
    max_norm: Positive | None = None
    decay: float = field(default=0.97, kw_only=True)
    warmup: int = field(default=25, kw_only=True)
    group: bool = field(default=True, kw_only=True)
    bounds: ClassVar[Mapping[str, int]] = {"max_norm": 1}  # 1: an upper bound
    function = staticmethod(functional.zclip)

    def check(self, values: Mapping[str, float]) -> None:
        self.check_average()

    def judge(self, norms: Tensor, memory: Tensor, now: Now) -> Remembered:
        max_norm = vars(now).get("max_norm")  # a bound of None is not in it
        return zclip(norms, memory, now.z, max_norm, self.decay, self.warmup)
