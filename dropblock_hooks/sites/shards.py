"""Gradients of which each process holds a part, as FSDP2 and tensor parallelism leave them.

Such a gradient is a DTensor. A regularizer gets its local tensor, the part on this process, and
changes it in place. Norms of parts are reduced to those of the whole over the processes that share
them. All processes must make the same reductions in the same order, so no decision here may depend
on a local tensor, which can be empty.
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
        placements: for each axis of the mesh, which axis of the gradient it shards, if any.
    """

    mesh: Any
    placements: tuple[Any, ...]

    @classmethod
    def of(cls, parameter: Any) -> Shards:
        """Those of a parameter that is a DTensor."""
        return cls(parameter.device_mesh, tuple(parameter.placements))

    def whole_norms(self, norms: Tensor, norm_type: float, by_rows: bool) -> Tensor:
        """The norms of gradients, or of their rows of axis 0, from the norms of the parts."""
        device = norms.device
        for axis, placement in enumerate(self.placements):
            if placement.is_replicate() or (by_rows and placement.dim == 0):
                continue
            group = self.mesh.get_group(axis)
            # gradients may be offloaded to the CPU, for which the group may have no backend
            norms = _reduced(norms.to(self.mesh.device_type), norm_type, group)
        return norms.to(device)

    def has_whole_rows(self) -> bool:
        """Whether no row of axis 0 is spread over processes."""
        return all(each.is_replicate() or each.dim == 0 for each in self.placements)


def _reduced(norms: Tensor, norm_type: float, group: Any) -> Tensor:
    """The norms of wholes, from those of their parts in a group of processes."""
    # divided by the largest norm, so that no power overflows
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


def part_of(parameter: Any) -> tuple[Tensor, Shards | None]:
    """The part of a parameter's gradient on this process, and how the gradient is spread.

    A gradient that waits to be summed, or is spread in another way than the parameter, is brought
    into the form of the parameter first.
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
    """The part of a DTensor on this process, which shares its memory; another tensor itself."""
    if not is_distributed(x):
        return x  # type: ignore[no-any-return]
    local = x.to_local().detach()
    wait = getattr(local, "wait", None)  # of a tensor that a collective is still writing
    return local if wait is None else wait()  # type: ignore[no-any-return]


def whole_norms(entry: Sequence[Any], norm_type: float) -> Tensor:
    """The norm of each gradient of an entry, on the device of the first."""
    norms = foreach.norms_of([held.grad for held in entry], norm_type)
    positions: dict[Shards, list[int]] = defaultdict(list)
    for i, held in enumerate(entry):
        if held.shards is not None:
            positions[held.shards].append(i)
    if not positions:
        return norms

    each = list(norms.unbind())
    for shards, places in positions.items():
        parts = torch.stack([each[i] for i in places])
        whole = shards.whole_norms(parts, norm_type, by_rows=False)
        for i, norm in zip(places, whole.unbind(), strict=True):
            each[i] = norm
    return torch.stack(each)


def in_lists(entry: Sequence[Any]) -> list[list[Any]]:
    """Lists of the sharded gradients of an entry that are regularized together.

    The gradients of a list are spread in one way, and have one dtype and one set of rates. None has
    axes to be rows, or all have.
    """
    lists: dict[Any, list[list[Any]]] = {}
    elements: dict[Any, int] = defaultdict(int)
    for held in entry:
        rates = tuple(held.site.values.items())
        key = held.shards, held.grad.dtype, held.grad.device, rates, min(held.grad.ndim, 2)
        parts = lists.setdefault(key, [[]])
        size = held.parameter.numel()  # of the whole
        if parts[-1] and elements[key] + size > foreach.LARGEST:
            parts.append([])
            elements[key] = 0
        parts[-1].append(held)
        elements[key] += size
    return [part for parts in lists.values() for part in parts]
