"""Accumulated gradients: regularized once per update, when the optimizer begins its step."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..functional.gradients import common_norm
from ..functional.masks import wide_dtype
from ..quoting import kind_of, listed
from ..regularizers.base import Regularizer
from ..regularizers.gradients import ClipGradNorm
from ..selectors.wrappers import shard_refusal
from ..warn import warn
from .act import regularize_grad
from .hooks import SiteHook
from .parameters import ParameterHook
from .run import Run
from .site import Site

_WRAPPED = ("_base_optimizer", "base_optimizer", "_optimizer", "original_optimizer", "optimizer")
"""Where timm's Lookahead, SAM, Lightning and Fabric, Opacus, accelerate keep their optimizer."""


def checked_optimizers(given: Any) -> list[Optimizer]:
    """Return the optimizers that are given, one or a list, or that are inside; none for None.

    Raises:
        TypeError: for an object that is no optimizer and holds none.
    """
    several = given if isinstance(given, (list, tuple)) else [given]
    return list(dict.fromkeys(_innermost(each) for each in several if each is not None))


def _innermost(given: Any) -> Optimizer:
    # a wrapper may pretend to be of the class that it wraps, so what is inside comes first
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
    """Put step hooks on these optimizers, and take them off those before.

    Raises:
        ValueError: if they hold none of the parameters, or if the parameters of one norm are in
            several optimizers; then nothing has changed.
    """
    hooks = [
        (module, hook)
        for module, hook in installed
        if isinstance(hook, ParameterHook) and hook.site.regularizer.accumulates
    ]
    unheld = _unheld(hooks, optimizers) if optimizers else []
    run.drop_optimizers()
    for optimizer in optimizers:
        handle = optimizer.register_step_pre_hook(StepHook(run, hooks))
        run.optimizers.append((weakref.ref(optimizer), handle))
    if unheld:
        warn(
            f"{listed(unheld, 5)}: the optimizer does not hold the parameter, so its gradient is "
            "not regularized: give all optimizers, attached.optimizer = [first, second]"
        )


def _unheld(
    hooks: Iterable[tuple[nn.Module, ParameterHook]], optimizers: Sequence[Optimizer]
) -> list[str]:
    """Return the keys of the sites whose parameter no optimizer holds."""
    holders = {key: each for each in optimizers for key in _held(each)}
    parameters = [(hook.site, module._parameters.get(hook.parameter)) for module, hook in hooks]
    trained = [(site, p) for site, p in parameters if p is not None and p.requires_grad]
    unheld = [site.key for site, parameter in trained if id(parameter) not in holders]
    if unheld and len(unheld) == len(trained):
        raise ValueError(
            f"the optimizer holds none of the parameters of {listed(unheld, 5)}: give the one "
            "that updates this model"
        )
    first: dict[tuple[int, int], Optimizer] = {}
    for site, parameter in trained:
        holder = holders.get(id(parameter))
        if holder is None or not _has_one_norm(site.regularizer):
            continue
        if first.setdefault(site.position, holder) is not holder:
            raise ValueError(
                f"{site.key}: the parameters of its entry are in several optimizers, which make "
                "their steps one by one: give those of each an entry of its own"
            )
    return unheld


def _held(optimizer: Any) -> set[int]:
    """The ids of the parameters that an optimizer updates."""
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


def _has_one_norm(regularizer: Regularizer) -> TypeGuard[ClipGradNorm]:
    """Whether the gradients of its entry are measured together."""
    return isinstance(regularizer, ClipGradNorm) and regularizer.group


class StepHook:
    """Step pre-hook of an optimizer: regularizes the gradients of the parameters that it holds.

    The modules are held weakly. The Attachment holds neither this hook nor the optimizer.
    """

    def __init__(self, run: Run, installed: Iterable[tuple[nn.Module, ParameterHook]]) -> None:
        self.run = run
        self.hooks = [(weakref.ref(module), hook) for module, hook in installed]

    def __call__(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling() and _is_inside_a_step(optimizer):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._begin(optimizer)
            return None

        def evaluated(*given: Any, **options: Any) -> Any:
            loss = closure(*given, **options)
            self._begin(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _begin(self, optimizer: Any) -> None:
        """Regularize in eager mode: a compiled optimizer step is interrupted here."""
        regularize: Callable[[Any], None] = self._regularize
        if "torch._dynamo" in sys.modules:  # importing it takes a second
            regularize = torch.compiler.disable(regularize)  # type: ignore[no-untyped-call]  # torch's
        regularize(optimizer)

    def _regularize(self, optimizer: Any) -> None:
        """Regularize the gradients in the order of the spec."""
        held, found = _held(optimizer), []
        for reference, hook in self.hooks:
            module = reference()
            parameter = None if module is None else module._parameters.get(hook.parameter)
            if module is None or parameter is None or id(parameter) not in held:
                continue
            if hook.site.is_on(module.training) and parameter.grad is not None:
                _check(hook.site, module, parameter.grad)
                found.append((hook.site, parameter, parameter.grad))
        if not (self.run.installed and self.run.enabled):
            return
        # a fused optimizer is given gradients of the scaled loss, and the scale
        scale = getattr(optimizer, "grad_scale", None)
        with torch.no_grad():
            for _, entry in itertools.groupby(found, key=lambda each: each[0].position):
                _regularize_entry(list(entry), scale)


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


def _regularize_entry(entry: Sequence[tuple[Site, Tensor, Tensor]], scale: Any) -> None:
    """Regularize the gradients of the parameters of one entry, in place."""
    first = entry[0][0]
    regularizer, measured = first.regularizer, {}
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    if regularizer.random and ready and distributed.get_world_size() > 1:
        raise first.error(
            "each process would draw other numbers after the mean, and the processes' parameters "
            "would part: use when='backward'"
        )
    if _has_one_norm(regularizer):
        measured["common_norm"] = common_norm([g for *_, g in entry], regularizer.norm_type)
    for site, parameter, grad in entry:
        factor: Any = 1.0 if scale is None else scale
        if isinstance(factor, Tensor):  # wide, so that bound * scale fits
            dtype = wide_dtype(grad.device)
            factor = factor.to(grad.device, dtype, non_blocking=True).reshape(())
        values = {**site.values, **measured}
        new = regularize_grad(site, site.form_of(grad), values, grad, parameter, factor)
        if new is not grad:
            grad.copy_(new)


def _check(site: Site, module: nn.Module, grad: Tensor) -> None:
    """Raise SiteError for a gradient that can't be regularized."""
    refusal = shard_refusal(module)
    if grad.layout is not torch.strided:
        refusal = "its gradient is sparse, which is not supported: make the layer with sparse=False"
    if refusal is not None:
        raise site.error(refusal)
