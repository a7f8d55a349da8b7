"""Regularizes accumulated gradients once per update, when the optimizer begins its step."""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import do_not_compile
from ..functional import foreach
from ..functional.foreach import common_norm
from ..functional.gradients import group_norm
from ..quoting import kind_of, listed
from ..regularizers.base import Now
from ..regularizers.gradients import ClipGradNorm
from ..regularizers.memory import WithMemory
from ..selectors.wrappers import is_distributed, is_gathered, shard_refusal
from . import memories, shards
from .counter import JointCounts
from .processes import world_size
from .run import Run
from .scaler import as_factor
from .shards import Shards, local_part, part_of, whole_norms
from .site import NOT_DENSE, LiveSite, Rates, name_site, regularize_grad

_WRAPPED = ("_base_optimizer", "base_optimizer", "_optimizer", "original_optimizer", "optimizer")
"""The attributes in which timm's Lookahead, SAM, Lightning and Fabric, Opacus and accelerate keep
their optimizer."""


class _Held(NamedTuple):
    """A parameter and its gradient, at a site that regularizes the gradient.

    The gradient of a sharded parameter is the part on this process.
    """

    site: LiveSite
    parameter: Tensor
    grad: Tensor
    shards: Shards | None


def checked_optimizers(optimizers: Any) -> list[Optimizer]:
    """Return the optimizers inside all wrappers, each once.

    Args:
        optimizers: an optimizer or its wrapper, a list of them, or None.

    Raises:
        TypeError: if another object is among them.
    """
    several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    innermost = [_innermost(optimizer) for optimizer in several if optimizer is not None]
    return list(dict.fromkeys(innermost))


def _innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer inside all wrappers."""
    # a wrapper may pretend to be of the class that it wraps, so look inside first
    for name in _WRAPPED:
        wrapped = getattr(optimizer, "__dict__", {}).get(name)
        if isinstance(wrapped, Optimizer):
            return _innermost(wrapped)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer, or a list of several, got "
            f"{kind_of(optimizer)}"
        )
    return optimizer


def use_optimizers(
    run: Run, installed: Sequence[tuple[nn.Module, Any]], optimizers: list[Optimizer]
) -> None:
    """Put step hooks on these optimizers, and take them off all others.

    Raises:
        ValueError: if the optimizers hold none of the parameters.
    """
    hooks = [(module, hook) for module, hook in installed if hook.site.regularizer.accumulates]
    if optimizers:
        _check_optimizers(hooks, optimizers)

    for step in run.optimizers:
        step.remove()
    weakly = [(weakref.ref(module), hook) for module, hook in hooks]
    run.optimizers = [StepHooks(optimizer, weakly) for optimizer in optimizers]


def _check_optimizers(hooks: Sequence[tuple[nn.Module, Any]], optimizers: list[Optimizer]) -> None:
    """Raise ValueError if the optimizers hold no trained parameter of these hooks."""
    # FSDP gathers parameters for a forward, and the optimizer does not hold the gathered ones
    parameters = [hook.held(module) for module, hook in hooks if not is_gathered(module)]
    trained = {id(x) for x in parameters if x is not None and x.requires_grad}
    updated = set().union(*map(updated_by, optimizers))
    if trained and trained.isdisjoint(updated):
        keys = listed([hook.site.key for _, hook in hooks], 5)
        raise ValueError(
            f"the optimizer holds none of the parameters of {keys}: give the one that updates this "
            "model"
        )


def updated_by(optimizer: Any) -> set[int]:
    """Return the identities of the parameters that an optimizer updates."""
    return {id(x) for group in optimizer.param_groups for x in group["params"]}


class StepHooks:
    """The hooks of an optimizer: they regularize the gradients when its step begins.

    A step may call the step of a parent class, and torch calls the hooks in both. `began` is True
    if the present step has already regularized the gradients.

    Args:
        optimizer: the optimizer that gets the hooks.
        sites: the modules that hold the parameters, as weak references, with the hooks of the
            sites.
    """

    def __init__(
        self, optimizer: Optimizer, sites: Sequence[tuple[weakref.ref[nn.Module], Any]]
    ) -> None:
        self.sites = sites
        self.began = False
        self._optimizer = weakref.ref(optimizer)
        self._handles = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None if it is gone."""
        return self._optimizer()

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """Forget a step that has raised an error, because its end was not seen."""
        self.began = False

    def _before(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Regularize the gradients. If the step has a closure, replace it by one that does this."""
        if self.began and not torch.compiler.is_compiling():
            return None
        self.began = True
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            _regularize(self.sites, optimizer)
            return None

        def evaluated(*closure_args: Any, **closure_kwargs: Any) -> Any:
            loss = closure(*closure_args, **closure_kwargs)
            self.began = True  # the forward in the closure has set it to False
            _regularize(self.sites, optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.began = False


@do_not_compile  # a compiled step runs this in eager mode
@torch.no_grad()
def _regularize(hooks: Sequence[Any], optimizer: Any) -> None:
    """Regularize the gradients of the parameters that an optimizer is about to update."""
    entries = _entries(hooks, optimizer)

    # a fused optimizer gets gradients of the scaled loss, and the scale
    scale = getattr(optimizer, "grad_scale", None)
    devices = {held.grad.device for entry in entries for held in entry}
    scales = {device: as_factor(scale, device) for device in devices}

    for entry in map(_still_updated, entries):
        if not entry:
            continue
        norm = {}
        regularizer = entry[0].site.regularizer
        if isinstance(regularizer, WithMemory):
            norms = whole_norms(entry, 2.0)
            # a fused optimizer itself leaves out updates that are not finite
            found_inf = getattr(optimizer, "found_inf", None)
            memories.regularize(entry, norms, scales[norms.device], found_inf)
            continue
        if isinstance(regularizer, ClipGradNorm) and regularizer.group:
            norm["common_norm"] = _common_norm(entry, regularizer.norm_type)
        lists, others = _in_lists(entry)
        for held in others:
            _regularize_one(held, norm, scales[held.grad.device])
        for several in lists:
            _regularize_all(several, norm, scales[several[0].grad.device])


def _still_updated(entry: list[_Held]) -> list[_Held]:
    """Return the gradients that no earlier entry has left out."""
    return [held for held in entry if held.parameter.grad is not None]


def _entries(hooks: Sequence[Any], optimizer: Any) -> list[list[_Held]]:
    """Return the gradients to regularize, in a list for each regularizer of an entry."""
    updated = updated_by(optimizer)
    entries: dict[Any, list[_Held]] = defaultdict(list)
    for reference, hook in hooks:
        module = reference()
        if module is None or not hook.site.acts(module.training):
            continue
        parameter = hook.held(module)
        if parameter is None or parameter.grad is None or id(parameter) not in updated:
            continue
        refusal = _refusal(module, hook.site, parameter)
        if refusal is not None:
            raise hook.site.error(refusal)
        held = _Held(hook.site, parameter, *part_of(parameter))
        entries[hook.site.position].append(held)
    return list(entries.values())


def _refusal(module: nn.Module, site: LiveSite, parameter: Any) -> str | None:
    """Return why a gradient can't be regularized once per update, or None."""
    if parameter.grad.layout is not torch.strided:
        return NOT_DENSE
    if site.regularizer.random and world_size() > 1:
        return "each process would draw other numbers: use when='backward'"
    parts = site.regularizer.parts
    if parts == "rows" and is_distributed(parameter) and not Shards.of(parameter).has_whole_rows():
        return "the mean of a row needs all of it, and other processes have parts of the row"
    return shard_refusal(module, acts_on_parts=bool(parts), once=True)


def _common_norm(entry: Sequence[_Held], norm_type: float) -> Tensor:
    """Return one norm over all gradients of an entry."""
    if all(held.shards is None for held in entry):
        return common_norm([held.grad for held in entry], norm_type)
    return group_norm(whole_norms(entry, norm_type), norm_type, "tensor").reshape(())


def _in_lists(entry: Sequence[_Held]) -> tuple[list[list[_Held]], list[_Held]]:
    """Return lists of gradients that are regularized together, and the remaining gradients."""
    if not entry[0].site.regularizer.acts_on_all:
        return [], list(entry)
    sharded = shards.in_lists([held for held in entry if held.shards is not None])
    together, others = _whole_in_lists([held for held in entry if held.shards is None])
    return sharded + together, others


def _whole_in_lists(entry: Sequence[_Held]) -> tuple[list[list[_Held]], list[_Held]]:
    """Do the same for gradients that are not sharded."""
    if any(type(held.parameter) not in foreach.PLAIN for held in entry):
        return [], list(entry)
    rates = [tuple(held.site.values.items()) for held in entry]
    lists, others = foreach.in_lists([held.grad for held in entry], rates)
    together = [[entry[i] for i in positions] for positions in lists]
    return together, [entry[i] for i in others]


def _regularize_one(held: _Held, norm: Rates, scale: float | Tensor) -> None:
    """Regularize one gradient in place."""
    site = held.site
    grad = held.grad
    rates = {**site.values, **norm}
    now = {"grad_scale": scale, "parameter": local_part(held.parameter)}
    new = regularize_grad(site, None, rates, grad, **now)
    if new is not grad:
        grad.copy_(new)


def _regularize_all(several: Sequence[_Held], norm: Rates, scale: float | Tensor) -> None:
    """Regularize and count gradients that have the same device, dtype and rates."""
    site = several[0].site
    grads = [held.grad for held in several]
    now = Now(grad_scale=scale, layout="parameter", **site.values, **norm)
    now.parameters = [local_part(held.parameter) for held in several]
    now.shards = several[0].shards
    if site.regularizer.anchored:
        now.anchors = [held.site.anchor_of(held.parameter) for held in several]
    try:
        changed = site.regularizer.apply_all(grads, now)
    except Exception as error:
        name_site(error, site, "the error comes from this site, or from others of its entry")
        raise
    tallies = [held.site.tally for held in several]
    if changed is None:
        for tally in tallies:
            tally.add(None, 0, 0.0)
        return
    norm_counts = [1] * len(grads) if now.norm_counts is None else now.norm_counts
    joint = JointCounts.of(tallies, grads[0].device, norm_counts)
    joint.add(changed, [grad.numel() for grad in grads], now.norms)
