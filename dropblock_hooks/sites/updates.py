"""Regularizes accumulated gradients once per update, when the optimizer begins its step.

The setter of `Attachment.optimizer` calls `use_optimizers`. It puts a hook on each optimizer, which
torch calls before each step.

In this module and in `memories`, an *entry* is one regularizer of the spec with all parameters that
it is for, as a list of members. Members with equal rates, devices and dtypes are regularized
together.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import NO_PARAMETERS, PARAMETERS, do_not_compile
from ..axes.view import OF_PARAMETER
from ..functional import foreach
from ..functional.foreach import common_norm
from ..functional.gradients import group_norm
from ..quoting import listed, shown
from ..regularizers.base import Now
from ..regularizers.gradients import AdaptiveClipGrad, ClipGradNorm
from ..regularizers.memory import WithMemory
from ..selectors.wrappers import (
    MANAGED,
    is_distributed,
    is_gathered,
    is_managed,
    shard_refusal,
)
from . import memories, shards
from .counter import JointCounts
from .processes import world_size
from .run import Run
from .scaler import as_factor
from .shards import Shards, local_gradient, local_part, norms_of_whole
from .site import NOT_DENSE, LiveSite, Rates, name_site, regularize_grad

_WRAPPED = ("_base_optimizer", "base_optimizer", "_optimizer", "original_optimizer", "optimizer")
"""The attributes in which timm's Lookahead, SAM, Lightning and Fabric, Opacus and accelerate keep
their optimizer."""


class _Member(NamedTuple):
    """A member of an entry: the gradient of one parameter, at the site that regularizes it.

    Attributes:
        site: the site.
        parameter: the parameter.
        grad: its gradient; for a sharded parameter, the part on this process.
        shards: how the gradient is spread over processes; None if it is whole.
    """

    site: LiveSite
    parameter: Tensor
    grad: Tensor
    shards: Shards | None


_new_member: Callable[[tuple[Any, ...]], _Member] = functools.partial(tuple.__new__, _Member)
"""Makes a `_Member` from its fields. A call of the class runs Python, which takes longer."""


class _Place:
    """The module that holds the parameter of a site.

    It has no reference to the parameter. A strong one would keep the parameter alive, because the
    optimizer may live longer than the model. A weak one would prevent ``torch.utils.swap_tensors``.

    Attributes:
        module: the module, as a weak reference.
        hook: the hook of the site.
        site: the site.
        local: the name of the parameter in the module.
        takes_dense: whether `_refusal` accepts each dense gradient that is not sharded.
    """

    def __init__(self, module: weakref.ref[nn.Module], hook: Any) -> None:
        self.module = module
        self.hook = hook
        self.site: LiveSite = hook.site
        self.local: str = hook.local
        regularizer = self.site.regularizer
        self.takes_dense = bool(regularizer.parts) and not regularizer.random


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
            f"{_wrong_optimizer(optimizer)}: write optimizer={_meant_optimizer(optimizer)}"
        )
    return optimizer


def _wrong_optimizer(value: Any) -> str:
    """Name a value that is no optimizer."""
    return f"the class {value.__name__}" if isinstance(value, type) else shown(value)


def _meant_optimizer(value: Any) -> str:
    """Return what to write instead of a value that is no optimizer."""
    is_class = isinstance(value, type) and issubclass(value, Optimizer)
    name = value.__name__ if is_class else "torch.optim.SGD"
    return f"{name}(model.parameters(), lr=...), the object whose step() you call"


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

    Args:
        optimizer: the optimizer that gets the hooks.
        hooks: the modules that hold the parameters, as weak references, with the hooks of the
            sites.

    Attributes:
        places: where the parameters of the sites are.
        began: whether the present step has already regularized the gradients. A step may call the
            step of a parent class, and torch calls the hooks in both. Because a step that raises an
            error never ends, a forward in eager mode and `Attachment.step` set it to False.
    """

    def __init__(
        self, optimizer: Optimizer, hooks: Sequence[tuple[weakref.ref[nn.Module], Any]]
    ) -> None:
        self.places = [_Place(module, hook) for module, hook in hooks]
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

    def _before(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Step pre-hook: regularize the gradients, or replace the closure by one that does this.

        A closure computes the gradients inside the step, and maybe several times.
        """
        if self.began:
            return None
        self.began = True
        # the first argument is the optimizer itself
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            _regularize(self.places, optimizer)
            return None

        def regularizing(*closure_args: Any, **closure_kwargs: Any) -> Any:
            loss = closure(*closure_args, **closure_kwargs)
            self.began = True  # the forward in the closure has set it to False
            _regularize(self.places, optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": regularizing}
        return (args[0], regularizing, *args[2:]), kwargs

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.began = False


@do_not_compile  # a compiled step runs this in eager mode
@torch.no_grad()
def _regularize(places: Sequence[_Place], optimizer: Any) -> None:
    """Regularize the gradients of the parameters that an optimizer is about to update."""
    if not _are_on(places):
        return
    entries = _entries(places, optimizer)

    # a fused optimizer gets gradients of the scaled loss, and the scale
    scale = getattr(optimizer, "grad_scale", None)
    scale_on = functools.cache(functools.partial(as_factor, scale))

    for number, entry in enumerate(entries):
        if number > 0:
            entry = _still_updated(entry)
        if not entry:
            continue

        if isinstance(entry[0].site.regularizer, WithMemory):
            norms = norms_of_whole(_grads_of(entry), _shards_of(entry), norm_type=2.0)
            # a fused optimizer itself leaves out updates that are not finite
            found_inf = getattr(optimizer, "found_inf", None)
            memories.regularize(entry, norms, scale_on(norms.device), found_inf)
            continue

        common = _common_norms(entry)
        lists, others = _in_lists(entry)
        for member in others:
            _regularize_one(member, common, scale_on(member.grad.device))
        for several in lists:
            _regularize_all(several, common, scale_on(several[0].grad.device))


def _still_updated(entry: list[_Member]) -> list[_Member]:
    """Return the members whose gradients no earlier entry, such as `SkipUpdate`, has removed."""
    return [member for member in entry if member.parameter.grad is not None]


def _entries(places: Sequence[_Place], optimizer: Any) -> list[list[_Member]]:
    """Return the entries whose gradients are regularized in this update, in the order of the spec.

    Each is a list of its members. Parameters without a gradient are left out, and those that this
    optimizer does not update. It calls no function of Python for an ordinary parameter.
    """
    entries: dict[Any, list[_Member]] = defaultdict(list)
    updated = updated_by(optimizer)
    for place, module in _acting(places):
        site = place.site
        attributes = vars(module)
        parameter = attributes.get(PARAMETERS, NO_PARAMETERS).get(place.local)
        if parameter is None:  # it has another name, or another module holds it
            parameter = place.hook.held(module)
        if id(parameter) not in updated:
            continue
        grad = parameter.grad
        if grad is None:
            continue

        shards_of_grad = None
        are_plain = type(parameter) in foreach.PLAIN_TYPES and type(grad) is Tensor
        is_sharded = MANAGED in attributes and is_managed(module)
        is_ordinary = are_plain and not is_sharded and grad.layout is torch.strided
        if not (is_ordinary and place.takes_dense):
            grad, shards_of_grad = _checked_gradient(module, site, parameter)
        member = _new_member((site, parameter, grad, shards_of_grad))
        entries[site.position].append(member)
    return list(entries.values())


def _acting(places: Sequence[_Place]) -> list[tuple[_Place, nn.Module]]:
    """Return the places whose site acts in the present mode of its module, with the module."""
    acting = []
    for place in places:  # a generator would be resumed for each parameter
        module = place.module()
        if module is not None and (module.training or place.site.is_on(False)):
            acting.append((place, module))
    return acting


def _are_on(places: Sequence[_Place]) -> bool:
    """Return whether the attachment of these places is switched on."""
    if not places:
        return False
    run: Run = places[0].site.run
    return run.installed and run.enabled


def _checked_gradient(
    module: nn.Module, site: LiveSite, parameter: Any
) -> tuple[Tensor, Shards | None]:
    """Return the gradient on this process, and its shards; SiteError if it can't be regularized."""
    refusal = _refusal(module, site, parameter)
    if refusal is not None:
        raise site.error(refusal)
    return local_gradient(parameter)


def _refusal(module: nn.Module, site: LiveSite, parameter: Any) -> str | None:
    """Return why a gradient can't be regularized once per update, or None."""
    if parameter.grad.layout is not torch.strided:
        return NOT_DENSE
    if site.regularizer.random and world_size() > 1:
        return "each process would draw other numbers: use when='backward'"
    regularizer = site.regularizer
    parts = regularizer.parts
    if parts == "rows" and is_distributed(parameter) and not Shards.of(parameter).has_whole_rows():
        return "the mean of a row needs all of it, and other processes have parts of the row"
    return shard_refusal(
        module, acts_on_parts=bool(parts), once=True, anchored=regularizer.anchored
    )


def _grads_of(entry: Sequence[_Member]) -> list[Tensor]:
    """Return the gradients of an entry, of sharded ones the parts on this process."""
    return [member.grad for member in entry]


def _parameters_of(entry: Sequence[_Member]) -> list[Tensor]:
    """Return the parameters of an entry, of sharded ones the parts on this process."""
    parameters = [member.parameter for member in entry]
    if not [member for member in entry if member.shards is not None]:
        return parameters
    return [local_part(parameter) for parameter in parameters]


def _shards_of(entry: Sequence[_Member]) -> list[Shards | None]:
    """Return how the gradients of an entry are spread over processes."""
    return [member.shards for member in entry]


def _common_norms(entry: Sequence[_Member]) -> Rates:
    """Return the norms over a whole entry that its regularizer reads from `Now`, by name."""
    regularizer = entry[0].site.regularizer
    if not isinstance(regularizer, ClipGradNorm | AdaptiveClipGrad) or not regularizer.group:
        return {}

    shards_of_each = _shards_of(entry)
    norm_type = regularizer.norm_type
    norms = {"common_norm": _common_norm(_grads_of(entry), shards_of_each, norm_type)}
    if isinstance(regularizer, AdaptiveClipGrad):
        parameters = _parameters_of(entry)
        norms["common_weight_norm"] = _common_norm(parameters, shards_of_each, norm_type)
    return norms


def _common_norm(
    tensors: Sequence[Tensor], shards_of_each: Sequence[Shards | None], norm_type: float
) -> Tensor:
    """Return one norm over all gradients, or all parameters, of an entry."""
    sharded = [shards for shards in shards_of_each if shards is not None]
    if not sharded:
        return common_norm(tensors, norm_type)
    norms = norms_of_whole(tensors, shards_of_each, norm_type)
    norm_of_norms = group_norm(norms, norm_type, "tensor")
    return norm_of_norms.reshape(())


def _in_lists(entry: Sequence[_Member]) -> tuple[list[list[_Member]], list[_Member]]:
    """Return lists of members that are regularized together, and the remaining members."""
    if not entry[0].site.regularizer.acts_on_all:
        return [], list(entry)
    whole = [member for member in entry if member.shards is None]
    lists, others = _whole_in_lists(whole)
    if len(whole) == len(entry):
        return lists, others
    sharded = [member for member in entry if member.shards is not None]
    return shards.sharded_lists(sharded) + lists, others


def _whole_in_lists(entry: Sequence[_Member]) -> tuple[list[list[_Member]], list[_Member]]:
    """Return the same as `_in_lists`, for members that are not sharded."""
    if not entry:
        return [], []
    types = {type(member.parameter) for member in entry}
    if not types.issubset(foreach.PLAIN_TYPES):
        return [], list(entry)

    # Members with equal keys come into one list. Usually all sites have the same rates. Then all
    # keys are None, which is faster.
    first = entry[0].site.values
    keys: list[Any] = [None] * len(entry)
    others_differ = [member for member in entry if member.site.values != first]
    if others_differ:
        keys = [tuple(member.site.values.items()) for member in entry]

    grads = _grads_of(entry)
    positions_of_lists, positions_of_others = foreach.positions_in_lists(grads, keys)
    lists = []
    for positions in positions_of_lists:
        lists.append([entry[i] for i in positions])
    others = [entry[i] for i in positions_of_others]
    return lists, others


def _regularize_one(member: _Member, common: Rates, scale: float | Tensor) -> None:
    """Regularize one gradient in place."""
    site = member.site
    grad = member.grad
    rates = {**site.values, **common}
    parameter = local_part(member.parameter)
    new = regularize_grad(site, OF_PARAMETER, rates, grad, grad_scale=scale, parameter=parameter)
    if new is not grad:
        grad.copy_(new)


def _regularize_all(several: Sequence[_Member], common: Rates, scale: float | Tensor) -> None:
    """Regularize and count the gradients of a list: same device, dtype, rates and shards."""
    site = several[0].site
    grads = [member.grad for member in several]
    now = Now(grad_scale=scale, layout="parameter", **site.values, **common)
    now.shards = several[0].shards
    now.parameters = _parameters_of(several)
    if site.regularizer.anchored:
        now.anchors = [member.site.anchor_of(member.parameter) for member in several]
    try:
        changed = site.regularizer.apply_all(grads, now)
    except Exception as error:
        name_site(error, site, "the error comes from this site, or from others of its entry")
        raise

    tallies = [member.site.tally for member in several]
    if changed is None:  # the class does not count elements
        for tally in tallies:
            tally.add(affected=None, total=0, rate=0.0)
        return
    norm_counts = [1] * len(grads) if now.norm_counts is None else now.norm_counts
    joint = JointCounts.of(tallies, grads[0].device, norm_counts)
    joint.add(changed, [grad.numel() for grad in grads], now.norms)
