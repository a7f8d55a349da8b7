"""The board: what compiled code reads and counts, in tensors that stay where they are.

Compiled code must not call Python, and is not compiled again for another rate. So each site has
these tensors on the device of its layer:

cells       the host writes them, and compiled code reads them
counts      a compiled forward adds to them
gradients   a compiled backward adds to them, because it can't save what a forward changes
norms       a compiled backward adds to this histogram of the norms before a bound, or of penalties

The first axis of the cells has the modes, evaluation and training. The second one has copies, the
smallest of which is taken, see `sites.compiled.read`. The third one has the rows of
`functional.cells`.

The host changes these tensors through ``tensor.data``, because autograd would refuse a backward
whose forward came before the change.

The cells of all sites share one memory, so `Board.write` is one copy to the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import keep_address
from ..functional.cells import (
    ACTIVE,
    AFFECTED,
    EVALUATED,
    EXPECTED,
    OFF,
    TOTAL,
    TRAINED,
    WIDTH,
)
from ..functional.masks import wide_dtype
from ..functional.measures import DISTANCE, TURN
from ..observers.base import Compiled
from ..observers.watchdog import Watchdog
from .counter import CELLS

COPIES = 8
_SHAPE = (2, COPIES, 5, WIDTH)


class Board:
    """The cells and the counts of all sites of an attachment on one device."""

    def __init__(self, sites: Sequence[Any], device: torch.device) -> None:
        self.sites = sites
        self.device = device

        with torch.inference_mode(False), torch.no_grad():
            shape = (len(sites), *_SHAPE)
            self._memory = torch.zeros(shape, dtype=wide_dtype(device), device=device)
            self.cells = [self._part(number) for number in range(len(sites))]
            self.counts: list[Tensor] = []
            self.gradients: list[Tensor] = []
            self.norms: list[Tensor | None] = []
            for site in sites:
                self.counts.append(self._zeros(WIDTH))
                self.gradients.append(self._zeros(WIDTH))
                self.norms.append(self._zeros(CELLS) if _has_norms(site) else None)

        _keep_addresses([*self.cells, *self.counts, *self.gradients, *self.norms])
        self.write()

    def _zeros(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=self._memory.dtype, device=self.device)

    def _part(self, number: int) -> Tensor:
        """The cells of a site: a tensor that is no view, although it shares the memory."""
        start = number * self._memory[0].numel()
        part = torch.empty(0, dtype=self._memory.dtype, device=self.device)
        storage = self._memory.untyped_storage()
        return part.set_(storage, start, _SHAPE)  # type: ignore[call-overload,no-any-return]  # torch's

    def write(self) -> None:
        """Write the present rates and switches of all sites."""
        rows = []
        for site in self.sites:
            evaluation = _rows(site, training=False)
            training = _rows(site, training=True)
            rows.append([evaluation, training])

        with torch.inference_mode(False), torch.no_grad():
            written = torch.tensor(rows, dtype=self._memory.dtype)
            for_each_copy = written.unsqueeze(2).expand(self._memory.shape)
            self._memory.copy_(for_each_copy)

    def take(self, only: Any = None) -> None:
        """Move the counts to the counters of the sites, or of one; this waits for the device."""
        numbers = [i for i, site in enumerate(self.sites) if only is None or site is only]
        if self.device.type == "meta" or not numbers:
            return

        counts = [self.counts[i] for i in numbers]
        gradients = [self.gradients[i] for i in numbers]
        norms = [self.norms[i] for i in numbers]
        with torch.inference_mode(False), torch.no_grad():
            on_host = torch.stack([*counts, *gradients]).cpu().double()
            forwards, backwards = on_host.chunk(2)
            sums = (forwards + backwards).tolist()
            for i, row in zip(numbers, sums, strict=True):
                if any(row):
                    tally = self.sites[i].tally
                    tally.take(row, self.norms[i])
            _clear([*counts, *gradients, *norms])


def _keep_addresses(tensors: Sequence[Tensor | None]) -> None:
    """Tell torch that tensors stay where they are, so that CUDA graphs may read them there."""
    for tensor in tensors:
        if tensor is not None:
            keep_address(tensor)


def _clear(tensors: Sequence[Tensor | None]) -> None:
    """Fill tensors with zeros, unnoticed by autograd."""
    for tensor in tensors:
        if tensor is not None:
            tensor.data.zero_()


def _has_norms(site: Any) -> bool:
    """Whether norms, or the values of a penalty, are counted for a site."""
    return bool(site.regularizer.bounds) or site.regularizer.penalizes


def _rows(site: Any, training: bool) -> list[list[float]]:
    """Return the rows of a site in one mode of its layer."""
    on = site.acts(training)
    values = site.values if on else site.regularizer.off_values(site.values)

    called = [0.0] * WIDTH
    gradient = [0.0] * WIDTH
    elements = [0.0] * WIDTH
    changed = [0.0] * WIDTH
    called[TRAINED if training else EVALUATED] = 1.0
    called[OFF] = float(training and not site.run.enabled)
    if on and site.of_gradients:
        gradient[ACTIVE] = 1.0
        elements[TOTAL] = 1.0
        changed[AFFECTED] = 1.0
    elif on and (training or site.always):  # what always() adds in evaluation is not counted
        called[ACTIVE] = 1.0
        elements[TOTAL] = 1.0
        elements[EXPECTED] = site.rate or 0.0
        changed[AFFECTED] = 1.0

    rates = [float(on), *values.values()]
    rates += [0.0] * (WIDTH - len(rates))
    return [rates, called, gradient, elements, changed]


class Observed:
    """The tensors in which compiled code counts for an observer at a site.

    Attributes:
        state: numbers, see `functional.measures`. The first two tell whether the site is on. A
            compiled forward changes it.
        gradients: the same for a compiled backward, because it can't save what a forward changes;
            None if no gradients are seen.
        alive: of each channel, whether it was not zero in some call; None without channels.
        batches: sums over batches, of a BatchNorm; None without.
        watches: whether the observer is a `Watchdog`.
        numbers: what its operators need besides.
        sees_values: whether it measures activations, and not their gradients.
    """

    def __init__(
        self, site: Any, device: torch.device, channels: int = 0, has_batches: bool = False
    ) -> None:
        observer: Any = site.regularizer
        self.watches = isinstance(observer, Watchdog)
        self.numbers = observer.compiled_numbers(site.bound.open)
        self.sees_values = observer.sees_values
        self.alive: Tensor | None = None
        self.batches: Tensor | None = None
        self._site = site
        self._empty = observer.start_compiled()
        self._on: list[float] = []  # as last written
        self._distance = 1  # as last written, of the calls that a `Watchdog` measures

        dtype = wide_dtype(device)
        with torch.inference_mode(False):
            self.state = torch.tensor(self._empty, dtype=dtype, device=device)
            self.gradients = self.state.clone() if observer.sees_gradients else None
            if channels:
                self.alive = torch.zeros(channels, dtype=torch.bool, device=device)
            if channels and has_batches:
                self.batches = torch.zeros((3, channels), dtype=dtype, device=device)

        self._numbers = [self.state]
        if self.gradients is not None:
            self._numbers.append(self.gradients)
        _keep_addresses([*self._numbers, self.alive, self.batches])
        self.tensors = self.state, self.gradients, self.alive
        self.write()

    def fits(self, device: torch.device, channels: int, has_batches: bool) -> bool:
        """Whether the tensors fit activations with so many channels on this device."""
        if self.state.device != device:
            return False
        own_channels = 0 if self.alive is None else len(self.alive)
        own_batches = self.batches is not None
        return own_channels == channels and own_batches == (has_batches and channels > 0)

    def write(self) -> None:
        """Write whether the site is on, in evaluation and in training, and what is measured."""
        on = [float(self._site.acts(training)) for training in (False, True)]
        distance = self._site.regularizer.distance(self._site.run.shared) if self.watches else 1
        if on == self._on and distance == self._distance:
            return
        self._on = on
        self._distance = distance
        with torch.inference_mode(False), torch.no_grad():
            for numbers in self._numbers:
                numbers.data[:2] = torch.tensor(on)
                if self.watches:
                    numbers.data[DISTANCE].fill_(distance)

    def take(self, place: int, layers: int, before: int) -> Compiled | None:
        """Return what was counted since the last time, or None. This waits for the device."""
        if self.state.device.type == "meta":
            return None
        rows = [numbers.tolist() for numbers in self._numbers]
        kept = [self._empty_row(row) for row in rows]
        if rows == kept:
            return None
        values = self._sums(rows)

        alive = None if self.alive is None else self.alive.clone()
        batches = None
        if self.batches is not None and self.batches[-1].any():
            batches = self.batches.clone()
        self._empty_tensors(kept)
        return Compiled(values, alive, batches, place, layers, before)

    def _empty_row(self, row: list[float]) -> list[float]:
        """The numbers without any count. Switches and the plan of a `Watchdog` stay."""
        empty: list[float] = self._on + self._empty[2:]
        if self.watches:
            for place in (TURN, DISTANCE):
                empty[place] = row[place]
        return empty

    def _empty_tensors(self, rows: list[list[float]]) -> None:
        """Begin all counts anew."""
        with torch.inference_mode(False), torch.no_grad():
            for numbers, row in zip(self._numbers, rows, strict=True):
                numbers.data.copy_(torch.tensor(row, dtype=self.state.dtype))
            _clear([self.alive, self.batches])

    def _sums(self, rows: list[list[float]]) -> list[float]:
        """The sums of the numbers of forwards and backwards; of first times the smallest.

        The plan of a `Watchdog` is that of the forwards.
        """
        sums: list[float] = []
        for numbers, empty in zip(zip(*rows, strict=True), self._empty, strict=True):
            is_first_time = empty == math.inf
            sums.append(min(numbers) if is_first_time else sum(numbers))
        if self.watches:
            for place in (TURN, DISTANCE):
                sums[place] = rows[0][place]
        return sums
