"""The optimizers of the training loop: found in what wraps them, and hooked."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..quoting import kind_of, listed
from ..regularizers.gradients import ClipGradNorm
from ..warn import warn
from .hooks import SiteHook
from .parameters import ParameterHook
from .run import Run
from .site import Site
from .updates import StepHook

_WRAPPED = ("_base_optimizer", "base_optimizer", "_optimizer", "original_optimizer", "optimizer")
"""Where timm's Lookahead, SAM, Lightning and Fabric, Opacus, accelerate keep theirs, whose steps
call the hooks."""


def checked_optimizers(given: Any) -> list[Optimizer]:
    """The optimizers that are given, one or a list, or that are inside; none for None.

    Raises:
        TypeError: for what is none and holds none.
    """
    several = given if isinstance(given, (list, tuple)) else [given]
    found = [_innermost(each) for each in several if each is not None]
    return list({id(each): each for each in found}.values())


def _innermost(given: Any) -> Optimizer:
    # wrappers pass for the class that they wrap: what is inside comes first
    inner = (vars(given).get(name) for name in _WRAPPED) if hasattr(given, "__dict__") else ()
    wrapped = next((each for each in inner if isinstance(each, Optimizer)), None)
    if wrapped is not None:
        return _innermost(wrapped)
    if not isinstance(given, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, or a list of several, got {kind_of(given)}"
        )
    return given


def use_optimizers(
    control: Run, installed: Sequence[tuple[nn.Module, SiteHook]], optimizers: list[Optimizer]
) -> None:
    """Put step hooks on these optimizers, and take them off those before.

    Raises:
        ValueError: if they hold none of the parameters, or divide an entry whose gradients are
            measured together; then nothing has changed.
    """
    hooks = [
        (module, hook)
        for module, hook in installed
        if isinstance(hook, ParameterHook) and hook.site.regularizer.accumulates
    ]
    unheld = _unheld(hooks, optimizers) if optimizers else []
    control.drop_optimizers()
    for optimizer in optimizers:
        handle = optimizer.register_step_pre_hook(StepHook(control, hooks))
        control.optimizers.append((weakref.ref(optimizer), handle))
    if unheld:
        warn(
            f"{listed(unheld, 5)}: the optimizer does not hold the parameter, so its gradient is "
            "not regularized: give all optimizers, attached.optimizer = [first, second]"
        )


def _unheld(
    hooks: Iterable[tuple[nn.Module, ParameterHook]], optimizers: Sequence[Optimizer]
) -> list[str]:
    """The sites whose parameter no optimizer holds."""
    holders = {
        id(each): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    }
    unheld = []
    first: dict[tuple[int, int], Optimizer] = {}
    trained = [(h.site, p) for m, h in hooks if (p := m._parameters.get(h.parameter)) is not None]
    trained = [(site, parameter) for site, parameter in trained if parameter.requires_grad]
    for site, parameter in trained:
        holder = holders.get(id(parameter))
        if holder is None:
            unheld.append(site.key)
        elif first.setdefault(site.position, holder) is not holder and _together(site):
            raise ValueError(
                f"{site.key}: the parameters of its entry are in several optimizers, which make "
                "their steps one by one: give those of each an entry of its own"
            )
    if unheld and len(unheld) == len(trained):
        raise ValueError(
            f"the optimizer holds none of the parameters of {listed(unheld, 5)}: give the one "
            "that updates this model"
        )
    return unheld


def _together(site: Site) -> bool:
    """Whether the gradients of its entry have one norm."""
    return isinstance(site.regularizer, ClipGradNorm) and site.regularizer.group
