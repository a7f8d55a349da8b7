"""The functions of `gradients` for all gradients of an update, in a constant number of operators.

    norm = norms of the units                   a unit is a gradient, or a row of its axis 0
    ratio = max(norm / bound, 1)                1 also where the norm is not finite
    g' = g * ratio ** -0.5 * ratio ** -0.5      float32 would round one very small factor to 0
    g' = g - mean of each row                   centralization

These functions change lists of gradients in place. The gradients of a list are on one device, have
one dtype and at least one element each.

On a CPU nothing is launched, so an operator loops over the tensors, as ``torch._foreach_*`` do. On
a GPU the units of all tensors are measured as segments of one buffer in float64.
"""

import functools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._torch import (
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    foreach_sub,
    foreach_sub_,
)
from .gradients import SAFE_POWER, Bound, Per, group_norm
from .masks import wide_dtype
from .operators import operator

LOOPS = {"cpu"}
"""The types of devices on which an operator loops; a test takes the CPU out."""
DEVICES = {"cpu", "cuda"}
"""The types of devices whose backends have all operators that these functions use."""
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
PLAIN = (Tensor, nn.Parameter)
LARGEST = 2**26
"""How many elements a list may have, because of the buffer in float64."""


def in_lists(
    tensors: Sequence[Tensor], keys: Sequence[Hashable]
) -> tuple[list[list[int]], list[int]]:
    """The positions of tensors that these functions take together, and of all others.

    Tensors with equal keys stand in one list, if their device and dtype are equal. Subclasses of
    tensors, tensors without elements and unknown devices and dtypes stand in none. A tensor that
    comes twice stands in one list only.
    """
    lists: dict[Hashable, list[list[int]]] = {}
    elements: Counter[Hashable] = Counter()
    others = []
    listed = set()
    for i, (x, own) in enumerate(zip(tensors, keys, strict=True)):
        known = x.device.type in DEVICES and x.dtype in DTYPES
        if not (known and type(x) in PLAIN and x.numel()) or id(x) in listed:
            others.append(i)
            continue
        listed.add(id(x))
        key = (x.device, x.dtype, own)
        parts = lists.setdefault(key, [[]])
        if parts[-1] and elements[key] + x.numel() > LARGEST:
            parts.append([])
            elements[key] = 0
        parts[-1].append(i)
        elements[key] += x.numel()
    return [part for parts in lists.values() for part in parts], others


@dataclass(frozen=True)
class UnitsOfList:
    """The units of a list of tensors, in order.

    Attributes:
        rows: the number of units in each tensor.
        numels: the number of elements in each tensor.
        lengths: the number of elements in each unit, on the device.
        sizes: the same in float64.
        counts: `rows` on the device.
    """

    rows: tuple[int, ...]
    numels: tuple[int, ...]
    lengths: Tensor
    sizes: Tensor
    counts: Tensor

    @property
    def whole(self) -> bool:
        """Whether each tensor is one unit."""
        return len(self.rows) == len(self.lengths) and set(self.rows) == {1}

    def sum_by_tensor(self, numbers: Tensor) -> Tensor:
        """The sums of numbers of the units over the units of each tensor."""
        if self.whole:
            return numbers
        return torch.segment_reduce(numbers, "sum", lengths=self.counts, unsafe=True)


def whole_tensors(tensors: Sequence[Tensor]) -> UnitsOfList:
    return _units((1,) * len(tensors), _numels(tensors), tensors[0].device)


def rows_of(tensors: Sequence[Tensor], least_axes: int) -> UnitsOfList:
    """Rows of axis 0; a tensor with fewer axes than `least_axes` is one unit."""
    rows = tuple(x.shape[0] if x.ndim >= least_axes else 1 for x in tensors)
    return _units(rows, _numels(tensors), tensors[0].device)


def _numels(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(x.numel() for x in tensors)


@functools.lru_cache(maxsize=64)  # a copy to the device waits for it, so there is one in a training
@torch.inference_mode(False)
def _units(rows: tuple[int, ...], numels: tuple[int, ...], device: torch.device) -> UnitsOfList:
    counts = torch.tensor(rows)
    each = torch.tensor([numel // row for row, numel in zip(rows, numels, strict=True)])
    lengths = each.repeat_interleave(counts).to(device)
    return UnitsOfList(rows, numels, lengths, lengths.to(wide_dtype(device)), counts.to(device))


def unit_norms(tensors: Sequence[Tensor], units: UnitsOfList, norm_type: float) -> Tensor:
    """The norms of all units, in float64."""
    wide = wide_dtype(tensors[0].device)
    safe = norm_type <= SAFE_POWER and tensors[0].dtype is not torch.float64
    if units.whole and norm_type in (1.0, 2.0, math.inf) and (safe or norm_type == math.inf):
        return torch.stack(foreach_norm(tensors, norm_type, wide))
    if tensors[0].device.type in LOOPS:
        norms: Tensor = norms_in_loop(tensors, units.rows, norm_type)
        return norms
    return _norms_of_segments(tensors, units, norm_type, safe)


def _norms_of_segments(
    tensors: Sequence[Tensor], units: UnitsOfList, norm_type: float, safe: bool
) -> Tensor:
    flat = _joined(tensors, wide_dtype(tensors[0].device))
    if norm_type != 2.0:
        flat.abs_()
    peak: Tensor | None = None
    if norm_type == math.inf or not safe:
        peak = _reduce(flat.abs_(), "max", units)
        if norm_type == math.inf:
            return peak
        peak = peak.nan_to_num_(nan=1.0, posinf=1.0)
        peak = torch.where(peak > 0, peak, 1.0)
        flat.div_(_spread(peak, units))
    sums = _reduce(flat.pow_(norm_type), "sum", units)
    norms = sums.sqrt_() if norm_type == 2.0 else sums.pow_(1 / norm_type)
    return norms if peak is None else norms * peak


def shrink_(grads: Sequence[Tensor], units: UnitsOfList, norms: Tensor, bounds: Bound) -> Tensor:
    """Scale each unit with a larger norm down to its bound; count the changed elements.

    Args:
        grads: the gradients, which are changed.
        units: their units.
        norms: the norm of each unit, or one norm of all gradients.
        bounds: the bound of each unit, or one for all.

    Returns:
        The number of changed elements of each gradient.
    """
    ratio = (norms / bounds).nan_to_num_(nan=1.0, posinf=1.0)
    changed = (ratio > 1.0) * units.sizes
    wide = _wide(grads)
    factor = torch.empty_like(ratio, dtype=wide[0].dtype)
    torch.rsqrt(ratio.clamp_min_(1.0), out=factor)

    factors = factor if factor.ndim == 0 else _views(factor, units, wide)
    for _ in range(2):
        foreach_mul_(wide, factors)
    _write(grads, wide)
    return units.sum_by_tensor(changed)


def clip_adaptive_(
    grads: Sequence[Tensor],
    parameters: Sequence[Tensor],
    clip_factor: Bound,
    eps: float,
    norm_type: float,
    scale: Bound,
) -> tuple[Tensor, Tensor, UnitsOfList]:
    """Clip gradients of a loss times `scale` by the norms of the parameters.

    Returns:
        The number of changed elements of each gradient, the ratios of the norms, and their units.
    """
    units = rows_of(grads, least_axes=2)
    both = [*grads, *parameters]
    all_norms = unit_norms(both, rows_of(both, least_axes=2), norm_type)
    norms, weights = all_norms.chunk(2)
    smallest = weights.clamp_min(eps)
    if isinstance(scale, Tensor) or scale != 1.0:
        smallest = smallest * scale
    ratios = norms / smallest
    return shrink_(grads, units, ratios, clip_factor), ratios, units


def centralize_(grads: Sequence[Tensor]) -> None:
    """Subtract the mean of each row from the gradients that have rows of several elements."""
    grads = [grad for grad in grads if grad.ndim > 1 and grad.numel() > grad.shape[0]]
    if not grads:
        return
    if grads[0].device.type in LOOPS:
        centralize_in_loop_(grads)
        return
    units = rows_of(grads, least_axes=2)
    wide = _wide(grads)
    flat = _joined(grads, wide_dtype(grads[0].device))
    means = _reduce(flat, "mean", units).to(wide[0].dtype)
    foreach_sub_(wide, _views(means, units, wide))
    _write(grads, wide)


def norms_of(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of each gradient, in order, on the device of the first."""
    lists, others = in_lists(grads, [None] * len(grads))
    by_position: dict[int, Tensor] = {}
    for positions in lists:
        several = [grads[i] for i in positions]
        row = unit_norms(several, whole_tensors(several), norm_type)
        if len(positions) == len(grads):
            return row
        by_position |= zip(positions, row.unbind(), strict=True)
    for i in others:
        by_position[i] = group_norm(grads[i], norm_type, "tensor").reshape(())
    device = grads[0].device
    return torch.stack([by_position[i].to(device) for i in range(len(grads))])


def common_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """One norm over gradients of any devices and dtypes, on the device of the first."""
    lists, others = in_lists(grads, [None] * len(grads))
    norms = [group_norm(grads[i], norm_type, "tensor").reshape(1) for i in others]
    for positions in lists:
        several = [grads[i] for i in positions]
        norms.append(unit_norms(several, whole_tensors(several), norm_type))
    device = grads[0].device
    row = torch.cat([each.to(device) for each in norms])
    if norm_type <= SAFE_POWER and all(grad.dtype is not torch.float64 for grad in grads):
        norm: Tensor = torch.linalg.vector_norm(row, norm_type)  # can't overflow in float64
        return norm
    return group_norm(row, norm_type, "tensor").reshape(())


def _wide(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors, or copies in float32 of tensors in lower precision."""
    if tensors[0].element_size() >= 4:
        return tensors
    return _parts(_joined(tensors, torch.float32), tensors)


def _write(tensors: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
    if wide is not tensors:
        foreach_copy_(tensors, wide)


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A buffer with the elements of all tensors, row by row."""
    device = tensors[0].device
    buffer = torch.empty(sum(_numels(tensors)), dtype=dtype, device=device)
    foreach_copy_(_parts(buffer, tensors), tensors)
    return buffer


def _parts(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a buffer as tensors of these shapes, and of their strides if they are dense.

    Equal strides let a GPU work on all tensors at once.
    """
    shaped = []
    for part, x in zip(torch.split(buffer, list(_numels(like))), like, strict=True):
        if x.is_contiguous():
            shaped.append(part.view(x.shape))
        elif x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
            shaped.append(part.as_strided(x.shape, x.stride()))
        else:
            shaped.append(part.view(x.shape))
    return shaped


def _reduce(buffer: Tensor, how: str, units: UnitsOfList) -> Tensor:
    return torch.segment_reduce(buffer, how, lengths=units.lengths, unsafe=True)


def _spread(numbers: Tensor, units: UnitsOfList) -> Tensor:
    """The number of its unit for each element of a buffer."""
    return numbers.repeat_interleave(units.lengths, output_size=sum(units.numels))


def _views(numbers: Tensor, units: UnitsOfList, like: Sequence[Tensor]) -> list[Tensor]:
    """The numbers of units as tensors that broadcast to these; on a GPU they have equal shapes."""
    if numbers.device.type not in LOOPS:
        return _parts(_spread(numbers, units), like)
    parts = torch.split(numbers, list(units.rows))
    shapes = [(-1, *[1] * (x.ndim - 1)) if x.ndim else () for x in like]
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _fake_norms(tensors: Sequence[Tensor], rows: Sequence[int], norm_type: float) -> Tensor:
    return tensors[0].new_empty(sum(rows), dtype=wide_dtype(tensors[0].device))


@operator(
    "norms_in_loop(Tensor[] tensors, int[] rows, float norm_type) -> Tensor", fake=_fake_norms
)
def norms_in_loop(tensors: Sequence[Tensor], rows: Sequence[int], norm_type: float) -> Tensor:
    """The norms of the units of all tensors, one tensor after the other."""
    norms = []
    for x, row in zip(tensors, rows, strict=True):
        per: Per = "tensor" if row == 1 else "sample"
        norms.append(group_norm(x, norm_type, per).reshape(-1))
    return torch.cat(norms)


def _fake_centralize(grads: Sequence[Tensor]) -> None:
    """The fake implementation of an operator that only changes its arguments."""


@operator("centralize_in_loop_(Tensor(a!)[] grads) -> ()", fake=_fake_centralize)
def centralize_in_loop_(grads: Sequence[Tensor]) -> None:
    """Subtract the means of their rows from all gradients, one after the other."""
    for grad in grads:
        axes = list(range(1, grad.ndim))
        dtype = torch.promote_types(grad.dtype, torch.float32)
        grad.sub_(grad.mean(axes, keepdim=True, dtype=dtype))


def pull_(
    grads: Sequence[Tensor],
    parameters: Sequence[Tensor],
    starts: Sequence[Tensor],
    weight: float,
    scale: Bound,
) -> tuple[Tensor, Tensor]:
    """Add ``weight * scale * (parameter - start)`` to each gradient.

    Returns the number of changed elements of each gradient, and half of each squared distance.
    """
    differences = foreach_sub([x.detach() for x in parameters], starts)
    norms = torch.stack(foreach_norm(differences, 2.0, wide_dtype(grads[0].device)))
    penalties = norms.square() / 2

    counts = whole_tensors(grads).sizes
    if weight == 0.0:
        return torch.zeros_like(counts), penalties

    foreach_mul_(differences, weight * scale)
    foreach_add_(grads, differences)
    return counts, penalties
