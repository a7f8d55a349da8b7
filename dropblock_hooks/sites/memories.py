"""Applies regularizers with a memory of earlier updates, at the step of the optimizer.

``updates`` calls `regularize` for each entry with such a regularizer. An entry is one regularizer
of the spec with all parameters that it is for.

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
from ..regularizers.memory import WithMemory, rows_of
from .counter import JointCounts
from .run import Run
from .site import LiveSite


def regularize(
    entry: Sequence[Any], norms: Tensor, scale: float | Tensor, found_inf: Tensor | None
) -> None:
    """Judge the gradients of an entry, remember their norms, and clip or remove the gradients.

    Args:
        entry: the members of the entry: gradients with their sites and parameters.
        norms: the norm of each gradient. The gradients are those of the loss times `scale`.
        scale: the factor of the loss.
        found_inf: not 0 if the GradScaler leaves this update out; None if no GradScaler can.
    """
    _check_shapes(entry)
    sites = [member.site for member in entry]
    memories = [site.bound for site in sites]
    regularizer: Any = sites[0].regularizer

    norms = gradients.unscaled(norms, scale)
    if regularizer.group:
        norms = torch.linalg.vector_norm(norms).reshape(1)
        memories = [_first_in_use(memories)]
    device = norms.device
    old_rows = rows_of(memories, device)

    rates = _rates(sites, regularizer, norms)
    now = Now(**rates)
    # the bound of each norm if the regularizer clips; otherwise whether to skip each update
    verdict, new_rows = regularizer.judge(norms, old_rows, now)

    if found_inf is not None:
        happens = found_inf.to(device).reshape(()) == 0
        new_rows = torch.where(happens, new_rows, old_rows)
        norms = torch.where(happens, norms, math.nan)  # NaN is not clipped and not counted
        if not regularizer.clips:
            verdict = verdict & happens
    _remember(sites, new_rows)

    if regularizer.clips:
        changed = _clip(entry, norms, bounds=verdict)
    else:
        changed = _remove(entry, norms, is_skipped=verdict)
    _count(entry, changed, norms)


def _count(entry: Sequence[Any], changed: Tensor, norms: Tensor) -> None:
    """Add the changed elements and the norms to the counts of the sites."""
    tallies = [member.site.tally for member in entry]
    sizes = [member.grad.numel() for member in entry]
    ones = [1] * len(entry)
    norm_of_each = norms.expand(len(entry))

    joint = JointCounts.of(tallies, norms.device, ones)
    joint.add(changed, sizes, norm_of_each)


def _check_shapes(entry: Sequence[Any]) -> None:
    """Raise SiteError if a memory was made for a parameter of another shape."""
    for member in entry:
        shape = member.parameter.shape
        memory = member.site.bound
        if shape == memory.shape:
            continue
        try:
            memory.check_shape(tuple(shape))
        except ValueError as error:
            raise member.site.error(error) from None


def _remember(sites: Sequence[LiveSite], rows: Tensor) -> None:
    """Give each site its row of the memory; the sites of a group share one row."""
    is_shared = len(rows) < len(sites)
    for i, site in enumerate(sites):
        site.bound.rows = rows
        site.bound.place = 0 if is_shared else i


def _first_in_use(memories: Sequence[Any]) -> Any:
    """Return the memory that the sites of a group share. A site that is new has no rows yet."""
    for memory in memories:
        if memory.rows is not None:
            return memory
    return memories[0]


def _rates(sites: Sequence[LiveSite], regularizer: WithMemory, norms: Tensor) -> dict[str, Any]:
    """Return the rates by name. A rate is a number, or a tensor with the rates of all sites."""
    first = sites[0].values
    if not [site for site in sites if site.values != first]:
        return first
    if regularizer.group:
        raise sites[0].error(
            "the sites of a group have one norm, and different rates: set them by the selector of "
            "the spec, and without ByDepth"
        )

    rates = {}
    for name in first:
        values = [site.values[name] for site in sites]
        rates[name] = norms.new_tensor(values)
    return rates


def _clip(entry: Sequence[Any], norms: Tensor, bounds: Tensor) -> Tensor:
    """Scale the gradients down to their bounds, and return how many elements of each changed."""
    grads = [member.grad for member in entry]
    no_keys = [None] * len(grads)  # lists are made by device and dtype only
    lists, others = foreach.positions_in_lists(grads, no_keys)

    for positions in lists:
        several = [grads[i] for i in positions]
        units = foreach.whole_tensors(several)
        norms_here = _picked(norms, positions, grads)
        bounds_here = _picked(bounds, positions, grads)

        norm_of_each = norms_here.expand(len(several))
        changed = foreach.shrink_(several, units, norm_of_each, bounds_here)
        if len(several) == len(grads):  # this list has all gradients, in the order of the entry
            return changed

    for i in others:
        grad = grads[i]
        norm = _picked(norms, [i], grads)
        bound = _picked(bounds, [i], grads)

        clipped, _ = gradients.scale_counted(grad, bound.squeeze(0), norm.squeeze(0))
        grad.copy_(clipped)

    # with several lists, the changed elements are counted in the order of the entry
    is_over = (norms > bounds) & (norms < math.inf)
    sizes = foreach.whole_tensors(grads).sizes
    return is_over * sizes


def _picked(numbers: Tensor, positions: Sequence[int], grads: Sequence[Tensor]) -> Tensor:
    """Return the numbers of the gradients at these positions, on the device of the first of them.

    If all gradients share one number, only this number is returned.
    """
    is_shared = len(numbers) == 1
    has_all = len(positions) == len(grads)
    if not (is_shared or has_all):
        picked = [numbers[i] for i in positions]
        numbers = torch.stack(picked)

    first = grads[positions[0]]
    return numbers.to(first.device)


def _remove(entry: Sequence[Any], norms: Tensor, is_skipped: Tensor) -> Tensor:
    """Remove the gradients of skipped updates; return how many elements of each were removed.

    The optimizer skips a parameter without a gradient. This waits for the device, because the
    gradients must be gone before the optimizer's step.
    """
    number = len(entry)
    flags = is_skipped.expand(number).tolist()
    if not any(flags):
        return norms.new_zeros(number)

    keys = []
    for member, is_removed in zip(entry, flags, strict=True):
        if is_removed:
            member.parameter.grad = None
            keys.append(member.site.key)

    run: Run = entry[0].site.run
    largest = norms[is_skipped].amax().item()
    finding = messages.SKIPPED_UPDATE.finding(*keys, epoch=run.epoch, norm=largest)
    tell([finding], run.told)

    grads = [member.grad for member in entry]
    sizes = foreach.whole_tensors(grads).sizes
    return is_skipped * sizes
