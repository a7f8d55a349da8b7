"""The functions of `gradients` for all gradients of an update, in a constant number of operators.

    norm = norms of the units                   a unit is a gradient, or a row of its axis 0
    ratio = max(norm / bound, 1)                1 also where the norm is not finite
    g' = g * ratio ** -0.5 * ratio ** -0.5      float32 would round one very small factor to 0
    g' = g - mean of each row                   centralization

These functions change lists of gradients in place. The gradients of a list are on one device, have
one dtype and at least one element each.

On a CPU there are no launches to save, so an operator loops over the tensors, as
``torch._foreach_*`` do. On a GPU, one buffer in float64 holds all tensors, and the units are its
segments.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
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
"""The largest number of elements of a list, which bounds the buffer in float64."""


def in_lists(
    tensors: Sequence[Tensor], keys: Sequence[Hashable]
) -> tuple[list[list[int]], list[int]]:
    """Return the positions of tensors that these functions take together, and of all others.

    Tensors with equal keys are in one list if their device and dtype are equal. Subclasses of
    Tensor, tensors without elements, and unknown devices and dtypes are in no list. A tensor that
    comes twice is in one list only.
    """
    parts_by_key: dict[Hashable, list[list[int]]] = {}
    elements: Counter[Hashable] = Counter()  # in the last part of each key
    others = []
    listed = set()
    for position, (x, key_of_x) in enumerate(zip(tensors, keys, strict=True)):
        if id(x) in listed or not _may_be_listed(x):
            others.append(position)
            continue
        listed.add(id(x))

        key = (x.device, x.dtype, key_of_x)
        number = x.numel()
        parts = parts_by_key.setdefault(key, [[]])
        if parts[-1] and elements[key] + number > LARGEST:
            parts.append([])
            elements[key] = 0
        parts[-1].append(position)
        elements[key] += number

    lists = []
    for parts in parts_by_key.values():
        lists.extend(parts)
    return lists, others


def _may_be_listed(x: Tensor) -> bool:
    """Return whether a tensor is plain, has elements, and has a known type and device."""
    known = x.device.type in DEVICES and x.dtype in DTYPES
    return known and type(x) in PLAIN and x.numel() > 0


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
        """Return the sums of numbers of the units over the units of each tensor."""
        if self.whole:
            return numbers
        return torch.segment_reduce(numbers, "sum", lengths=self.counts, unsafe=True)


def whole_tensors(tensors: Sequence[Tensor]) -> UnitsOfList:
    """Return the units of tensors that are one unit each."""
    ones = (1,) * len(tensors)
    return _units(ones, _numels(tensors), tensors[0].device)


def rows_of(tensors: Sequence[Tensor], least_axes: int) -> UnitsOfList:
    """Return the rows of axis 0 as units; with fewer than `least_axes` axes, one unit each."""
    rows = []
    for x in tensors:
        rows.append(x.shape[0] if x.ndim >= least_axes else 1)
    return _units(tuple(rows), _numels(tensors), tensors[0].device)


def _numels(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(x.numel() for x in tensors)


@functools.lru_cache(maxsize=64)  # a copy to the device waits for it, so there is one in a training
@torch.inference_mode(False)
def _units(rows: tuple[int, ...], numels: tuple[int, ...], device: torch.device) -> UnitsOfList:
    """Return the units of tensors with these numbers of units and of elements."""
    lengths_of_units = []
    for units, numel in zip(rows, numels, strict=True):
        lengths_of_units.append(numel // max(units, 1))

    counts = torch.tensor(rows)
    lengths = torch.tensor(lengths_of_units).repeat_interleave(counts).to(device)
    sizes = lengths.to(wide_dtype(device))
    return UnitsOfList(rows, numels, lengths, sizes, counts.to(device))


def unit_norms(tensors: Sequence[Tensor], units: UnitsOfList, norm_type: float) -> Tensor:
    """Return the norms of all units, in float64."""
    first = tensors[0]
    safe = norm_type <= SAFE_POWER and first.dtype is not torch.float64  # no overflow in float64
    has_operator = norm_type == math.inf or (safe and norm_type in (1.0, 2.0))
    filled = all(units.numels)  # an empty part of a sharded tensor has a norm of 0
    if units.whole and filled and has_operator:
        norms_of_tensors = foreach_norm(tensors, norm_type, wide_dtype(first.device))
        return torch.stack(norms_of_tensors)
    if first.device.type in LOOPS or not filled:
        norms: Tensor = norms_in_loop(tensors, units.rows, norm_type)
        return norms
    return _norms_of_segments(tensors, units, norm_type, safe)


def _norms_of_segments(
    tensors: Sequence[Tensor], units: UnitsOfList, norm_type: float, safe: bool
) -> Tensor:
    """Return the norms of all units from one buffer; unless `safe`, scale each unit by its peak."""
    flat = _joined(tensors, wide_dtype(tensors[0].device))
    if norm_type != 2.0:
        flat.abs_()
    if norm_type == math.inf:
        return _reduce(flat, "max", units)
    if safe:
        return _norms_of_magnitudes(flat, units, norm_type)

    peak = _reduce(flat.abs_(), "max", units)
    peak = peak.nan_to_num_(nan=1.0, posinf=1.0)
    peak = torch.where(peak > 0, peak, 1.0)
    flat.div_(_spread(peak, units))
    return _norms_of_magnitudes(flat, units, norm_type) * peak


def _norms_of_magnitudes(flat: Tensor, units: UnitsOfList, norm_type: float) -> Tensor:
    """Return the norms of the units of a buffer, which is overwritten."""
    powers = flat.pow_(norm_type)
    sums = _reduce(powers, "sum", units)
    return sums.sqrt_() if norm_type == 2.0 else sums.pow_(1 / norm_type)


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
    ratio = norms / bounds
    ratio.nan_to_num_(nan=1.0, posinf=1.0)
    changed = (ratio > 1.0) * units.sizes

    wide = _wide(grads)
    root = torch.empty_like(ratio, dtype=wide[0].dtype)
    torch.rsqrt(ratio.clamp_min_(1.0), out=root)
    roots = root if root.ndim == 0 else _views(root, units, wide)
    foreach_mul_(wide, roots)
    foreach_mul_(wide, roots)
    _write(grads, wide)
    return units.sum_by_tensor(changed)


def clip_adaptive_(
    grads: Sequence[Tensor],
    parameters: Sequence[Tensor],
    clip_factor: Bound,
    eps: float,
    norm_type: float,
    scale: Bound,
    whole_norms: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, UnitsOfList]:
    """Clip gradients of a loss times `scale` by the norms of the parameters.

    For sharded gradients, `whole_norms` turns norms of the parts into norms of whole units.

    Returns:
        The number of changed elements of each gradient, the ratios of the norms, and their units.
    """
    units = rows_of(grads, least_axes=2)
    both = [*grads, *parameters]
    all_norms = unit_norms(both, rows_of(both, least_axes=2), norm_type)
    if whole_norms is not None:
        all_norms = whole_norms(all_norms)
    norms, weights = all_norms.chunk(2)
    smallest = weights.clamp_min(eps)
    if isinstance(scale, Tensor) or scale != 1.0:
        smallest = smallest * scale
    ratios = norms / smallest
    changed = shrink_(grads, units, ratios, clip_factor)
    return changed, ratios, units


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
    means = _reduce(flat, "mean", units)
    means = means.to(wide[0].dtype)
    foreach_sub_(wide, _views(means, units, wide))
    _write(grads, wide)


def norms_of(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of each gradient, in order, on the device of the first."""
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
    """Return one norm over gradients of any devices and dtypes, on the device of the first."""
    lists, others = in_lists(grads, [None] * len(grads))
    norms = []
    for position in others:
        norm_alone = group_norm(grads[position], norm_type, "tensor")
        norms.append(norm_alone.reshape(1))
    for positions in lists:
        several = [grads[position] for position in positions]
        units = whole_tensors(several)
        norms.append(unit_norms(several, units, norm_type))

    device = grads[0].device
    row = torch.cat([part.to(device) for part in norms])
    has_float64 = any(grad.dtype is torch.float64 for grad in grads)
    if norm_type <= SAFE_POWER and not has_float64:
        norm: Tensor = torch.linalg.vector_norm(row, norm_type)  # can't overflow in float64
        return norm
    return group_norm(row, norm_type, "tensor").reshape(())


def _wide(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors, or copies in float32 of tensors in lower precision."""
    if tensors[0].element_size() >= 4:
        return tensors
    return _parts(_joined(tensors, torch.float32), tensors)


def _write(tensors: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
    if wide is not tensors:
        foreach_copy_(tensors, wide)


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a buffer with the elements of all tensors, row by row."""
    device = tensors[0].device
    buffer = torch.empty(sum(_numels(tensors)), dtype=dtype, device=device)
    foreach_copy_(_parts(buffer, tensors), tensors)
    return buffer


def _parts(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a buffer in the shapes of tensors, and in their strides if dense.

    Equal strides let a GPU work on all tensors at once.
    """
    numbers = list(_numels(like))
    parts = torch.split(buffer, numbers)
    return [_shaped_as(x, part) for x, part in zip(like, parts, strict=True)]


def _shaped_as(x: Tensor, part: Tensor) -> Tensor:
    """Return a flat tensor in the shape of another one, and in its memory format if dense."""
    is_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    if is_last and not x.is_contiguous():
        return part.as_strided(x.shape, x.stride())
    return part.view(x.shape)


def _reduce(buffer: Tensor, how: str, units: UnitsOfList) -> Tensor:
    return torch.segment_reduce(buffer, how, lengths=units.lengths, unsafe=True)


def _spread(numbers: Tensor, units: UnitsOfList) -> Tensor:
    """Return for each element of a buffer the number of its unit."""
    return numbers.repeat_interleave(units.lengths, output_size=sum(units.numels))


def _views(numbers: Tensor, units: UnitsOfList, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the numbers of units as tensors that broadcast to these.

    On a GPU the tensors have equal shapes.
    """
    if numbers.device.type not in LOOPS:
        spread = _spread(numbers, units)
        return _parts(spread, like)

    views = []
    parts = torch.split(numbers, list(units.rows))
    for part, x in zip(parts, like, strict=True):
        others = [1] * (x.ndim - 1)
        views.append(part.view(-1, *others) if x.ndim else part.view(()))
    return views


def _fake_norms(tensors: Sequence[Tensor], rows: Sequence[int], norm_type: float) -> Tensor:
    return tensors[0].new_empty(sum(rows), dtype=wide_dtype(tensors[0].device))


@operator(
    "norms_in_loop(Tensor[] tensors, int[] rows, float norm_type) -> Tensor", fake=_fake_norms
)
def norms_in_loop(tensors: Sequence[Tensor], rows: Sequence[int], norm_type: float) -> Tensor:
    """Return the norms of the units of all tensors, one tensor after the other."""
    norms = []
    for x, row in zip(tensors, rows, strict=True):
        if not x.numel():
            norms.append(x.new_zeros(row, dtype=wide_dtype(x.device)))
            continue
        per: Per = "tensor" if row == 1 else "sample"
        norms_of_x = group_norm(x, norm_type, per)
        norms.append(norms_of_x.reshape(-1))
    return torch.cat(norms)


def _fake_centralize(grads: Sequence[Tensor]) -> None:
    """Do nothing: the fake implementation of an operator that only changes its arguments."""


@operator("centralize_in_loop_(Tensor(a!)[] grads) -> ()", fake=_fake_centralize)
def centralize_in_loop_(grads: Sequence[Tensor]) -> None:
    """Subtract the means of their rows from all gradients, one after the other."""
    for grad in grads:
        axes = list(range(1, grad.ndim))
        dtype = torch.promote_types(grad.dtype, torch.float32)
        means = grad.mean(axes, keepdim=True, dtype=dtype)
        grad.sub_(means)


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
