"""Finds sites that can't act any more, because their layer or parameter was replaced.

`idle.diagnose` asks `find_lost` about each site. The other functions find parameters whose
gradients are not regularized as intended. They run in the first training forward of a window, and
most of them also in `Attachment.verify`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from .. import messages
from .._torch import address_of
from ..findings import Finding, Message
from ..selectors.wrappers import shard_message, sharding_of
from ..sites.held import ParameterHook, acts_once
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.updates import updated_by


def find_lost(hook: SiteHook, owner: nn.Module | None) -> Finding | None:
    """Return the finding about a site that has lost its target; None if the target is there.

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
    """Return the finding about a hook that has lost its parameter; None if it has not."""
    # other code may have sharded the model after `attach`
    regularizer = hook.site.regularizer
    acts_on_parts = bool(regularizer.parts)
    refusal = shard_message(
        owner,
        acts_on_parts,
        acts_once(regularizer),
        anchored=regularizer.anchored,
    )
    if refusal is not None:
        return _finding(
            refusal,
            hook,
            sharding=sharding_of(owner),
        )

    was_replaced = hook.lost(owner)  # the hook is not on the module that has this name now
    if hook.held(owner) is None:
        if was_replaced:
            return _finding(messages.REPLACED, hook)
        return _finding(
            messages.PARAMETER_GONE,
            hook,
            name=hook.local,
        )

    # a frozen parameter gets its hook when it is unfrozen
    is_frozen = hook.site.frozen or hook.is_frozen(owner)
    if is_frozen or hook.follows(owner):
        return None
    if was_replaced:
        return _finding(messages.REPLACED, hook)
    return _finding(messages.PARAMETER_SWAPPED, hook)


def _finding(message: Message, hook: SiteHook, **values: object) -> Finding:
    """Make a finding about the site of a hook."""
    return message.finding(
        hook.site.key,
        epoch=hook.run.epoch,
        **values,
    )


def find_frozen(
    base: nn.Module,
    run: Run,
    hooks: Iterable[SiteHook],
) -> list[Finding]:
    """Find the entries of the spec whose parameters are all frozen.

    A frozen parameter beside others is no fault, because it is regularized once it is unfrozen.
    """
    entries = _by_entry(_on_parameters(hooks))
    # `hooks` may be only some of an entry, such as those of idle sites
    sizes = Counter(site.position for site in run.sites)
    findings = []
    for position, members in entries.items():
        is_whole = len(members) == sizes[position]
        if not is_whole or not all(_has_frozen(hook, base) for hook in members):
            continue

        keys = [hook.site.key for hook in members]
        finding = messages.FROZEN.finding(
            *keys,
            epoch=run.epoch,
        )
        findings.append(finding)
    return findings


def _on_parameters(hooks: Iterable[SiteHook]) -> list[ParameterHook]:
    """Return the hooks that are on parameters."""
    return [hook for hook in hooks if isinstance(hook, ParameterHook)]


def _has_frozen(hook: ParameterHook, base: nn.Module) -> bool:
    """Return whether the parameter of a hook is still in the model, and frozen."""
    owner = hook.find(base)
    return owner is not None and hook.is_frozen(owner)


def find_overwritten(
    base: nn.Module,
    run: Run,
    hooks: Iterable[SiteHook],
) -> list[Finding]:
    """Find the sites whose gradient is replaced in the optimizer's step.

    Opacus computes a gradient for each sample in hooks, and keeps them in ``grad_sample`` of the
    parameter. Its optimizer computes ``grad`` from them in its step.
    """
    keys = []
    for hook in _on_parameters(hooks):
        if hook.site.regularizer.accumulates:  # acts on the gradient that Opacus has computed
            continue
        owner = hook.find(base)
        if owner is None:
            continue
        parameter = hook.held(owner)
        if hasattr(parameter, "grad_sample"):
            keys.append(hook.site.key)

    if not keys:
        return []
    finding = messages.OVERWRITTEN.finding(
        *keys,
        epoch=run.epoch,
    )
    return [finding]


def old_anchors(base: nn.Module, hooks: Iterable[SiteHook]) -> list[str]:
    """Return the keys of sites that pull a parameter to a value that it does not have any more.

    This is so if weights were loaded after `attach`, or if the layer was replaced. Each parameter
    is compared once, in the first training forward of a window in which it is not frozen.
    """
    keys = []
    for hook in hooks:
        site = hook.site
        if site.anchored_at is None or not isinstance(hook, ParameterHook):
            continue
        owner = hook.find(base)
        parameter = None if owner is None else hook.held(owner)
        if parameter is None or not parameter.requires_grad:
            continue

        # values are compared only if needed, because a comparison waits for the device
        is_as_before = site.anchored_at == (address_of(parameter), parameter._version)
        site.anchored_at = None  # from here on, the training changes the parameter
        if is_as_before or site.active_calls:  # the training may have changed it before, too
            continue

        anchor = site.anchor_of(parameter)
        anchor = anchor.to(parameter.dtype)
        if not torch.equal(parameter, anchor):
            keys.append(site.key)
    return keys


def find_split_groups(
    base: nn.Module,
    run: Run,
    hooks: Iterable[SiteHook],
) -> list[Finding]:
    """Find the entries that clip one common norm, and whose parameters several optimizers hold."""
    grouped = []
    for hook in _on_parameters(hooks):
        has_one_norm = getattr(hook.site.regularizer, "group", False)
        if has_one_norm:
            grouped.append(hook)
    if not grouped:
        return []

    updated = _updated(run)
    findings = []
    for members in _by_entry(grouped).values():
        parameters = _identities(members, base)
        parts = {frozenset(identities & parameters) for identities in updated}
        parts.discard(frozenset())
        if len(parts) < 2:  # two optimizers that both hold all parameters may take turns
            continue

        keys = [hook.site.key for hook in members]
        finding = messages.SPLIT_GROUP.finding(
            *keys,
            epoch=run.epoch,
            optimizers=len(parts),
        )
        findings.append(finding)
    return findings


def _updated(run: Run) -> list[set[int]]:
    """Return the identities of the parameters of each optimizer."""
    identities = []
    for step_hooks in run.optimizers:
        optimizer = step_hooks.optimizer
        if optimizer is not None:
            identities.append(updated_by(optimizer))
    return identities


def _identities(hooks: Iterable[ParameterHook], base: nn.Module) -> set[int]:
    """Return the identities of the parameters of hooks, in the form that `updated_by` returns."""
    identities = set()
    for hook in hooks:
        owner = hook.find(base)
        if owner is not None:
            parameter = hook.held(owner)
            identities.add(id(parameter))
    return identities


def _by_entry(hooks: Iterable[ParameterHook]) -> dict[tuple[int, int], list[ParameterHook]]:
    """Return the hooks of each entry of the spec."""
    entries: dict[tuple[int, int], list[ParameterHook]] = defaultdict(list)
    for hook in hooks:
        position = hook.site.position
        entries[position].append(hook)
    return entries
