"""The history of a training, with one row for each site and epoch.

`Attachment.step` adds the numbers of an epoch when its window closes, and `Attachment.remove` adds
those of the last one. ``attachment.history`` reads all rows, with those of the open epoch. Counts
on a device stay there until the history is read or saved: a few tensors for all sites of an epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..findings import Finding
from ..tables import Columns, Table, counted
from .counter import BINS, LARGEST_OF_ALL, SUM, Snapshot

MOST_ROWS = 20_000  # with more rows, every second epoch is forgotten
FEWEST_EPOCHS = 64  # up to this number, no epoch is forgotten, for any number of sites
MODEL = "."  # stands for the model in rows about no single site, as in `Finding.ids`


@dataclass(frozen=True)
class HistoryRow:
    """The numbers of a site in an epoch. The site ``"."`` has findings about the whole model."""

    epoch: int  # the whole part of the time
    site: str  # its key
    rate: float | None = None  # the main rate, or bound, when the epoch ended
    expected_rate: float | None = None  # mean nominal rate over the elements, if it drops any
    realized_rate: float | None = None  # share of the elements dropped or changed
    calls: int = 0  # of the layer
    active_calls: int = 0  # in which the regularizer acted; for gradients, the gradients it saw
    mean_norm: float | None = None  # of the gradients before a bound
    largest_norm: float | None = None
    penalty: float | None = None  # mean value of a penalty, without its weight
    findings: tuple[str, ...] = ()  # the kinds of the findings about it when the epoch ended


def _cell(name: str) -> Any:
    """Return the function that reads a cell of a table, which is empty for None."""

    def read(row: HistoryRow) -> Any:
        value = getattr(row, name)
        return "" if value is None else value

    return read


_COLUMNS: Columns[HistoryRow] = {
    "epoch": _cell("epoch"),
    "site": _cell("site"),
    "rate": _cell("rate"),
    "expected": _cell("expected_rate"),
    "realized": _cell("realized_rate"),
    "calls": _cell("calls"),
    "active": _cell("active_calls"),
    "mean\nnorm": _cell("mean_norm"),
    "largest\nnorm": _cell("largest_norm"),
    "penalty": _cell("penalty"),
    "findings": lambda row: ", ".join(row.findings),
}


class History(Table[HistoryRow]):
    """The rows of a history, one for each epoch and site, oldest first; they print as a table."""

    def __init__(self, rows: Sequence[HistoryRow]) -> None:
        epochs = {row.epoch for row in rows}
        super().__init__(rows, _COLUMNS, f"history of {counted(len(epochs), 'epoch')}")

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as dicts."""
        return self.to_dict()


class NormSums(NamedTuple):
    """The number, the sum and the largest of the norms of a site in an epoch, or a part of it."""

    number: float = 0.0
    total: float = 0.0
    largest: float = 0.0

    def plus(self, other: NormSums) -> NormSums:
        """Add the norms of another part of the epoch."""
        total = _rounded(self.total + other.total, digits=12)
        largest = max(self.largest, other.largest)
        return NormSums(self.number + other.number, total, largest)


def _rounded(number: float, digits: int) -> float:
    """Round a sum or a mean, so that a resumed training has the same history.

    The last digits depend on where counting began. A mean gets fewer digits than its sum, because
    the sum was rounded before.
    """
    return float(f"{number:.{digits}g}")


class _Epoch:
    """The rows of an epoch. Numbers that are on a device stay there until `read` is called.

    These are realized rates, norms and values of penalties.

    Args:
        rows: the rows without these numbers; rows of sites come first.
        windows: the counts of each site, in the same order; empty for the complete rows of a loaded
            state.
        earlier_norms: by site, the norms of this epoch that a loaded state brought.
        penalizing: the keys of the sites whose norms are values of a penalty.
    """

    def __init__(
        self,
        rows: Sequence[HistoryRow],
        windows: Sequence[Snapshot] = (),
        earlier_norms: Mapping[str, NormSums] = MappingProxyType({}),
        penalizing: Collection[str] = (),
    ) -> None:
        self._rows = list(rows)
        self._totals = [window.total for window in windows]
        self._earlier_norms = dict(earlier_norms)
        self._penalizing = penalizing

        affected = {}
        histograms = {}
        for place, window in enumerate(windows):
            if isinstance(window.affected, Tensor):
                affected[place] = window.affected
            if window.histogram is not None:
                histograms[place] = window.histogram

        with torch.no_grad():
            self._affected = _by_device(affected)
            stacks = _by_device(histograms)
            self._norms = [(places, _summaries(stack)) for places, stack in stacks]

    def read(self) -> list[HistoryRow]:
        """Return the rows with all numbers. The first call waits for the device."""
        for places, numbers in self._affected:
            for place, number in zip(places, numbers.tolist(), strict=True):
                share = number / self._totals[place] if self._totals[place] else None
                self._rows[place] = replace(self._rows[place], realized_rate=share)
        self._affected = []

        sums = self._earlier_norms
        for places, numbers in self._norms:
            for place, values in zip(places, numbers.tolist(), strict=True):
                key = self._rows[place].site
                sums[key] = NormSums(*values).plus(sums.get(key, NormSums()))
        self._norms = []
        self._earlier_norms = {}
        if sums:
            self._rows = [self._with_norms(row, sums) for row in self._rows]
        return self._rows

    def _with_norms(self, row: HistoryRow, sums: Mapping[str, NormSums]) -> HistoryRow:
        """Return a row with the mean and the largest of its norms, or with its mean penalty."""
        of_site = sums.get(row.site, NormSums())
        if not of_site.number:
            return row
        mean = _rounded(of_site.total / of_site.number, digits=10)
        if row.site in self._penalizing:
            return replace(row, penalty=mean)
        return replace(row, mean_norm=mean, largest_norm=of_site.largest)


def _by_device(tensors: Mapping[int, Tensor]) -> list[tuple[list[int], Tensor]]:
    """Stack tensors with the same device and dtype; return each stack with the places in it."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in tensors.items():
        group = tensor.device, tensor.dtype
        groups.setdefault(group, []).append(place)

    stacks = []
    for places in groups.values():
        stack = torch.stack([tensors[place] for place in places])
        stacks.append((places, stack))
    return stacks


def _summaries(histograms: Tensor) -> Tensor:
    """Return the `NormSums` of each histogram as a row."""
    number = histograms[:, BINS].sum(1)
    total = histograms[:, SUM]
    largest = histograms[:, LARGEST_OF_ALL]
    return torch.stack([number, total, largest], dim=1)


class Ending(NamedTuple):
    """The rates and findings of an epoch, noted before its window closes.

    Attributes:
        epoch: the epoch.
        rates: the main rate of each site.
        kinds: the kinds of the findings about each site.
    """

    epoch: int
    rates: Sequence[float | None]
    kinds: Mapping[str, Sequence[str]]


class Recorder:
    """Keeps the rows of the epochs that have ended, in the state of an attachment.

    If it has more than `MOST_ROWS` rows and more than `FEWEST_EPOCHS` epochs, it forgets every
    second epoch, and from then on it adds only every second one.
    """

    def __init__(self) -> None:
        self._epochs: dict[int, _Epoch] = {}
        self._every = 1  # 1, 2, 4, ...: each `_every`-th window is kept
        self._closed = 0  # the number of closed windows that had rows
        self._begun: dict[str, tuple[int, int]] = {}  # calls, and active calls, before the window
        self._kinds: dict[str, list[str]] = {}  # the kinds of the findings in the open window
        self._norms: dict[str, NormSums] = {}  # norms of the open window from a loaded state
        self._ending: Ending | None = None  # the end of the window that closes next

    def __getstate__(self) -> dict[str, Any]:
        self.rows()  # replaces the tensors by numbers
        return self.__dict__

    def forget_norms(self, key: str) -> None:
        """Forget the norms of a site in the open window that a loaded state brought."""
        self._norms.pop(key, None)

    def rows(self) -> list[HistoryRow]:
        """Return the rows of the epochs that have ended. This waits for the device."""
        return list(chain.from_iterable(epoch.read() for epoch in self._epochs.values()))

    def note_findings(self, findings: Iterable[Finding]) -> None:
        """Note findings about the open window."""
        self._kinds = _with_findings(self._kinds, findings)

    def note_end(self, epoch: int, sites: Sequence[Any]) -> None:
        """Note the rates and the findings of an epoch before the time moves on.

        Call `note_findings` before, because findings that come between this call and `close` are
        lost.
        """
        rates = [site.rate for site in sites]
        self._ending = Ending(epoch, rates, self._kinds)

    def close(self, sites: Sequence[Any], windows: Sequence[Snapshot]) -> None:
        """Add the epoch whose end was noted. A repeated epoch replaces its earlier rows.

        Args:
            sites: the `LiveSite` of each site.
            windows: the counts of each site.
        """
        ending = self._ending
        if ending is None:
            return
        self._ending = None
        ended = self._epoch_of(ending, sites, windows)

        # the next window begins
        self._begun = {site.key: _calls_of(site) for site in sites}
        self._norms = {}
        self._kinds = {}
        if ended is None:
            return

        self._closed += 1
        is_skipped = (self._closed - 1) % self._every
        if is_skipped and ending.epoch not in self._epochs:
            return
        self._epochs.pop(ending.epoch, None)
        self._epochs[ending.epoch] = ended

        most = max(FEWEST_EPOCHS, MOST_ROWS // max(1, len(sites)))
        if len(self._epochs) > most:
            self._epochs = dict(list(self._epochs.items())[::2])
            self._every *= 2

    def open_rows(
        self,
        epoch: int,
        sites: Sequence[Any],
        windows: Sequence[Snapshot],
        findings: Sequence[Finding],
    ) -> list[HistoryRow]:
        """Return the rows of the open window. This waits for the device.

        Args:
            epoch: the epoch.
            sites: the `LiveSite` of each site.
            windows: the counts of each site.
            findings: findings that were not noted yet.
        """
        rates = [site.rate for site in sites]
        ending = Ending(epoch, rates, _with_findings(self._kinds, findings))
        open_epoch = self._epoch_of(ending, sites, windows)
        return [] if open_epoch is None else open_epoch.read()

    def _epoch_of(
        self, ending: Ending, sites: Sequence[Any], windows: Sequence[Snapshot]
    ) -> _Epoch | None:
        """Return the rows of a window; None if no layer was called and there are no findings."""
        kinds = ending.kinds
        rows = []
        for site, rate, window in zip(sites, ending.rates, windows, strict=True):
            calls, active_calls = self._calls_in_window(site)
            # numbers on a device are added by `_Epoch.read`
            realized_rate = None if isinstance(window.affected, Tensor) else window.share()
            row = HistoryRow(
                epoch=ending.epoch,
                site=site.key,
                rate=rate,
                expected_rate=_expected_rate(site, window),
                realized_rate=realized_rate,
                calls=calls,
                active_calls=active_calls,
                findings=tuple(kinds.get(site.key, ())),
            )
            rows.append(row)

        if MODEL in kinds:
            rows.append(HistoryRow(ending.epoch, MODEL, findings=tuple(kinds[MODEL])))
        if not any(row.calls or row.active_calls or row.findings for row in rows):
            return None
        penalizing = {site.key for site in sites if site.regularizer.penalizes}
        return _Epoch(rows, windows, self._norms, penalizing)

    def was_active(self, sites: Sequence[Any]) -> bool:
        """Return whether a site was active in the open window.

        Calls that a loaded state brought count, too.
        """
        return any(self._calls_in_window(site)[1] > 0 for site in sites)

    def _calls_in_window(self, site: Any) -> tuple[int, int]:
        """Return the calls and the active calls of a site since the last window closed."""
        calls, active_calls = _calls_of(site)
        calls_before, active_before = self._begun.get(site.key, (0, 0))
        return calls - calls_before, active_calls - active_before

    def state_dict(self, sites: Sequence[Any]) -> dict[str, Any]:
        """Return the history as plain numbers and text."""
        begun = {site.key: list(self._begun.get(site.key, (0, 0))) for site in sites}
        norms = {}
        for site in sites:
            norms_now = _sums_of(site.tally.window())
            sums = norms_now.plus(self._norms.get(site.key, NormSums()))
            if sums.number:
                norms[site.key] = list(sums)

        return {
            "every": self._every,
            "closed": self._closed,
            "begun": begun,
            "norms": norms,
            "found": {key: list(kinds) for key, kinds in self._kinds.items()},
            "rows": [_as_list(row) for row in self.rows()],
        }

    def load(self, saved: Recorder, sites: Sequence[Any]) -> None:
        """Take over a history from a state, after the sites have taken over their counts."""
        self._epochs = dict(saved._epochs)
        self._every = saved._every
        self._closed = saved._closed
        self._begun = {site.key: _calls_of(site) for site in sites}
        self._begun |= saved._begun
        self._norms = dict(saved._norms)
        self._kinds = dict(saved._kinds)


def read_state(state: Mapping[str, Any]) -> Recorder:
    """Make a history from the result of `Recorder.state_dict`. A damaged state raises an error."""
    recorder = Recorder()
    recorder._every = max(1, int(state["every"]))
    recorder._closed = int(state["closed"])
    for key, (calls, active_calls) in state["begun"].items():
        recorder._begun[str(key)] = int(calls), int(active_calls)

    for key, sums in state["norms"].items():
        recorder._norms[str(key)] = NormSums(*map(float, sums))
    for key, kinds in state["found"].items():
        recorder._kinds[str(key)] = list(map(str, kinds))

    epochs: dict[int, list[HistoryRow]] = {}
    for values in state["rows"]:
        *numbers, kinds = values
        row = replace(HistoryRow(*numbers), findings=tuple(kinds))
        epochs.setdefault(row.epoch, []).append(row)
    recorder._epochs = {epoch: _Epoch(rows) for epoch, rows in epochs.items()}
    return recorder


def _as_list(row: HistoryRow) -> list[Any]:
    """Return the values of a row in the order of its fields."""
    values = [getattr(row, field.name) for field in fields(row)]
    *numbers, kinds = values
    return [*numbers, list(kinds)]


def _sums_of(window: Snapshot) -> NormSums:
    """Return the sums over the norms of a window. This waits for the device."""
    norms = window.norms
    if norms.mean is None or norms.largest is None:
        return NormSums()
    return NormSums(norms.count, norms.mean * norms.count, norms.largest)


def _calls_of(site: Any) -> tuple[int, int]:
    """Return the calls of the layer and the active calls of the site since attaching."""
    tally = site.tally
    return tally.evaluated + tally.trained, tally.active


def _expected_rate(site: Any, window: Snapshot) -> float | None:
    """Return the mean nominal rate of a window; None for a site that drops no elements."""
    regularizer = site.regularizer
    drops = regularizer.unit is not None or regularizer.has_share
    if site.of_gradients or not drops or not window.total:
        return None
    return _rounded(window.expected / window.total, digits=10)


def mean_rates(sites: Sequence[Any], windows: Sequence[Snapshot]) -> tuple[float, float] | None:
    """Return the mean nominal and the mean realized rate of the sites that drop.

    None if no element has passed any of them in these windows. This waits for the device.
    """
    nominal = []
    realized = []
    for site, window in zip(sites, windows, strict=True):
        expected = _expected_rate(site, window)
        if expected is not None:
            nominal.append(expected)
            realized.append(float(window.affected) / window.total)
    if not nominal:
        return None
    return sum(nominal) / len(nominal), sum(realized) / len(realized)


def _with_findings(
    earlier: Mapping[str, Sequence[str]], findings: Iterable[Finding]
) -> dict[str, list[str]]:
    """Return the kinds of findings about each site, with those of more findings.

    No kind comes twice at a site.
    """
    kinds = {key: list(of_site) for key, of_site in earlier.items()}
    for finding in findings:
        for key in finding.sites or (MODEL,):
            of_site = kinds.setdefault(key, [])
            if finding.kind.value not in of_site:
                of_site.append(finding.kind.value)
    return kinds
