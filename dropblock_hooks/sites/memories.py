"""Regularizers with a memory of earlier updates, at the step of the optimizer.

The norms of all gradients of an entry are judged at once. Each site keeps its row of the memory.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import messages
from ..findings import tell
from ..functional import foreach, gradients
from ..regularizers.base import Now
from ..regularizers.memory import WithMemory
from .counter import JointCounts
from .run import Run
from .site import LiveSite


def regularize(
    entry: Sequence[Any], norms: Tensor, scale: float | Tensor, found_inf: Tensor | None
) -> None:
    """Judge the gradients of an entry, remember their norms, and clip them or leave them out.

    Args:
        entry: the gradients, with their sites and parameters.
        norms: the norm of each gradient.
        scale: the factor of the loss.
        found_inf: not 0 if the GradScaler leaves this update out; None if it can't.
    """
    sites = [held.site for held in entry]
    regularizer: Any = sites[0].regularizer
    memories = [site.bound for site in sites]
    _check_shapes(entry)

    norms = gradients.unscaled(norms, scale)
    if regularizer.group:
        norms = torch.linalg.vector_norm(norms).reshape(1)
        memories = [_first_in_use(memories)]
    memory = torch.stack([each.read(norms.device) for each in memories])

    now = Now(**_rates(sites, regularizer, norms))
    verdict, new_memory = regularizer.judge(norms, memory, now)
    if found_inf is not None:
        happens = found_inf.to(norms.device).reshape(()) == 0
        new_memory = torch.where(happens, new_memory, memory)
        norms = torch.where(happens, norms, math.nan)  # which nothing bounds or counts
        if not regularizer.clips:
            verdict = verdict & happens
    _remember(sites, new_memory)

    if regularizer.clips:
        changed = _clip(entry, norms, verdict)
    else:
        changed = _leave_out(entry, norms, verdict)
    device = norms.device
    joint = JointCounts.of([site.tally for site in sites], device, [1] * len(sites))
    joint.add(changed, [held.grad.numel() for held in entry], norms.expand(len(sites)))


def _check_shapes(entry: Sequence[Any]) -> None:
    """Raise SiteError if a parameter has another shape than the one of its memory."""
    for held in entry:
        try:
            held.site.bound.check_shape(tuple(held.parameter.shape))
        except ValueError as error:
            raise held.site.error(error) from None


def _remember(sites: Sequence[LiveSite], rows: Tensor) -> None:
    """Give each site its row of the memory; the sites of a group share one row."""
    one_each = len(rows) == len(sites)
    row_of_each = rows.unbind() if one_each else [rows[0]] * len(sites)
    for site, row in zip(sites, row_of_each, strict=True):
        site.bound.row = row


def _first_in_use(memories: Sequence[Any]) -> Any:
    """The memory of a group, which all of its sites hold; sites that came later hold none yet."""
    return next((each for each in memories if each.row is not None), memories[0])


def _rates(sites: Sequence[LiveSite], regularizer: WithMemory, norms: Tensor) -> dict[str, Any]:
    """The rates by name: a number each, or a tensor with the rates of all sites."""
    first = sites[0].values
    if all(site.values == first for site in sites):
        return first
    if regularizer.group:
        raise sites[0].error(
            "the sites of a group have one norm, and different rates: set them by the selector of "
            "the spec, and without ByDepth"
        )
    values = {name: [site.values[name] for site in sites] for name in first}
    return {
        name: torch.tensor(rates, dtype=norms.dtype, device=norms.device)
        for name, rates in values.items()
    }


def _clip(entry: Sequence[Any], norms: Tensor, bounds: Tensor) -> Tensor:
    """Scale the gradients down to their bounds; the number of changed elements of each."""
    grads = [held.grad for held in entry]
    each_norm = norms.expand(len(grads)).unbind()
    each_bound = bounds.expand(len(grads)).unbind()

    lists, others = foreach.in_lists(grads, [None] * len(grads))
    for positions in lists:
        several = [grads[i] for i in positions]
        units = foreach.whole_tensors(several)
        if len(positions) == len(grads) or len(norms) == 1:
            of_list = norms, bounds
        else:
            of_list = _picked(each_norm, positions), _picked(each_bound, positions)
        device = several[0].device
        own_norms, own_bounds = (numbers.to(device) for numbers in of_list)
        foreach.shrink_(several, units, own_norms.expand(len(several)), own_bounds)
    for i in others:
        device = grads[i].device
        own_norm, own_bound = each_norm[i].to(device), each_bound[i].to(device)
        clipped, _ = gradients.scale_counted(grads[i], own_bound, own_norm)
        grads[i].copy_(clipped)
    is_over = (norms > bounds) & (norms < math.inf)
    return is_over * foreach.whole_tensors(grads).sizes


def _picked(numbers: Sequence[Tensor], positions: Sequence[int]) -> Tensor:
    return torch.stack([numbers[i] for i in positions])


def _leave_out(entry: Sequence[Any], norms: Tensor, skipped: Tensor) -> Tensor:
    """Take the gradients of these updates away, so that the optimizer passes the parameters over.

    This reads the device: no optimizer can be told later that there was no update.
    """
    flags = skipped.expand(len(entry)).tolist()
    if not any(flags):
        return torch.zeros(len(entry), dtype=norms.dtype, device=norms.device)

    left_out = [held for held, flag in zip(entry, flags, strict=True) if flag]
    for held in left_out:
        held.parameter.grad = None

    run: Run = entry[0].site.run
    worst = norms[skipped].amax().item()
    keys = [held.site.key for held in left_out]
    finding = messages.SKIPPED_UPDATE.finding(*keys, epoch=run.epoch, norm=worst)
    tell([finding], run.told)
    return skipped * foreach.whole_tensors([held.grad for held in entry]).sizes
