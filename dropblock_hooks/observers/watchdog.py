"""``Watchdog``: warns of what goes wrong first.

Its sites keep numbers. ``attachment.watchdog`` judges the numbers of all sites together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

from torch import nn

from ..checks import as_count, as_number, check_option
from ..quoting import quote, shown
from ..registry import register
from .base import Observer, Seen, State
from .watched import Watched

RULES = (
    "nonfinite",
    "vanishing",
    "exploding",
    "dead",
    "saturated",
    "no_gradient",
)


@register
class Watchdog(Observer):
    """Warns of NaN, dead layers and other faults, with the layer, the epoch and the likely cure.

    Attach it to many layers, blocks and the layers inside them: then it names the layer that
    computed the first NaN or Inf. It looks at its numbers when an epoch ends (``attached.step``) or
    the ``with`` block of the attachment, at each n-th training forward (`every`), and at each n-th
    step within an epoch; for NaN and Inf also at the forwards 1, 2, 4, 8, and so on. Between two
    looks it does not wait for a device. Of several faults in one look it names the first as the
    cause, and lists the others as likely effects. The rules:

    - ``nonfinite``: NaN or Inf. In the forward, it names the layer that computed it. In the
      backward, it names the first layer that such a gradient reaches. With a GradScaler that the
      attachment knows, gradients count only once its scale has fallen below 1.
    - ``vanishing``, ``exploding``: gradients in the first quarter of the layers are smaller, or
      larger, by `max_ratio` than in the last quarter, and not zero.
    - ``dead``: channels of a ReLU, or a similar activation, were zero in all calls.
    - ``saturated``: values of a sigmoid, a tanh or their hard versions are within 1 % of their
      bounds.
    - ``no_gradient``: a layer with trained parameters gets no gradient, or only zeros, while other
      layers get gradients.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from dropblock_hooks import attach
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> found = []
        >>> attached = attach(model, {"**": Watchdog("nonfinite", action=found.append)})
        >>> nn.init.constant_(model[0].weight, float("nan"))[0, 0]
        tensor(nan, grad_fn=<SelectBackward0>)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> attached.step()
        >>> found[0].layer
        '0'

    Args:
        rules: the name of a rule or several names, or ``"all"``.
        action: ``"warn"``; ``"raise"``, a `WatchdogError`; or a function that is called with each
            `Finding`, which cannot be written to a file.
        every: look at each n-th training forward of the model, and at each n-th step within an
            epoch, at least 1; 0 or None: only when an epoch or the block ends. Forwards are not
            counted where the whole model is compiled.
        max_ratio: the largest ratio of gradients at both ends of the model, above 1.
        max_dead: the largest share of a layer's channels that may be dead, in (0, 1).
        max_saturated: the largest share of a layer's values that may be saturated, in (0, 1).
        min_calls: with fewer forwards, or gradients, only ``nonfinite`` is judged; at least 1.
        at: ``"output"``; no other value is allowed.
    """

    rules: tuple[str, ...] | str = "all"
    action: str | Callable[[Any], Any] = field(default="warn", kw_only=True)
    every: int | None = field(default=100, kw_only=True)
    max_ratio: float = field(default=1e4, kw_only=True)
    max_dead: float = field(default=0.9, kw_only=True)
    max_saturated: float = field(default=0.8, kw_only=True)
    min_calls: int = field(default=10, kw_only=True)

    channelwise: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    by_epoch: ClassVar[bool] = False
    reads_given: ClassVar[bool] = True
    needs_calls: ClassVar[bool] = False
    sees_gradients: ClassVar[bool] = True
    refused_options: ClassVar[tuple[str, ...]] = ("at",)

    def __post_init__(self) -> None:
        if isinstance(self.rules, str) and self.rules != "all":
            object.__setattr__(self, "rules", (self.rules,))
        super().__post_init__()

    @property
    def names(self) -> Sequence[str]:
        """The names of its rules."""
        return RULES if self.rules == "all" else self.rules

    def check(self, values: Mapping[str, float]) -> None:
        check_option("at", self.at, ("output",))
        super().check(values)
        if not isinstance(self.rules, Sequence) or not self.rules:
            raise TypeError(f"rules must be names of rules, got {shown(self.rules)}")
        for rule in self.names:
            check_option("rules", rule, RULES)
        if self.action not in ("warn", "raise") and not callable(self.action):
            raise ValueError(
                "action must be 'warn', 'raise' or a function of a Finding, "
                f"got {quote(self.action)}"
            )
        if self.every is not None:
            as_count("every", self.every, 0)
        as_count("min_calls", self.min_calls)
        if as_number("max_ratio", self.max_ratio) <= 1:
            raise ValueError(f"max_ratio must be above 1, got {self.max_ratio:g}")
        for name in ("max_dead", "max_saturated"):
            if not 0 < as_number(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be in (0, 1), got {getattr(self, name):g}")

    def start(self) -> State:
        return {"watched": Watched()}

    def look(self, state: State, module: nn.Module, parameter: str | None) -> None:
        state["watched"].look(module, self.names)

    def update(self, state: State, seen: Seen) -> None:
        watched: Watched = state["watched"]
        (watched.see_gradient if seen.gradient else watched.see)(seen)
