"""The functions of `gradients`, and `l2_sp`, for all gradients of an update at once.

Each calls a constant number of operators, besides views, however many gradients there are.
``sites.updates``, ``sites.memories`` and ``sites.shards`` call them when the optimizer begins its
step, and so do the methods ``apply_all`` of regularizers.

    norm = norm of each unit                    a unit is a gradient, or a row of its axis 0
    ratio = max(norm / bound, 1)                1 also where the norm is not finite
    g' = g * ratio ** -0.5 * ratio ** -0.5      float32 would round one very small factor to 0
    g' = g - mean of each row                   centralization
    g' = g + weight * (w - w0)                  a pull to the first values w0 of the parameters w

A function whose name ends in an underscore changes a list of gradients in place. The gradients of a
list are on one device and have one dtype. Each has at least one element, except parts of sharded
gradients, which may be empty. `norms_of` and `common_norm` take any gradients: they ask
`positions_in_lists` for such lists, and take all other gradients one by one.

Most operators are ``torch._foreach_*``. They have no means, no norms of rows, and not every norm.
There are two ways to compute these:

- On a GPU, all tensors are copied to one buffer in float64. The units are its segments.
- On a CPU, there are no launches to save, so one operator of this package loops over the tensors.
  It also computes the norms of lists with empty tensors on a GPU.
"""

import functools
import math
from collections import defaultdict
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
from .gradients import SAFE_POWER, Bound, Per, group_norm, relative_norms
from .masks import wide_dtype
from .operators import operator

LOOPS = {"cpu"}
"""The types of devices on which an operator loops; a test takes the CPU out."""
DEVICES = {"cpu", "cuda"}
"""The types of devices whose backends have all operators that these functions use."""
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
PLAIN_TYPES = (Tensor, nn.Parameter)
"""The types of tensors that these functions take. A subclass may replace operators."""
MOST_ELEMENTS = 2**26
"""The largest number of elements of a list of several tensors. It bounds the buffer in float64."""


def positions_in_lists(
    tensors: Sequence[Tensor], keys: Sequence[Hashable]
) -> tuple[list[list[int]], list[int]]:
    """Return lists of the positions of tensors that belong together, and all other positions.

    Tensors with equal keys are in one list if their device and dtype are equal. Subclasses of
    Tensor, tensors without elements, and unknown devices and dtypes are in no list. If a tensor
    comes several times, its first position is in a list, and its later positions are others.
    """
    groups: dict[tuple[torch.device, torch.dtype, Hashable], list[int]] = defaultdict(list)
    others = []
    seen = set()
    # no function of Python is called for a tensor, because each update does this for each parameter
    for position, (x, key) in enumerate(zip(tensors, keys, strict=True)):
        if type(x) in PLAIN_TYPES and x.numel() and id(x) not in seen:
            seen.add(id(x))
            groups[x.device, x.dtype, key].append(position)
        else:
            others.append(position)

    lists: list[list[int]] = []
    for (device, dtype, _), positions in groups.items():
        if device.type in DEVICES and dtype in DTYPES:
            lists.extend(_in_small_parts(tensors, positions))
        else:
            others.extend(positions)
    return lists, sorted(others)


def _in_small_parts(tensors: Sequence[Tensor], positions: Sequence[int]) -> list[list[int]]:
    """Split positions into parts of at most `MOST_ELEMENTS` elements, or of one tensor."""
    parts: list[list[int]] = [[]]
    elements = 0
    for position in positions:
        numel = tensors[position].numel()
        if parts[-1] and elements + numel > MOST_ELEMENTS:
            parts.append([])
            elements = 0
        parts[-1].append(position)
        elements += numel
    return parts


@dataclass(frozen=True)
class UnitsOfList:
    """How a list of tensors is divided into units, in the order of the tensors.

    The attributes that are tensors are on the device of the list.

    Attributes:
        counts: the number of units in each tensor.
        numels: the number of elements in each tensor.
        lengths: the number of elements in each unit, as a tensor of integers.
        sizes: `lengths` in float64.
        counts_on_device: `counts` as a tensor.
    """

    counts: tuple[int, ...]
    numels: tuple[int, ...]
    lengths: Tensor
    sizes: Tensor
    counts_on_device: Tensor

    @functools.cached_property
    def whole(self) -> bool:
        """Whether each tensor is one unit."""
        return set(self.counts) == {1}

    def sum_by_tensor(self, numbers: Tensor) -> Tensor:
        """Return a sum for each tensor, from a number for each unit."""
        if self.whole:
            return numbers
        return torch.segment_reduce(numbers, "sum", lengths=self.counts_on_device, unsafe=True)


def whole_tensors(tensors: Sequence[Tensor]) -> UnitsOfList:
    """Return the units of tensors that are one unit each."""
    ones = (1,) * len(tensors)
    return _units(ones, _numels(tensors), tensors[0].device)


def rows_as_units(tensors: Sequence[Tensor], least_axes: int) -> UnitsOfList:
    """Return the rows of axis 0 as units. A tensor with fewer axes than `least_axes` is a unit."""
    counts = []
    for x in tensors:
        counts.append(x.shape[0] if x.ndim >= least_axes else 1)
    return _units(tuple(counts), _numels(tensors), tensors[0].device)


def _numels(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([x.numel() for x in tensors])


# kept from update to update, because a copy to the device waits; made outside of inference mode,
# because autograd can't save tensors of that mode
@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _units(counts: tuple[int, ...], numels: tuple[int, ...], device: torch.device) -> UnitsOfList:
    """Return the units of tensors, from the number of units and of elements in each tensor."""
    length_by_tensor = []
    for count, numel in zip(counts, numels, strict=True):
        length_by_tensor.append(numel // max(count, 1))

    count_tensor = torch.tensor(counts)
    lengths = torch.tensor(length_by_tensor).repeat_interleave(count_tensor).to(device)
    sizes = lengths.to(wide_dtype(device))
    return UnitsOfList(counts, numels, lengths, sizes, count_tensor.to(device))


def unit_norms(tensors: Sequence[Tensor], units: UnitsOfList, norm_type: float) -> Tensor:
    """Return the norms of all units, in float64."""
    first = tensors[0]
    # in float64, powers of values in lower precision can't overflow
    is_safe = norm_type <= SAFE_POWER and first.dtype is not torch.float64
    has_operator = norm_type == math.inf or (is_safe and norm_type in (1.0, 2.0))
    none_is_empty = all(units.numels)  # an empty part of a sharded tensor has a norm of 0
    if units.whole and none_is_empty and has_operator:
        norms_of_tensors = foreach_norm(tensors, norm_type, wide_dtype(first.device))
        return torch.stack(norms_of_tensors)

    if first.device.type in LOOPS or not none_is_empty:
        norms: Tensor = norms_in_loop(tensors, units.counts, norm_type)
        return norms
    return _norms_of_segments(tensors, units, norm_type, is_safe)


def _norms_of_segments(
    tensors: Sequence[Tensor], units: UnitsOfList, norm_type: float, is_safe: bool
) -> Tensor:
    """Return the norms of all units from one buffer.

    Unless `is_safe`, powers could overflow. So each unit is divided by its largest magnitude first.
    """
    buffer = _joined(tensors, wide_dtype(tensors[0].device))
    if norm_type != 2.0 or not is_safe:
        buffer.abs_()
    if norm_type == math.inf:
        return _reduce(buffer, "max", units)
    if is_safe:
        return _norms_of_magnitudes(buffer, units, norm_type)

    largest = _reduce(buffer, "max", units)
    # a unit that is zero or not finite is divided by 1, so that its norm stays 0, NaN or Inf
    largest = largest.nan_to_num_(nan=1.0, posinf=1.0)
    largest = torch.where(largest > 0, largest, 1.0)
    buffer.div_(_spread(largest, units))
    return _norms_of_magnitudes(buffer, units, norm_type) * largest


def _norms_of_magnitudes(buffer: Tensor, units: UnitsOfList, norm_type: float) -> Tensor:
    """Return the norms of the units of a buffer of magnitudes, which is overwritten.

    For the norm 2, the values may have signs.
    """
    powers = buffer.pow_(norm_type)
    sums = _reduce(powers, "sum", units)
    return sums.sqrt_() if norm_type == 2.0 else sums.pow_(1 / norm_type)


def shrink_(grads: Sequence[Tensor], units: UnitsOfList, norms: Tensor, bounds: Bound) -> Tensor:
    """Scale each unit whose norm is above its bound down to the bound.

    Args:
        grads: the gradients, which are changed.
        units: their units.
        norms: the norm of each unit, or one norm of all gradients.
        bounds: the bound of each unit, or one for all.

    Returns:
        The number of changed elements of each gradient.
    """
    ratio = norms / bounds
    ratio.nan_to_num_(nan=1.0, posinf=1.0)  # units whose norm is not finite stay as they are
    changed = (ratio > 1.0) * units.sizes

    wide = _wide(grads)
    # the square root of each factor, computed in float64 and rounded once
    root = torch.empty_like(ratio, dtype=wide[0].dtype)
    torch.rsqrt(ratio.clamp_min_(1.0), out=root)

    # one norm of all gradients has one root
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
    reduce_norms: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, UnitsOfList]:
    """Clip gradients of a loss times `scale` by the norms of the parameters.

    For sharded gradients, `reduce_norms` turns the norms of their parts into norms of whole units.

    Returns:
        The number of changed elements of each gradient, the ratios of the norms, and their units.
    """
    units = rows_as_units(grads, least_axes=2)
    units_of_both = _units(units.counts * 2, units.numels * 2, grads[0].device)
    all_norms = unit_norms([*grads, *parameters], units_of_both, norm_type)
    if reduce_norms is not None:
        all_norms = reduce_norms(all_norms)
    norms, parameter_norms = all_norms.chunk(2)
    ratios = relative_norms(norms, parameter_norms, eps, scale)
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

    units = rows_as_units(grads, least_axes=2)
    wide = _wide(grads)
    buffer = _joined(grads, wide_dtype(grads[0].device))
    means = _reduce(buffer, "mean", units)
    means = means.to(wide[0].dtype)
    foreach_sub_(wide, _views(means, units, wide))
    _write(grads, wide)


def pull_(
    grads: Sequence[Tensor],
    parameters: Sequence[Tensor],
    starts: Sequence[Tensor],
    weight: float,
    scale: Bound,
) -> tuple[Tensor, Tensor]:
    """Add ``weight * scale * (parameter - start)`` to each gradient, rounded once.

    Returns the number of changed elements of each gradient, and half of each squared distance. Do
    not change the first result in place: it may be the cached `UnitsOfList.sizes`.
    """
    values = [x.detach() for x in parameters]
    differences = foreach_sub(_wide(values), _wide(starts))
    distances = foreach_norm(differences, 2.0, wide_dtype(grads[0].device))
    penalties = torch.stack(distances).square() / 2

    sizes = whole_tensors(grads).sizes
    if weight == 0.0:
        return torch.zeros_like(sizes), penalties

    foreach_mul_(differences, weight * scale)
    wide = _wide(grads)
    foreach_add_(wide, differences)
    _write(grads, wide)
    return sizes, penalties


def norms_of(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of each gradient, in order, on the device of the first."""
    lists, others = positions_in_lists(grads, [None] * len(grads))
    norm_by_position: dict[int, Tensor] = {}
    for positions in lists:
        several = [grads[i] for i in positions]
        norms = unit_norms(several, whole_tensors(several), norm_type)
        if len(positions) == len(grads):
            return norms
        norm_by_position.update(zip(positions, norms.unbind(), strict=True))

    for i in others:
        norm_by_position[i] = group_norm(grads[i], norm_type, "tensor").reshape(())
    device = grads[0].device
    return torch.stack([norm_by_position[i].to(device) for i in range(len(grads))])


def common_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return one norm over gradients of any devices and dtypes, on the device of the first."""
    lists, others = positions_in_lists(grads, [None] * len(grads))
    parts = []
    for position in others:
        norm_alone = group_norm(grads[position], norm_type, "tensor")
        parts.append(norm_alone.reshape(1))
    for positions in lists:
        several = [grads[position] for position in positions]
        units = whole_tensors(several)
        parts.append(unit_norms(several, units, norm_type))

    device = grads[0].device
    norms = parts[0] if len(parts) == 1 else torch.cat([part.to(device) for part in parts])
    has_float64 = torch.float64 in {grad.dtype for grad in grads}
    if norm_type <= SAFE_POWER and not has_float64:
        norm: Tensor = torch.linalg.vector_norm(norms, norm_type)  # can't overflow in float64
        return norm
    return group_norm(norms, norm_type, "tensor").reshape(())


def _wide(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors themselves, or copies in float32 if they have a lower precision.

    After a change of the result, `_write` copies it back.
    """
    if tensors[0].element_size() >= 4:
        return tensors
    return _parts(_joined(tensors, torch.float32), tensors)


def _write(tensors: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
    """Write `wide`, the result of `_wide`, to the tensors if it is a copy of them."""
    if wide is not tensors:
        foreach_copy_(tensors, wide)


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a buffer with the elements of all tensors, one tensor after the other."""
    numel = sum(_numels(tensors))
    buffer = torch.empty(numel, dtype=dtype, device=tensors[0].device)
    foreach_copy_(_parts(buffer, tensors), tensors)
    return buffer


def _parts(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a buffer in the shapes and memory formats of tensors.

    A part is in channels_last if its tensor is 4-D and in channels_last; others are contiguous.
    Equal strides let a GPU work on all tensors at once.
    """
    shapes = tuple([x.shape for x in like])
    strides = tuple([x.stride() for x in like])
    return [buffer.as_strided(*layout) for layout in _layouts(shapes, strides)]


# kept from update to update, because this takes longer than the views
@functools.lru_cache(maxsize=64)
def _layouts(
    shapes: Sequence[tuple[int, ...]], strides: Sequence[tuple[int, ...]]
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Return the shape, the strides and the beginning of each part of a buffer; see `_parts`."""
    layouts = []
    start = 0
    for shape, stride in zip(shapes, strides, strict=True):
        x = torch.empty_strided(shape, stride, device="meta")
        is_channels_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
        if not is_channels_last or x.is_contiguous():
            stride = torch.empty(shape, device="meta").stride()
        layouts.append((shape, stride, start))
        start += x.numel()
    return layouts


def _reduce(buffer: Tensor, operation: str, units: UnitsOfList) -> Tensor:
    """Return a number for each unit of a buffer: its ``"sum"``, ``"mean"`` or ``"max"``."""
    return torch.segment_reduce(buffer, operation, lengths=units.lengths, unsafe=True)


def _spread(numbers: Tensor, units: UnitsOfList) -> Tensor:
    """Return, for each element of a buffer, the entry of `numbers` that belongs to its unit."""
    return numbers.repeat_interleave(units.lengths, output_size=sum(units.numels))


def _views(numbers: Tensor, units: UnitsOfList, like: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each tensor, the numbers of its units in a shape that broadcasts to it.

    On a GPU, each result has the full shape of its tensor, so that one kernel takes all tensors.
    """
    if numbers.device.type not in LOOPS:
        spread = _spread(numbers, units)
        return _parts(spread, like)

    views = []
    numbers_by_tensor = torch.split(numbers, list(units.counts))
    for of_tensor, x in zip(numbers_by_tensor, like, strict=True):
        ones = [1] * (x.ndim - 1)
        shape = [-1, *ones] if x.ndim else []
        views.append(of_tensor.view(shape))
    return views


def _fake_norms(tensors: Sequence[Tensor], counts: Sequence[int], norm_type: float) -> Tensor:
    return tensors[0].new_empty(sum(counts), dtype=wide_dtype(tensors[0].device))


@operator(
    "norms_in_loop(Tensor[] tensors, int[] counts, float norm_type) -> Tensor", fake=_fake_norms
)
def norms_in_loop(tensors: Sequence[Tensor], counts: Sequence[int], norm_type: float) -> Tensor:
    """Return the norms of the units of all tensors, one tensor after the other."""
    norms = []
    for x, count in zip(tensors, counts, strict=True):
        if not x.numel():
            norms.append(x.new_zeros(count, dtype=wide_dtype(x.device)))
            continue
        per: Per = "tensor" if count == 1 else "sample"  # the units are rows of axis 0
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
