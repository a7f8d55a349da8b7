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
from ..selectors.wrappers import named_modules, submodule, unwrap

_MOST = 1000
_OF_ATTACH = ("grad_scaler", "root")
_OF_WATCHDOG = tuple(
    each.name
    for each in fields(Watchdog)
    if each.name not in ("rules", "action", "every", *Watchdog.refused_options)
)


def watch(
    model: nn.Module,
    rules: str | Sequence[str] = "all",
    action: str | Callable[[Any], Any] = "warn",
    every: int | None = 100,
    **options: Any,
) -> Attachment:
    """Watch a training run: warn of what goes wrong first, with the layer that made it.

    A `Watchdog` is put on all layers and blocks of the model, but what torch.jit has scripted; of a
    model with more than 1,000, on those that are least deeply nested.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with watch(model) as attached:
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     attached.step()
        ...     attached.verify()
        []

    Args:
        model: any model, wrapped or not, as for `attach`.
        rules: names of rules, or one; or ``"all"``; see `Watchdog`.
        action: ``"warn"``, ``"raise"``, or a function of a `Finding`.
        every: look at every so many training forwards; 0 or None: only when an epoch ends.
        options: other fields of `Watchdog`, as ``max_dead=0.5``, and of the arguments of `attach`
            ``grad_scaler`` and ``root``.

    Raises:
        TypeError, ValueError: for a rule, an action or an option that is none.
        SpecError: where a `Watchdog` is on already.
    """
    arguments = {name: options.pop(name) for name in _OF_ATTACH if name in options}
    for name in options:
        if name not in _OF_WATCHDOG:
            known = (*_OF_ATTACH, *_OF_WATCHDOG)
            raise TypeError(
                f"watch takes no {label(name)}{closest(name, known)}; its options: "
                f"{', '.join(known)}"
            )
    dog = Watchdog(rules, action=action, every=every, **options)  # type: ignore[arg-type]  # checked
    base = submodule(unwrap(model), arguments.get("root", ""))
    first: dict[nn.Module, str] = {}  # of a shared layer, the name that it has at its site
    for name, module in named_modules(base):
        if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            first.setdefault(module, name)
    names = set(first.values())
    depth = max((name.count(".") for name in names), default=0)
    while len(names) > _MOST and depth:
        depth -= 1
        names = {name for name in names if name.count(".") <= depth}

    def watched_layers(name: str, layer: nn.Module) -> bool:
        return name in names

    # chosen by a function, layers that are never called are left out
    return attach(model, {Select(where=watched_layers): dog}, **arguments)
