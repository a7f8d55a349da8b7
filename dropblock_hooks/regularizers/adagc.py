"""AdaGC: the norm of each gradient is bounded by a multiple of its own moving average."""

from collections.abc import Mapping
from dataclasses import field

from torch import Tensor

from .. import functional
from ..functional.memory import Remembered, adagc
from ..registry import register
from .base import Now, Positive
from .memory import WithMemory


@register
class AdaGC(WithMemory):
    """Bounds the norm of each gradient by a multiple of its moving average; see `functional.adagc`.

    Use it against spikes of the loss in long trainings. Each parameter gets its own bound.
    In the first `warmup` updates it clips the norm over all parameters of the entry to `max_norm`.
    If the norms of your model are much larger than ``max_norm=1.0``, the default, these updates
    become small: pass a larger `max_norm`. It acts once per update, so ``attach`` needs the
    optimizer. Norms of 0, and updates with Inf or NaN, are not remembered. The `warmup` updates are
    counted for each parameter, from its first gradient that is not 0. See Wang et al., 2025
    (https://arxiv.org/abs/2502.11034).

    Example:
        >>> spec = {"param:**": AdaGC(1.05)}
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> attached = attach(model, spec, optimizer=optimizer)

    Args:
        ratio: largest ratio of a norm to its average, a number > 0 or a schedule.
        max_norm: largest norm over all parameters in the first `warmup` updates, a number > 0 or a
            schedule.
        at: ``"output"``; no other value is allowed.
        index: None; no other value is allowed.
        layout: ``"auto"``; no other value is allowed.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: ``"accumulated"``; no other value is allowed.
        group: True takes one norm over all parameters of the entry, with one average.
        decay: weight of the old average, in [0, 1).
        warmup: number of the first updates, at least 1.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``g' = g * minimum(1, ratio * mean / norm(g))``,
        ``mean' = decay * mean + (1 - decay) * norm(g')``; in the first updates
        ``g' = g * minimum(1, max_norm / common norm)``, ``mean' = minimum(mean, norm(g'))``.
    """

    ratio: Positive = 1.05
    max_norm: Positive = 1.0
    decay: float = field(default=0.98, kw_only=True)
    warmup: int = field(default=100, kw_only=True)
    function = staticmethod(functional.adagc)

    def check(self, values: Mapping[str, float]) -> None:
        self.check_average()

    def judge(self, norms: Tensor, memory: Tensor, now: Now) -> Remembered:
        return adagc(norms, memory, now.ratio, now.max_norm, self.decay, self.warmup)
