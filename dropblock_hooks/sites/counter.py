"""Counts that only grow, snapshots of them, and windows between two snapshots.

Each site has a `Counter`, `LiveSite.tally`. The `Run` has another one for the forwards of the
model. `LiveSite` counts calls in the attributes of its counter, and `perform` adds the elements
with `Counter.add`. `Run.close_window` closes the windows when an epoch ends.

The norms of gradients are counted in a histogram. It is one tensor:

    [sum of the norms, bin 0, bin 1, ..., bin 513, largest norm of all, largest norm in the window]
     SUM               BINS                        LARGEST_OF_ALL       LARGEST_IN_WINDOW

Bin 0 counts norms below 2**-64, and negative values of a penalty. In quantiles, they are 0. The
next 512 bins cover a quarter of an octave each. An octave is a factor of two. Bin 513 counts norms
from 2**64 on. A quantile is found by interpolation in a bin, so its relative error is below 19 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import FakeTensor, is_tracing, transforming
from ..checks import PROBABILITY, as_number
from ..functional.cells import LARGEST, norms_together, size_of, with_largest
from ..functional.masks import wide_dtype

_BINS_PER_OCTAVE = 4
_BIN_OF_ONE = 257  # the bin that begins at a norm of 1
_LAST_BIN = 513
SUM = 0
BINS = slice(1, -LARGEST)
LARGEST_OF_ALL = -LARGEST
LARGEST_IN_WINDOW = -1
HISTOGRAM_LENGTH = 1 + (_LAST_BIN + 1) + LARGEST  # the sum, the bins, and the two largest norms
_MOST_WAITING = 64  # tensors that wait to be added up together, because each launch takes time
_MOST_WAITING_NORMS = 2**20  # a `JointCounts` keeps fewer norms, which bounds its memory


class Norms:
    """How large gradient norms were before a bound, in units of the unscaled loss.

    `ClipGradNorm` has the norms of gradients, samples or channels. `ClampGrad` has the largest
    magnitude of each gradient. If it has only one bound, it has the largest value in the direction
    of that bound. Penalties have the values of the penalty. Norms that are not finite are left out.
    Negative values of a penalty count in `mean`, and elsewhere as 0.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 2))
        >>> attached = attach(model, {"0": ClipGradNorm(1.0, per="sample")})
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> attached.sites[0].norms.count
        4

    Attributes:
        count: the number of norms.
        mean: the mean; None without norms.
        largest: the largest norm; None without norms.
    """

    def __init__(self, histogram: Tensor | None) -> None:
        values = [0.0] * HISTOGRAM_LENGTH
        if histogram is not None:
            values = histogram.tolist()
        self._bins: list[float] = values[BINS]
        self.count = round(sum(self._bins))
        self.mean: float | None = None
        self.largest: float | None = None
        if self.count:
            self.mean = values[SUM] / self.count
            self.largest = values[LARGEST_OF_ALL]

    def quantile(self, q: float) -> float | None:
        """Return the norm that a share `q` of the norms does not exceed; None without norms.

        The relative error is below 19 %. The largest norm is exact.

        Args:
            q: the share, in [0, 1].

        Raises:
            ValueError: if `q` is not in [0, 1].
            TypeError: if `q` is no number.
        """
        q = as_number("q", q, allowed=PROBABILITY)
        if self.largest is None:
            return None
        not_above = q * self.count * (1 - 1e-12)  # 0.1 * 30 is slightly more than 3
        rank = max(1, math.ceil(not_above))
        if rank == self.count:
            return self.largest
        for place, number in enumerate(self._bins):
            if rank <= number:
                share = (rank - 0.5) / number
                return self._in_bin(place, share)
            rank -= round(number)
        return self.largest

    def _in_bin(self, place: int, share: float) -> float:
        """Interpolate in a bin, as if the logarithms of its norms were evenly spaced.

        Args:
            place: the number of the bin.
            share: the share of its norms that are smaller.
        """
        if place == 0:
            return 0.0
        octave = (place - _BIN_OF_ONE) / _BINS_PER_OCTAVE
        lower = 2**octave
        upper = 2 ** (octave + 1 / _BINS_PER_OCTAVE)
        if self.largest is not None and (place == _LAST_BIN or self.largest < upper):
            upper = max(lower, self.largest)
        return float(lower * (upper / lower) ** share)

    def __repr__(self) -> str:
        return f"Norms(count={self.count}, mean={self.mean}, largest={self.largest})"


def with_norms(histogram: Tensor, norms: Tensor) -> Tensor:
    """Return a histogram with more norms. Norms that are not finite are left out."""
    flat = norms.reshape(-1).to(histogram.dtype)
    norms, ones, places = _binned(flat)
    place_of_sum = torch.zeros_like(places)
    histogram = histogram.index_add(0, places, ones)
    histogram = histogram.index_add(0, place_of_sum, norms)
    if not norms.numel():
        return histogram
    return with_largest(histogram, norms.amax())


def with_norms_of_several(histograms: Tensor, norms: Tensor, owners: Tensor) -> Tensor:
    """Return several histograms, one in each row, with more norms.

    Args:
        histograms: the histograms.
        norms: the norms.
        owners: the row of each norm.
    """
    width = histograms.shape[1]
    norms, ones, places = _binned(norms.to(histograms.dtype))

    first = owners * width  # where the histogram of each norm begins
    flat = histograms.reshape(-1)
    flat = flat.index_add(0, first + places, ones)
    flat = flat.index_add(0, first, norms)
    for place in range(width - LARGEST, width):
        flat = flat.scatter_reduce(0, first + place, norms, "amax")
    return flat.view(histograms.shape)


def _binned(norms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare norms for a histogram.

    Returns the norms, with 0 where they are not finite; 1 for each finite norm and 0 for others;
    and the place of the bin of each norm in the histogram.
    """
    is_finite = norms.abs() < math.inf  # False for NaN, too
    norms = norms.where(is_finite, 0.0)
    octaves = norms.clamp(min=0.0).log2() * _BINS_PER_OCTAVE + _BIN_OF_ONE  # -inf for a norm of 0
    bins = octaves.clamp(0, _LAST_BIN).long()
    places = bins + 1  # behind the sum
    ones = is_finite.to(norms.dtype)
    return norms, ones, places


def _in_one_row(tensors: Sequence[Tensor]) -> Tensor:
    """Return all values of tensors in one row, on the device of the last tensor."""
    device = tensors[-1].device
    return torch.cat([x.to(device).reshape(-1) for x in tensors])


def has_data(x: Any) -> bool:
    """Return whether `x` is a tensor with numbers, which may be kept.

    A tensor of a trace or of a transform must not be kept, because it is invalid afterwards.
    """
    traced = transforming() or is_tracing()
    return isinstance(x, Tensor) and not (traced or x.is_meta or isinstance(x, FakeTensor))


class Snapshot(NamedTuple):
    """The totals of a counter at one moment, or how much they grew between two moments."""

    evaluated: int = 0  # calls of the layer in evaluation mode
    trained: int = 0  # calls in training mode
    active: int = 0  # calls in which the regularizer acted; for gradients, the gradients it saw
    off: int = 0  # calls in training mode while the attachment was switched off
    failed: int = 0  # training forwards of the model that raised an error; 0 for a site
    affected: Any = 0  # elements that were dropped or changed; a tensor until it is read
    total: int = 0  # elements that passed
    expected: float = 0.0  # the sum of the nominal rates over these elements
    histogram: Tensor | None = None  # the histogram of norms before a bound

    @property
    def calls(self) -> int:
        """Calls of the layer in both modes."""
        return self.evaluated + self.trained

    @property
    def norms(self) -> Norms:
        """The norms before a bound. Reading them waits for the device."""
        return Norms(self.histogram)

    def share(self) -> float | None:
        """Return the share of the elements that were dropped or changed; None without elements."""
        return self.affected / self.total if self.total else None

    def calls_only(self) -> Snapshot:
        """Return the same counts without elements and norms."""
        return Snapshot(
            evaluated=self.evaluated, trained=self.trained, active=self.active, off=self.off
        )

    def plus(self, other: Snapshot, sign: int = 1) -> Snapshot:
        """Return the sum, for example over ranks; ``sign=-1`` returns the growth since `other`."""
        return Snapshot(
            evaluated=self.evaluated + sign * other.evaluated,
            trained=self.trained + sign * other.trained,
            active=self.active + sign * other.active,
            off=self.off + sign * other.off,
            failed=self.failed + sign * other.failed,
            affected=self.affected + sign * other.affected,
            total=self.total + sign * other.total,
            expected=self.expected + sign * other.expected,
            histogram=self._histogram_with(other.histogram, sign),
        )

    def _histogram_with(self, other: Tensor | None, sign: int) -> Tensor | None:
        """Return the sum of this histogram and another one; with a negative sign, the difference.

        The difference is the histogram of a window. In it, both largest norms are that of the
        window.
        """
        histogram = self.histogram
        if histogram is None:
            return other
        if other is None:
            return histogram

        other = other.to(histogram.device)
        if sign > 0:
            return norms_together(histogram, other)
        difference = histogram - other
        difference[LARGEST_OF_ALL:] = histogram[LARGEST_IN_WINDOW]
        return difference

    def read(self) -> Snapshot:
        """Return the same counts with numbers instead of tensors. This waits for the device."""
        histogram = None if self.histogram is None else self.histogram.cpu().double()
        return self._replace(affected=int(self.affected), histogram=histogram)


class Counter:
    """The totals of a site, and the window that is open.

    Tensors are never changed in place, because snapshots hold them.
    """

    def __init__(self) -> None:
        self.evaluated = 0
        self.trained = 0
        self.active = 0
        self.off = 0
        self.failed = 0
        self.affected: Any = 0
        self.total = 0
        self.expected = 0.0
        self.histogram: Tensor | None = None
        self._waiting_affected: list[Tensor] = []  # not in `affected` yet
        self._waiting_norms: list[Tensor] = []  # not in `histogram` yet
        self.joint: JointCounts | None = None  # which may hold counts of this counter
        self.map_size: tuple[int, ...] | None = None  # the spatial size of the last tensor
        self.map_varies = False  # whether a tensor of another size came before
        self._begun = Snapshot()  # the totals when the open window began
        self.closed = Snapshot()  # the growth in the window before

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {**self.__dict__, "joint": None}

    def add(
        self, affected: Any, total: int, rate: float, size: Any = None, norms: Tensor | None = None
    ) -> None:
        """Add one active call.

        Args:
            affected: how many elements were changed: an integer or a tensor. If it is None, or a
                tensor without numbers, only the call is counted, without elements and norms.
            total: the number of elements.
            rate: the nominal rate.
            size: the spatial size of the tensor; None without a map.
            norms: the norms of gradients before a bound; None without a bound.
        """
        self.active += 1
        if size is not None and self.map_size != size:
            self.note_size(size)
        if affected is None:
            return

        if isinstance(affected, int):
            self.affected = self.affected + affected
        elif has_data(affected):
            self._waiting_affected.append(affected.detach() if affected.requires_grad else affected)
        else:
            return
        if type(norms) is Tensor and not norms.is_meta:  # as `has_data`, but quicker
            self._waiting_norms.append(norms.detach() if norms.requires_grad else norms)
        if (
            len(self._waiting_affected) >= _MOST_WAITING
            or len(self._waiting_norms) >= _MOST_WAITING
        ):
            self._add_up()
        self.total += total
        self.expected += rate * total

    def add_joint(self, affected: Tensor, histogram: Tensor | None) -> None:
        """Add the changed elements and the histogram that its `JointCounts` has collected."""
        self._waiting_affected.append(affected)
        self._add_up()
        if histogram is not None:
            self._add_histogram(histogram.clone())  # it is a view of the histograms of all

    def settle(self) -> None:
        """Let its `JointCounts` hand over the counts that it holds."""
        if self.joint is not None:
            self.joint.settle()

    def note_size(self, size: Sequence[int]) -> None:
        """Keep the spatial size of a tensor, and note whether an earlier size was different."""
        if self.map_size != tuple(size):
            self.map_varies |= self.map_size is not None
            self.map_size = tuple(size)

    def add_compiled(self, counts: Sequence[float], histogram: Tensor | None) -> None:
        """Add the counts of compiled code.

        Args:
            counts: a row of counts, in the order of ``functional.cells``.
            histogram: a histogram of norms; None without norms.
        """
        trained, evaluated, active, off, affected, total, expected, size = counts
        self.trained += round(trained)
        self.evaluated += round(evaluated)
        self.active += round(active)
        self.off += round(off)
        self.total += round(total)
        self.affected = self.affected + round(affected)
        self.expected += expected
        if size:
            self.note_size(size_of(round(size)))
        if histogram is not None:
            self._add_up()
            self._add_histogram(histogram.to("cpu", torch.float64, copy=True))

    def _add_histogram(self, histogram: Tensor) -> None:
        """Add a histogram. The tensor is kept, so the caller must not change it."""
        if self.histogram is not None:
            histogram = norms_together(self.histogram.to(histogram), histogram)
        self.histogram = histogram

    def _begin_largest(self) -> None:
        """Set the largest norm of the window to 0, because a new window begins."""
        if self.histogram is not None:
            self.histogram = self.histogram.clone()
            # an assigned number would be copied to a GPU, which waits
            self.histogram[LARGEST_IN_WINDOW].zero_()

    def _add_up(self) -> None:
        """Add up the waiting numbers and norms, with a constant number of kernels."""
        if self._waiting_affected:
            added = _in_one_row(self._waiting_affected).sum()
            self._waiting_affected = []
            before = self.affected
            if isinstance(before, Tensor):
                before = before.to(added.device)  # the model may have moved
            self.affected = added + before

        if self._waiting_norms:
            norms = _in_one_row(self._waiting_norms)
            self._waiting_norms = []
            norms = norms.to(wide_dtype(norms.device))
            histogram = norms.new_zeros(HISTOGRAM_LENGTH)
            if self.histogram is not None:
                histogram = self.histogram.to(norms)
            self.histogram = with_norms(histogram, norms)

    def life(self) -> Snapshot:
        """Return the totals since attaching, including a loaded state."""
        self.settle()
        self._add_up()
        return Snapshot(
            evaluated=self.evaluated,
            trained=self.trained,
            active=self.active,
            off=self.off,
            failed=self.failed,
            affected=self.affected,
            total=self.total,
            expected=self.expected,
            histogram=self.histogram,
        )

    @property
    def was_trained(self) -> bool:
        """Whether the open window has a call in training mode, or a gradient."""
        begun = self._begun
        return self.trained != begun.trained or self.active != begun.active

    def window(self) -> Snapshot:
        """Return the growth since the window began.

        A window begins with an epoch, and with attaching. Loading a state begins one for calls and
        norms only, and `Attachment.set` for elements and norms only.
        """
        return self.life().plus(self._begun, -1)

    def shown(self) -> Snapshot:
        """Return the open window, or the last closed one if no element was counted since."""
        window = self.window()
        return window if window.total else self.closed

    def close_window(self) -> None:
        """Close the open window and begin the next one."""
        life = self.life()
        self.closed = life.plus(self._begun, -1)
        self._begun = life
        self._begin_largest()

    def forget_elements(self) -> None:
        """Begin a new window for elements and norms after `Attachment.set`, but not for calls."""
        self.closed = self.closed.calls_only()
        begun = self._begun
        self._begun = self.life()._replace(
            evaluated=begun.evaluated,
            trained=begun.trained,
            active=begun.active,
            off=begun.off,
        )
        self._begin_largest()

    def set_counts(self, life: Snapshot, window: Snapshot) -> None:
        """Replace the totals and the open window, by those of a state or of a sum over ranks."""
        self.settle()  # takes the counts that `JointCounts` holds, so that they are replaced, too
        self._begun = life.plus(window, -1)
        self.closed = Snapshot()
        self._waiting_affected = []
        self._waiting_norms = []
        self._set_totals(life)

    def _set_totals(self, totals: Snapshot) -> None:
        """Set all totals."""
        for name, total in totals._asdict().items():
            setattr(self, name, total)

    def plus(self, other: Counter) -> Counter:
        """Return the sum of the counts of two ranks."""
        life = self.life().plus(other.life())
        window = self.window().plus(other.window())
        both = Counter()
        both.set_counts(life, window)
        both.closed = self.closed.plus(other.closed)
        both.map_size = self.map_size or other.map_size
        are_known = self.map_size is not None and other.map_size is not None
        sizes_differ = are_known and self.map_size != other.map_size
        both.map_varies = self.map_varies or other.map_varies or sizes_differ
        return both

    def read(self) -> Counter:
        """Replace tensors by numbers, and return this counter. This waits for the device.

        Histograms move to the CPU.
        """
        self._begun = self._begun.read()
        self.closed = self.closed.read()
        self._set_totals(self.life().read())
        return self


class JointCounts:
    """Collects counts of several counters in one tensor, until one of the counters is read.

    `sites.updates` and `sites.memories` add to them when an optimizer begins its step, because they
    regularize the gradients of several sites together. So an update needs no operator for each
    site.

    Args:
        counters: the counters, in the order of the numbers.
        device: where the numbers are.
        norm_counts: how many norms each counter gets in a call of `add`.
    """

    def __init__(
        self, counters: Sequence[Counter], device: torch.device, norm_counts: Sequence[int]
    ) -> None:
        self._counters = list(counters)
        self._device = device
        self._norm_counts = list(norm_counts)
        self._affected: Any = None
        self._waiting_norms: list[Tensor] = []  # norms that are not in the histogram yet
        self._histograms: Tensor | None = None
        owners = torch.arange(len(self._counters)).repeat_interleave(torch.tensor(norm_counts))
        self._owners = owners.to(device)  # the counter of each norm
        for counter in counters:
            counter.settle()
            counter.joint = self

    @classmethod
    def of(
        cls, counters: Sequence[Counter], device: torch.device, norm_counts: Sequence[int]
    ) -> JointCounts:
        """Return the `JointCounts` that these counters share, or a new one."""
        joint = counters[0].joint
        if joint is not None and joint._fits(counters, device, norm_counts):
            return joint
        return cls(counters, device, norm_counts)

    def _fits(
        self, counters: Sequence[Counter], device: torch.device, norm_counts: Sequence[int]
    ) -> bool:
        """Return whether this object was made for these counters, device and numbers of norms."""
        if self._counters != list(counters) or self._norm_counts != list(norm_counts):
            return False
        have_others = [counter for counter in counters if counter.joint is not self]
        return self._device == device and not have_others

    def add(self, affected: Tensor, totals: Sequence[int], norms: Tensor | None) -> None:
        """Add one gradient of each counter, with the number of its elements.

        A gradient has no nominal rate, so `Counter.expected` stays.
        """
        for counter, total in zip(self._counters, totals, strict=True):
            counter.active += 1
            counter.total += total
        self._affected = affected if self._affected is None else self._affected + affected
        if norms is not None:
            self._waiting_norms.append(norms)
            tensors = len(self._waiting_norms)
            if tensors >= _MOST_WAITING or tensors * norms.numel() >= _MOST_WAITING_NORMS:
                self._bin_norms()

    def _bin_norms(self) -> None:
        """Add the waiting norms to the histograms."""
        if not self._waiting_norms:
            return
        calls = len(self._waiting_norms)
        norms = torch.stack(self._waiting_norms)
        self._waiting_norms = []

        if self._histograms is None:
            self._histograms = norms.new_zeros((len(self._counters), HISTOGRAM_LENGTH))
        owners = self._owners.expand(calls, -1).reshape(-1)
        self._histograms = with_norms_of_several(self._histograms, norms.reshape(-1), owners)

    def settle(self) -> None:
        """Hand the counts over to the counters, without waiting for the device."""
        if self._affected is None:
            return
        self._bin_norms()

        affected = self._affected.long().unbind()
        histograms: Sequence[Tensor | None] = [None] * len(affected)
        if self._histograms is not None:
            histograms = self._histograms.unbind()
        self._affected = None
        self._histograms = None

        for counter, number, histogram in zip(self._counters, affected, histograms, strict=True):
            counter.add_joint(number, histogram)
