"""``watch``: a `Watchdog` on the layers of a model, in one line."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..attach import attach
from ..attachment.attachment import Attachment
from ..observers.watchdog import Watchdog
from ..selectors.select import Select


def watch(
    model: nn.Module,
    rules: str | Sequence[str] = "all",
    action: str | Callable[[Any], Any] = "warn",
    every: int | None = 100,
    *,
    keep: int = 0,
    **options: Any,
) -> Attachment:
    """Put a `Watchdog` on all layers except torch.jit layers. It names the layer of a fault.

    In eager mode it measures some forwards only, and the others cost next to nothing; see
    `Watchdog`. Compiled code measures the same forwards.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with watch(model) as attached:
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     attached.alerts
        []

    Args:
        model: any model, wrapped or not.
        rules: the name of a rule, a list of names, or ``"all"``; see `Watchdog`.
        action: ``"warn"``, ``"raise"``, or a function of a `Finding`.
        every: look at each n-th training forward, and measure some of the others; 1 measures each
            forward. 0 or None: measure each forward, and look when an epoch or the block ends.
        keep: the number of measured calls that a finding of NaN or Inf shows, from before the
            first NaN or Inf of the layer; at least 0. With ``every=1`` the calls are consecutive.
        options: other fields of `Watchdog`, such as ``max_dead=0.5``; and ``grad_scaler`` and
            ``root`` of `attach`.

    Raises:
        ValueError: if a rule or an action does not exist, or an option is out of range.
        TypeError: if an option does not exist, or has the wrong type.
        SpecError: if the model already has a `Watchdog`.
    """
    of_attach = {name: options.pop(name) for name in ("grad_scaler", "root") if name in options}
    dog = Watchdog(rules, action=action, every=every, keep=keep, **options)  # type: ignore[arg-type]  # checked by it
    # `where` leaves out torch.jit layers, because they take no hooks
    return attach(model, {_AllLayers(where=_takes_hooks): dog}, **of_attach)


class _AllLayers(Select):
    """The selector of `watch`, which tables and messages show in words."""

    def __repr__(self) -> str:
        return "all layers"


def _takes_hooks(name: str, layer: nn.Module) -> bool:
    """Return whether hooks can be put on a layer."""
    return not isinstance(layer, torch.jit.ScriptModule)
