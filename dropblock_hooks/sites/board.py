"""The board: tensors with fixed addresses for the rates and counts of compiled code.

Compiled code must not call Python, and is not compiled again for another rate. So each site has
these tensors on the device of its layer:

- cells: the host writes them, and compiled code reads them.
- counts: a compiled forward adds to them.
- gradients: a compiled backward adds to them. They are not a part of the counts, because autograd
  can't save a tensor for the backward that the next forward changes.
- norms: a histogram of the norms before a bound, or of penalties. A compiled backward adds to it.

The cells have four axes: the mode (evaluation or training), equal copies, the five rows of
`functional.cells`, and the numbers in a row. `sites.compiled.read` says why there are copies.

The host changes these tensors through ``tensor.data``. Otherwise autograd would refuse a backward
whose forward came before the change.

The cells of all sites share one memory, so `Board.write` is one copy to the device.

`Run.board_on` makes a board. `Run.write` writes to it after each change of a rate, and
`Run.take_counts` reads it before somebody reads a count.
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
from ..functional.measures import CALLS, DISTANCE, TURN
from ..observers.base import Compiled
from ..observers.watchdog import Watchdog
from .counter import HISTOGRAM_LENGTH

COPIES = 8  # of the cells; see `sites.compiled.read`
_SHAPE = (2, COPIES, 5, WIDTH)


class Board:
    """The cells and the counts of all sites of an attachment on one device."""

    def __init__(self, sites: Sequence[Any], device: torch.device) -> None:
        self.sites = sites
        self.device = device

        with torch.inference_mode(False), torch.no_grad():
            shape = (len(sites), *_SHAPE)
            self._memory = torch.zeros(shape, dtype=wide_dtype(device), device=device)

            self.cells: list[Tensor] = []
            self.counts: list[Tensor] = []
            self.gradients: list[Tensor] = []
            self.norms: list[Tensor | None] = []
            for number, site in enumerate(sites):
                norms = self._zeros(HISTOGRAM_LENGTH) if _has_norms(site) else None
                self.cells.append(self._part(number))
                self.counts.append(self._zeros(WIDTH))
                self.gradients.append(self._zeros(WIDTH))
                self.norms.append(norms)

        _keep_addresses([*self.cells, *self.counts, *self.gradients, *self.norms])
        self.write()

    def _zeros(self, length: int) -> Tensor:
        """Return a tensor for counts on this device."""
        return torch.zeros(length, dtype=self._memory.dtype, device=self.device)

    def _part(self, number: int) -> Tensor:
        """Return the cells of a site: a tensor that shares the memory, but is no view for torch."""
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

    def move_counts(self, only: Any = None) -> None:
        """Move the counts to the counters of the sites. This waits for the device.

        Args:
            only: the site whose counts are moved; None moves the counts of all sites.
        """
        if self.device.type == "meta":
            return
        numbers = [i for i, site in enumerate(self.sites) if only is None or site is only]
        if not numbers:
            return

        counts = [self.counts[i] for i in numbers]
        gradients = [self.gradients[i] for i in numbers]
        norms = [self.norms[i] for i in numbers]
        with torch.inference_mode(False), torch.no_grad():
            # one copy to the host, because each copy waits for the device
            on_host = torch.stack([*counts, *gradients]).cpu().double()
            forwards, backwards = on_host.chunk(2)
            sums = forwards + backwards
            for i, row in zip(numbers, sums.tolist(), strict=True):
                if any(row):
                    tally = self.sites[i].tally
                    tally.add_compiled(row, self.norms[i])
            _clear([*counts, *gradients, *norms])


def _keep_addresses(tensors: Sequence[Tensor | None]) -> None:
    """Tell torch that tensors keep their addresses, so that CUDA graphs can read them."""
    for tensor in tensors:
        if tensor is not None:
            keep_address(tensor)


def _clear(tensors: Sequence[Tensor | None]) -> None:
    """Fill tensors with zeros, without a change of version for autograd."""
    for tensor in tensors:
        if tensor is not None:
            tensor.data.zero_()


def _has_norms(site: Any) -> bool:
    """Return whether norms, or the values of a penalty, are counted for a site."""
    return bool(site.regularizer.bounds) or site.regularizer.penalizes


def _rows(site: Any, training: bool) -> list[list[float]]:
    """Return the rows of a site in one mode of its layer; see `functional.cells`."""
    on = site.acts(training)
    values = site.values
    if not on:
        values = site.regularizer.off_values(values)

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
    elif on and (training or site.always):  # else the site acts only under `Attachment.always`
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
        state: the numbers of `functional.measures`, which a compiled forward changes. The first two
            say whether the site is on, in evaluation and in training.
        gradients: the same numbers for a compiled backward, because a backward can't save a tensor
            that a forward changes; None if the observer sees no gradients.
        alive: for each channel, whether it was not zero in some call; None without channels.
        batches: the sums over batches of a BatchNorm; None for other layers.
        sums: further tensors of `Observer.start_sums`, by name.
        watches: whether the observer is a `Watchdog`.
        constants: further arguments of its operators, which are constants of a graph.
        sees_values: whether it measures activations, and not their gradients.
    """

    def __init__(
        self, site: Any, device: torch.device, channels: int = 0, has_batches: bool = False
    ) -> None:
        observer: Any = site.regularizer
        self.watches = isinstance(observer, Watchdog)
        self.constants = observer.compiled_numbers(site.bound.open)
        self.sees_values = observer.sees_values
        self.alive: Tensor | None = None
        self.batches: Tensor | None = None
        self._site = site
        self._empty = observer.start_compiled()
        self._on: list[float] = []  # the switches that were written last
        self._distance = 1  # the distance of measured calls that was written last, of a `Watchdog`

        dtype = wide_dtype(device)
        with torch.inference_mode(False):
            self.state = torch.tensor(self._empty, dtype=dtype, device=device)
            self.gradients = self.state.clone() if observer.sees_gradients else None
            if channels:
                self.alive = torch.zeros(channels, dtype=torch.bool, device=device)
            if channels and has_batches:
                self.batches = torch.zeros((3, channels), dtype=dtype, device=device)

            self.sums: dict[str, Tensor] = {}
            for name, zeros in observer.start_sums(channels).items():
                self.sums[name] = zeros.to(device, dtype)

        self._states = [self.state]
        if self.gradients is not None:
            self._states.append(self.gradients)
        # for each of these tensors, the number of calls since the last one that was measured
        self._turns = [0] * len(self._states)
        _keep_addresses([*self._states, self.alive, self.batches, *self.sums.values()])
        self.write()

    def fits(self, device: torch.device, channels: int, has_batches: bool) -> bool:
        """Return whether the tensors fit activations with so many channels on this device."""
        if self.state.device != device:
            return False
        present_channels = 0 if self.alive is None else len(self.alive)
        if present_channels != channels:
            return False
        needs_batches = has_batches and channels > 0
        return needs_batches == (self.batches is not None)

    def write(self) -> None:
        """Write the switches for evaluation and training, and which calls a `Watchdog` measures."""
        site = self._site
        on = [float(site.acts(training)) for training in (False, True)]
        distance = 1
        if self.watches:
            distance = site.regularizer.distance(site.run.shared)
        if on == self._on and distance == self._distance:
            return
        self._on = on
        self._distance = distance
        with torch.inference_mode(False), torch.no_grad():
            for state in self._states:
                state.data[:2] = torch.tensor(on)
                if self.watches:
                    state.data[DISTANCE].fill_(distance)

    def pop_counts(self, place: int, times_of_step: int, before: int) -> Compiled | None:
        """Return the counts since the last call of this method, or None. This waits for the device.

        Args:
            place: the place of the layer in the order in which layers return.
            times_of_step: how much `Run.compiled_time` grows in a forward and its backward.
            before: `Run.compiled_time` when these calls begin.
        """
        if self.state.device.type == "meta":
            return None
        rows = [state.tolist() for state in self._states]
        empty_rows = [self._empty_row(row) for row in rows]
        if rows == empty_rows:
            return None

        values = self._sums(rows)
        turn = sum(self._turns)  # a site counts either its calls or its gradients
        if not self.watches:
            values[CALLS] -= turn  # the last time, these calls were returned already
            self._turns = [round(row[CALLS]) for row in empty_rows]

        alive = None if self.alive is None else self.alive.clone()
        batches = None
        if self.batches is not None and self.batches[-1].any():
            batches = self.batches.clone()
        sums = {name: x.clone() for name, x in self.sums.items()}
        self._empty_tensors(empty_rows)
        return Compiled(values, alive, batches, sums, place, times_of_step, before, turn)

    def begin_epoch(self) -> None:
        """Let statistics measure the next call. The counts were taken before."""
        if self.watches or not any(self._turns):
            return
        self._turns = [0] * len(self._states)
        with torch.inference_mode(False), torch.no_grad():
            for state in self._states:
                state.data[CALLS].fill_(0.0)

    def _empty_row(self, row: list[float]) -> list[float]:
        """Return a row without counts, but with the switches and what decides the measured calls.

        So reading the numbers does not change which calls are measured.
        """
        empty: list[float] = self._on + self._empty[2:]
        if self.watches:
            for place in (TURN, DISTANCE):
                empty[place] = row[place]
        else:
            every, *_ = self.constants
            empty[CALLS] = row[CALLS] % every
        return empty

    def _empty_tensors(self, rows: list[list[float]]) -> None:
        """Begin all counts anew."""
        with torch.inference_mode(False), torch.no_grad():
            for state, row in zip(self._states, rows, strict=True):
                state.data.copy_(torch.tensor(row, dtype=self.state.dtype))
            _clear([self.alive, self.batches, *self.sums.values()])

    def _sums(self, rows: list[list[float]]) -> list[float]:
        """Add the numbers of forwards and backwards. Of two first times, take the earlier one.

        The plan of a `Watchdog` is taken from the forwards.
        """
        sums: list[float] = []
        columns = zip(*rows, strict=True)
        for numbers, empty in zip(columns, self._empty, strict=True):
            is_first_time = empty == math.inf
            total = min(numbers) if is_first_time else sum(numbers)
            sums.append(total)
        if self.watches:
            for place in (TURN, DISTANCE):
                sums[place] = rows[0][place]
        return sums
