"""SkipUpdate: an update whose norm is too large or not finite is left out.

At the step of the optimizer, ``sites.memories`` calls `SkipUpdate.judge`.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from torch import Tensor

from .. import functional
from ..functional.memory import Remembered, skip_update
from ..registry import register
from .base import Now, Positive
from .memory import WithMemory


@register
class SkipUpdate(WithMemory):
    """Leaves out updates whose norm is above a bound, or not finite; see `functional.skip_update`.

    Use it against bad batches. To leave out an update, it sets the gradients to None before the
    optimizer's step. So the parameters and the state of the optimizer do not change. It warns at
    the first update that it leaves out, and the report has the share of these updates. It acts once
    per update, so ``attach`` needs the optimizer. Once per update, the CPU waits for the GPU.

    Example:
        >>> spec = {"param:**": SkipUpdate(max_norm=100.0, z=6.0)}
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> attached = attach(model, spec, optimizer=optimizer)

    Args:
        max_norm: largest norm, a number > 0 or a schedule; None for no such bound.
        z: largest z-score, the distance from the moving mean in standard deviations, a number > 0
            or a schedule; None for no such bound.
        at: ``"output"``; no other value is allowed.
        index: None; no other value is allowed.
        layout: ``"auto"``; no other value is allowed.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: ``"accumulated"``; no other value is allowed.
        group: True takes one norm over all parameters of the entry; False judges each parameter by
            its own norm, and leaves out only the updates of parameters whose norm is too large.
        decay: weight of the old mean and variance, in [0, 1).
        warmup: number of the first updates, at least 1, which have no z-score.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        no update if ``norm(g) > max_norm``, ``norm(g) > mean + z * std``, or ``norm(g)`` is not
        finite.
    """

    max_norm: Positive | None = None
    z: Positive | None = None
    decay: float = field(default=0.97, kw_only=True)
    warmup: int = field(default=25, kw_only=True)
    group: bool = field(default=True, kw_only=True)
    bounds: ClassVar[Mapping[str, int]] = {"max_norm": 1}  # 1: an upper bound
    clips: ClassVar[bool] = False  # it decides only whether there is an update
    function = staticmethod(functional.skip_update)

    def check(self, values: Mapping[str, float]) -> None:
        self.check_average()

    def judge(self, norms: Tensor, memory: Tensor, now: Now) -> Remembered:
        rates = vars(now)  # without the rates that are None
        max_norm = rates.get("max_norm")
        z = rates.get("z")
        return skip_update(norms, memory, max_norm, z, self.decay, self.warmup)
