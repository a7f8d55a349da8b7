"""Gradients that FSDP2 or tensor parallelism has spread over processes, and their norms.

``updates`` calls these functions for the gradients of a step.

Such a gradient is a DTensor. A regularizer gets its local tensor, the part on this process, and
changes the local tensor in place. The norms of the parts are reduced over the processes to the norm
of the whole gradient. All processes must make the same reductions in the same order. Therefore no
decision here may depend on a local tensor, which can be empty.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from ..functional import foreach
from ..selectors.wrappers import is_distributed


@dataclass(frozen=True)
class Shards:
    """How a gradient is spread over processes.

    Attributes:
        mesh: the DeviceMesh.
        placements: for each axis of the mesh, the axis of the gradient that it shards, if any.
    """

    mesh: Any
    placements: tuple[Any, ...]

    @classmethod
    def of(cls, parameter: Any) -> Shards:
        """Return the shards of a parameter that is a DTensor."""
        return cls(parameter.device_mesh, tuple(parameter.placements))

    def reduce_norms(self, norms: Tensor, norm_type: float, by_rows: bool) -> Tensor:
        """Reduce the norms of parts over the processes to norms of whole gradients, or of rows."""
        device = norms.device
        for axis, placement in enumerate(self.placements):
            # along this axis of the mesh, the norms are whole already
            if placement.is_replicate() or (by_rows and placement.dim == 0):
                continue
            group = self.mesh.get_group(axis)
            # gradients may be offloaded to the CPU, for which the group may have no backend
            norms = _reduced(norms.to(self.mesh.device_type), norm_type, group)
        return norms.to(device)

    def has_whole_rows(self) -> bool:
        """Return whether no row of axis 0 is spread over processes."""
        return all(placement.is_replicate() or placement.dim == 0 for placement in self.placements)


def _reduced(norms: Tensor, norm_type: float, group: Any) -> Tensor:
    """Reduce the norms of parts to the norms of whole gradients in a group of processes."""
    # the norms are divided by the largest norm, so that no power overflows
    largest = norms.nan_to_num(nan=math.inf)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX, group)
    if norm_type == math.inf:
        return largest

    is_usable = largest.isfinite() & (largest > 0)
    divisor = torch.where(is_usable, largest, 1.0)
    sums = (norms / divisor) ** norm_type
    distributed.all_reduce(sums, distributed.ReduceOp.SUM, group)
    whole: Tensor = sums ** (1 / norm_type) * divisor
    return whole


def local_gradient(parameter: Any) -> tuple[Tensor, Shards | None]:
    """Return the part of a parameter's gradient on this process, and how the gradient is spread.

    A gradient with other placements than the parameter is redistributed first, because its parts
    may still have to be summed over the processes. The new gradient replaces ``parameter.grad``.
    """
    grad = parameter.grad
    if not is_distributed(grad):
        return grad, None
    if grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
        parameter.grad = grad
    return local_part(grad), Shards.of(parameter)


@torch.no_grad()
def local_part(x: Any) -> Tensor:
    """Return the part of a DTensor on this process, which shares its memory; or a plain tensor."""
    if not is_distributed(x):
        return x  # type: ignore[no-any-return]
    local = x.to_local().detach()
    wait = getattr(local, "wait", None)  # a collective may still be writing the tensor
    return local if wait is None else wait()  # type: ignore[no-any-return]


def norms_of_whole(
    tensors: Sequence[Tensor], shards: Sequence[Shards | None], norm_type: float
) -> Tensor:
    """Return the norms of whole gradients, or of whole parameters, on the device of the first one.

    Args:
        tensors: the parts on this process.
        shards: for each tensor, how the whole one is spread over processes; None if it is whole.
        norm_type: the order of the norm.
    """
    norms = foreach.norms_of(tensors, norm_type)
    positions: dict[Shards, list[int]] = defaultdict(list)
    for i, spread in enumerate(shards):
        if spread is not None:
            positions[spread].append(i)
    if not positions:
        return norms

    norm_list = list(norms.unbind())
    for spread, places in positions.items():
        parts = torch.stack([norm_list[i] for i in places])
        whole = spread.reduce_norms(parts, norm_type, by_rows=False)
        for i, norm in zip(places, whole.unbind(), strict=True):
            norm_list[i] = norm
    return torch.stack(norm_list)


def sharded_lists(entry: Sequence[Any]) -> list[list[Any]]:
    """Return lists of the sharded gradients of an entry that are regularized together.

    The gradients of a list have the same shards, dtype, device and rates. All of them have the same
    number of axes: none, one, or more than one.

    Args:
        entry: the gradients, each a ``_Member`` of `sites.updates`.
    """
    lists: dict[Any, list[list[Any]]] = {}
    elements: dict[Any, int] = defaultdict(int)
    for member in entry:
        rates = tuple(member.site.values.items())
        key = member.shards, member.grad.dtype, member.grad.device, rates, min(member.grad.ndim, 2)
        alike = lists.setdefault(key, [[]])
        size = member.parameter.numel()  # of the whole gradient
        if alike[-1] and elements[key] + size > foreach.MOST_ELEMENTS:
            alike.append([])
            elements[key] = 0
        alike[-1].append(member)
        elements[key] += size
    return [several for alike in lists.values() for several in alike]
