"""Sites that can't act any more: the layer was replaced, or its parameter is another one."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from .. import messages
from ..findings import Finding, Message
from ..selectors.wrappers import shard_message, sharding_of
from ..sites.held import ParameterHook, acts_once
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.updates import updated_by


def find_lost(hook: SiteHook, owner: nn.Module | None) -> Finding | None:
    """Find out whether a site has lost its target.

    Args:
        hook: the hook of the site.
        owner: the module that the hook is on, or the module that now has the name of its layer.
    """
    if owner is None:
        return _finding(messages.REPLACED, hook)
    if isinstance(hook, ParameterHook):
        return _lost_parameter(hook, owner)
    if hook.lost(owner):
        return _finding(messages.REPLACED, hook)
    return None


def _lost_parameter(hook: ParameterHook, owner: nn.Module) -> Finding | None:
    """Find out whether a hook has lost its parameter."""
    regularizer = hook.site.regularizer
    acts_on_parts = bool(regularizer.parts)
    refusal = shard_message(owner, acts_on_parts, acts_once(regularizer))
    if refusal is not None:
        return _finding(refusal, hook, sharding=sharding_of(owner))

    was_replaced = hook.lost(owner)
    if hook.held(owner) is None:
        if was_replaced:
            return _finding(messages.REPLACED, hook)
        return _finding(messages.PARAMETER_GONE, hook, name=hook.local)

    # a frozen parameter gets its hook when it is unfrozen
    if hook.follows(owner) or hook.site.frozen or hook.is_frozen(owner):
        return None
    if was_replaced:
        return _finding(messages.REPLACED, hook)
    return _finding(messages.PARAMETER_SWAPPED, hook)


def _finding(message: Message, hook: SiteHook, **values: object) -> Finding:
    return message.finding(hook.site.key, epoch=hook.run.epoch, **values)


def find_frozen(base: nn.Module, run: Run, hooks: Iterable[SiteHook]) -> list[Finding]:
    """Find the entries of the spec whose parameters are all frozen.

    A frozen parameter beside others is no fault, because it is regularized once it is unfrozen.
    """
    entries = _by_entry(hook for hook in hooks if isinstance(hook, ParameterHook))
    sizes = Counter(site.position for site in run.sites)
    findings = []
    for position, members in entries.items():
        frozen = [hook for hook in members if _has_frozen(hook, base)]
        if len(frozen) < sizes[position]:
            continue
        keys = [hook.site.key for hook in frozen]
        findings.append(messages.FROZEN.finding(*keys, epoch=run.epoch))
    return findings


def _has_frozen(hook: ParameterHook, base: nn.Module) -> bool:
    """Return whether the parameter of a hook is still in the model, and frozen."""
    owner = hook.find(base)
    return owner is not None and hook.is_frozen(owner)


def find_overwritten(base: nn.Module, run: Run, hooks: Iterable[SiteHook]) -> list[Finding]:
    """Find the sites whose gradient is written anew at the optimizer's step.

    Opacus computes gradients of each sample in hooks, keeps them in ``grad_sample`` of the
    parameters, and makes ``grad`` of them in the step of its optimizer.
    """
    keys = []
    for hook in hooks:
        if not isinstance(hook, ParameterHook) or hook.site.regularizer.accumulates:
            continue
        owner = hook.find(base)
        if owner is not None and hasattr(hook.held(owner), "grad_sample"):
            keys.append(hook.site.key)
    if not keys:
        return []
    return [messages.OVERWRITTEN.finding(*keys, epoch=run.epoch)]


def old_anchors(base: nn.Module, hooks: Iterable[SiteHook]) -> list[str]:
    """Return the keys of sites that pull a parameter to a value of before it was loaded.

    Values are compared only where the parameter was written since `attach`, because a comparison
    waits for the device.
    """
    keys = []
    for hook in hooks:
        site = hook.site
        version = site.anchored_at
        site.anchored_at = None  # from here on, the training changes the parameter
        owner = hook.find(base)
        if version is None or owner is None or not isinstance(hook, ParameterHook):
            continue

        parameter = hook.held(owner)
        if parameter is not None and not site.active_calls and parameter._version != version:
            anchor = site.anchor_of(parameter).to(parameter.dtype)
            if not torch.equal(parameter, anchor):
                keys.append(site.key)
    return keys


def find_split_groups(base: nn.Module, run: Run, hooks: Iterable[SiteHook]) -> list[Finding]:
    """Find the entries with one norm whose parameters several optimizers hold."""
    parameter_hooks = [hook for hook in hooks if isinstance(hook, ParameterHook)]
    grouped = [hook for hook in parameter_hooks if getattr(hook.site.regularizer, "group", False)]
    if not grouped:
        return []

    optimizers = [step_hooks.optimizer for step_hooks in run.optimizers]
    held = [updated_by(optimizer) for optimizer in optimizers if optimizer is not None]
    findings = []
    for members in _by_entry(grouped).values():
        owners = [(hook, hook.find(base)) for hook in members]
        parameters = {id(hook.held(owner)) for hook, owner in owners if owner is not None}
        parts = {frozenset(part & parameters) for part in held} - {frozenset()}
        if len(parts) < 2:  # optimizers of all parameters may take turns
            continue
        keys = [hook.site.key for hook in members]
        finding = messages.SPLIT_GROUP.finding(*keys, epoch=run.epoch, optimizers=len(parts))
        findings.append(finding)
    return findings


def _by_entry(hooks: Iterable[ParameterHook]) -> dict[tuple[int, int], list[ParameterHook]]:
    """Return the hooks of each entry of the spec."""
    entries: dict[tuple[int, int], list[ParameterHook]] = defaultdict(list)
    for hook in hooks:
        entries[hook.site.position].append(hook)
    return entries
