"""``watch``: a `Watchdog` on the layers of a model, in one line."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..attach import attach
from ..attachment.attachment import Attachment
from ..observers.watchdog import Watchdog
from ..selectors.wrappers import named_modules, unwrap

_MOST = 1000
_IDLE = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def watch(
    model: nn.Module,
    rules: str | Sequence[str] = "all",
    action: str | Callable[[Any], Any] = "warn",
    every: int | None = 100,
    **options: Any,
) -> Attachment:
    """Watch a training run: warn of what goes wrong first, with the layer that made it.

    A `Watchdog` is put on all layers and blocks of the model; of a model with more than 1,000, on
    those that are least deeply nested.

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
        action: ``"warn"``, ``"raise"``, or a function of an `Alert`.
        every: look at every so many training forwards; 0 or None: only when an epoch ends.
        options: other thresholds of `Watchdog`, and arguments of `attach`: ``grad_scaler``.

    Raises:
        TypeError, ValueError: for a rule, an action or an option that is none.
    """
    arguments = {name: options.pop(name) for name in ("grad_scaler", "root") if name in options}
    dog = Watchdog(rules, action=action, every=every, **options)  # type: ignore[arg-type]  # checked
    root = arguments.get("root", "")
    base = unwrap(model)
    base = base.get_submodule(root) if root else base
    names = [name for name, module in named_modules(base) if not isinstance(module, _IDLE)]
    depth = max(name.count(".") for name in names)
    while len(names) > _MOST and depth:
        depth -= 1
        names = [name for name in names if name.count(".") <= depth]
    return attach(model, [(name or ".", dog) for name in names], **arguments)
