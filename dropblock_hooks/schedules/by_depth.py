"""ByDepth: a rate spread over the layers of a spec entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..checks import as_number
from ..registry import register
from .base import Schedule, between, is_moving, length_of, put_numbers, span_of, value_at, within


@register
class ByDepth(Schedule):
    """Spreads a rate over the sites of its spec entry, in model order: `start` first, `stop` last.

    The ends may be schedules. ``attach`` gives each site its `share` of the way; a single site gets
    `stop`. The linear decay rule of stochastic depth (Huang et al., 2016,
    https://arxiv.org/abs/1603.09382) is ``StochasticDepth(p=ByDepth(0.0, 0.2))``.

    Example:
        >>> [ByDepth(0.0, 0.2).at(i, 3)(0) for i in range(3)]
        [0.0, 0.1, 0.2]
    """

    start: float | Schedule | Callable[[float], float]
    stop: float | Schedule | Callable[[float], float]
    share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            end = getattr(self, name)
            if isinstance(end, ByDepth):
                raise TypeError(f"{name} of ByDepth can't itself be a ByDepth")
            if not callable(end) or isinstance(end, type):
                vars(self)[name] = as_number(name, end, "a number or a schedule")
        put_numbers(self, "share")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be in [0, 1], got {self.share}")

    def at(self, i: int, n: int) -> ByDepth:
        """The schedule of site `i` of `n`."""
        return replace(self, share=i / (n - 1) if n > 1 else 1.0)

    def __call__(self, t: float) -> float:
        return between(value_at(self.start, t), value_at(self.stop, t), self.share)

    @property
    def length(self) -> float | None:
        start, stop = length_of(self.start), length_of(self.stop)
        return None if start is None or stop is None else max(start, stop)

    def within(self, epochs: int) -> ByDepth:
        return replace(self, start=within(self.start, epochs), stop=within(self.stop, epochs))

    def span(self) -> tuple[float, float]:
        low, high = zip(span_of(self.start), span_of(self.stop), strict=True)
        return min(low), max(high)

    @property
    def constant(self) -> bool:
        return not is_moving(self.start) and not is_moving(self.stop)
