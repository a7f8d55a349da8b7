"""What is found to be wrong: for programs, and for people."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Something that is wrong at a site; `kind` is for programs, `message` for people."""

    key: str
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


@dataclass(frozen=True)
class Alert(Finding):
    """What a `Watchdog` has found; `kind` is its rule.

    Attributes:
        layer: the name of the layer.
        epoch: the time.
        figure: what was measured; the rule says in which unit.
        cure: what likely helps.
        action: what is done about it.
    """

    layer: str = ""
    epoch: float = 0.0
    figure: float = 0.0
    cure: str = ""
    action: str | Callable[[Any], Any] = field(default="warn", repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.key}: {self.kind} in epoch {self.epoch:g}: {self.message}: {self.cure}"


class WatchdogError(RuntimeError):
    """What a `Watchdog` with ``action="raise"`` raises.

    Attributes:
        alerts: what it has found.
    """

    def __init__(self, alerts: list[Alert]) -> None:
        super().__init__("\n".join(map(str, alerts)))
        self.alerts = alerts

    def __reduce__(self) -> tuple[type, tuple[list[Alert]]]:
        return type(self), (self.alerts,)
