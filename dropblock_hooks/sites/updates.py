"""Accumulated gradients: regularized once per update, when the optimizer begins its step."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..functional.gradients import common_norm
from ..functional.masks import wide_dtype
from ..quoting import kind_of, listed
from ..regularizers.gradients import ClipGradNorm
from ..selectors.wrappers import shard_refusal
from ..warn import warn
from .act import NOT_DENSE, regularize_grad
from .hooks import SiteHook
from .run import Run, world_size
from .site import Site

_WRAPPED = ("_base_optimizer", "base_optimizer", "_optimizer", "original_optimizer", "optimizer")
"""Where timm's Lookahead, SAM, Lightning and Fabric, Opacus, accelerate keep their optimizer."""
_APART = (
    "each process would draw other numbers after the mean, and the processes' parameters would "
    "part: use when='backward'"
)


def checked_optimizers(given: Any) -> list[Optimizer]:
    """The optimizers that are given, one or a list, or inside; TypeError for other objects."""
    several = given if isinstance(given, (list, tuple)) else [given]
    return list(dict.fromkeys(_innermost(each) for each in several if each is not None))


def _innermost(given: Any) -> Optimizer:
    # a wrapper may pretend to be of the class that it wraps, so look inside first
    for name in _WRAPPED:
        wrapped = getattr(given, "__dict__", {}).get(name)
        if isinstance(wrapped, Optimizer):
            return _innermost(wrapped)
    if not isinstance(given, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, or a list of several, got {kind_of(given)}"
        )
    return given


def use_optimizers(
    run: Run, installed: Sequence[tuple[nn.Module, SiteHook]], optimizers: list[Optimizer]
) -> None:
    """Put step hooks on these optimizers, and take them off the optimizers before.

    If they hold none of the parameters, nothing changes and ValueError is raised.
    """
    hooks = [(module, hook) for module, hook in installed if hook.site.regularizer.accumulates]
    held = set().union(*map(_held, optimizers))
    parameters = {hook.site.key: module._parameters.get(hook.local) for module, hook in hooks}
    trained = {key: id(p) for key, p in parameters.items() if p is not None and p.requires_grad}
    unheld = [key for key, parameter in trained.items() if parameter not in held]
    if optimizers and unheld and len(unheld) == len(trained):
        raise ValueError(
            f"the optimizer holds none of the parameters of {listed(unheld, 5)}: give the one "
            "that updates this model"
        )
    run.drop_optimizers()
    for optimizer in optimizers:
        handle = optimizer.register_step_pre_hook(StepHook(hooks))
        run.optimizers.append((weakref.ref(optimizer), handle))
    if optimizers and unheld:
        warn(
            f"{listed(unheld, 5)}: the optimizer does not hold the parameter, so its gradient is "
            "not regularized: give all optimizers, attached.optimizer = [first, second]"
        )


def _held(optimizer: Any) -> set[int]:
    """The ids of the parameters that an optimizer updates."""
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


class StepHook:
    """Step pre-hook of an optimizer: regularizes the gradients of the parameters that it holds.

    It holds the modules weakly.
    """

    def __init__(self, installed: Iterable[tuple[nn.Module, SiteHook]]) -> None:
        self.hooks = [(weakref.ref(module), hook) for module, hook in installed]

    def __call__(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling() and _is_inside_a_step(optimizer):
            return None
        regularize: Callable[[Any], None] = self._regularize
        if "torch._dynamo" in sys.modules:  # a compiled step runs this in eager mode
            regularize = torch.compiler.disable(regularize)  # type: ignore[no-untyped-call]  # torch's
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            regularize(optimizer)
            return None

        def evaluated(*given: Any, **options: Any) -> Any:
            loss = closure(*given, **options)
            regularize(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    @torch.no_grad()
    def _regularize(self, optimizer: Any) -> None:
        """Regularize the gradients in the order of the spec, in place."""
        held = _held(optimizer)
        entries: dict[Any, list[tuple[Site, Tensor, Tensor]]] = defaultdict(list)
        for reference, hook in self.hooks:
            module, site = reference(), hook.site
            own = None if module is None else module._parameters.get(hook.local)
            if module is None or own is None or own.grad is None or id(own) not in held:
                continue
            if site.acts(module.training):
                dense = own.grad.layout is torch.strided
                refusal = shard_refusal(module) if dense else NOT_DENSE
                if dense and site.regularizer.random and world_size() > 1:
                    refusal = _APART
                if refusal is not None:
                    raise site.error(refusal)
                entries[site.position].append((site, own, own.grad))
        # a fused optimizer is given gradients of the scaled loss, and the scale
        scale = getattr(optimizer, "grad_scale", None)
        for entry in entries.values():
            norm, clip = {}, entry[0][0].regularizer
            if isinstance(clip, ClipGradNorm) and clip.group:
                norm["common_norm"] = common_norm([g for *_, g in entry], clip.norm_type)
            for site, parameter, grad in entry:
                factor: Any = 1.0 if scale is None else scale
                if isinstance(factor, Tensor):
                    dtype = wide_dtype(grad.device)
                    factor = factor.to(grad.device, dtype, non_blocking=True).reshape(())
                values = {**site.values, **norm}
                new = regularize_grad(site, None, values, grad, parameter, factor)
                if new is not grad:
                    grad.copy_(new)


def _is_inside_a_step(optimizer: Any) -> bool:
    """Whether this step was called by another one of the same optimizer, as ``super().step()``.

    torch calls the hooks of an optimizer in both. This looks at the frames, because a flag would
    outlive a step that raises.
    """
    step = getattr(type(optimizer).step, "__code__", None)  # torch wraps the steps of all classes
    steps, frame = 0, sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is step:
            steps += any(each is optimizer for each in frame.f_locals.get("args", ()))
    return steps > 1
