"""Gradients that accumulate: regularized once per update, when the optimizer begins its step."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.gradients import common_norm
from ..functional.masks import wide_dtype
from ..regularizers.gradients import ClipGradNorm
from ..selectors.wrappers import shard_refusal
from .act import regularize_update
from .parameters import ParameterHook
from .run import Run


class StepHook:
    """Step pre-hook of an optimizer: regularizes the gradients of the parameters that it holds.

    The modules are held weakly. The Attachment holds neither this hook nor the optimizer.
    """

    def __init__(self, control: Run, installed: Iterable[tuple[nn.Module, ParameterHook]]) -> None:
        self.control = control
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
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        found = []
        for reference, hook in self.hooks:
            module = reference()
            parameter = None if module is None else module._parameters.get(hook.parameter)
            if module is None or parameter is None or id(parameter) not in held:
                continue
            if hook.site.is_on(module.training) and parameter.grad is not None:
                _check(hook, module, parameter.grad)
                found.append((hook, parameter, parameter.grad))
        if not (self.control.installed and self.control.enabled):
            return
        # a fused optimizer is given gradients of the scaled loss, and the scale
        scale = getattr(optimizer, "grad_scale", None)
        with torch.no_grad():
            for _, entry in itertools.groupby(found, key=lambda each: each[0].site.position):
                _regularize(list(entry), scale)


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


def _regularize(
    entry: Sequence[tuple[ParameterHook, Tensor, Tensor]], scale: Tensor | None
) -> None:
    """Regularize the gradients of the parameters of one entry, in place."""
    regularizer = entry[0][0].site.regularizer
    if regularizer.random and _processes() > 1:
        raise entry[0][0].site.error(
            "each process would draw other numbers after the mean, and the processes' parameters "
            "would part: use when='backward'"
        )
    measured: dict[str, Tensor] = {}
    if isinstance(regularizer, ClipGradNorm) and regularizer.group:
        grads = [grad for _, _, grad in entry]
        measured["common_norm"] = common_norm(grads, regularizer.norm_type)
    for hook, parameter, grad in entry:
        new = regularize_update(hook.site, grad, _on(grad, scale), measured, parameter)
        if new is not grad:
            grad.copy_(new)


def _processes() -> int:
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if ready else 1


def _on(grad: Tensor, scale: Any) -> float | Tensor:
    """The scale on the device of the gradient, in a type that holds a bound times the scale."""
    if isinstance(scale, Tensor):
        return scale.to(grad.device, wide_dtype(grad.device), non_blocking=True).reshape(())
    return 1.0 if scale is None else float(scale)


def _check(hook: ParameterHook, module: nn.Module, grad: Tensor) -> None:
    """Raise SiteError for a gradient that can't be regularized."""
    refusal = shard_refusal(module)
    if grad.layout is not torch.strided:
        refusal = "its gradient is sparse, which is not supported: make the layer with sparse=False"
    if refusal is not None:
        raise hook.site.error(refusal)
