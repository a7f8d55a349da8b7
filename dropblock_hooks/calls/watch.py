"""``watch``: a `Watchdog` on the layers of a model, in one line."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ..attach import attach
from ..attachment.attachment import Attachment
from ..checks import closest
from ..observers.watchdog import Watchdog
from ..quoting import label
from ..selectors.select import Select

_OF_ATTACH = ("grad_scaler", "root")
_OWN = ("rules", "action", "every", *Watchdog.refused_options)
_OF_WATCHDOG = tuple(each.name for each in fields(Watchdog) if each.name not in _OWN)


def watch(
    model: nn.Module,
    rules: str | Sequence[str] = "all",
    action: str | Callable[[Any], Any] = "warn",
    every: int | None = 100,
    **options: Any,
) -> Attachment:
    """Put a `Watchdog` on all layers: it warns of the first fault and names the layer.

    Layers of torch.jit are left out.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with watch(model) as attached:
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     attached.step()
        ...     attached.verify()
        []

    Args:
        model: any model, wrapped or not.
        rules: the name of a rule, a list of names, or ``"all"``; see `Watchdog`.
        action: ``"warn"``, ``"raise"``, or a function of a `Finding`.
        every: check at every so many training forwards; 0 or None: only when an epoch ends.
        options: other fields of `Watchdog`, such as ``max_dead=0.5``, and the arguments
            ``grad_scaler`` and ``root`` of `attach`.

    Raises:
        TypeError, ValueError: if a rule, an action or an option does not exist.
        SpecError: if the model has a `Watchdog` already.
    """
    arguments = {name: options.pop(name) for name in _OF_ATTACH if name in options}
    known = (*_OF_ATTACH, *_OF_WATCHDOG)
    for name in options:
        if name not in _OF_WATCHDOG:
            raise TypeError(
                f"watch takes no {label(name)}{closest(name, known)}; its options: "
                f"{', '.join(known)}"
            )
    dog = Watchdog(rules, action=action, every=every, **options)  # type: ignore[arg-type]  # checked
    # a layer that a function selects need not be called
    return attach(model, {Select(where=_takes_hooks): dog}, **arguments)


def _takes_hooks(name: str, layer: nn.Module) -> bool:
    return not isinstance(layer, torch.jit.ScriptModule)
