"""Reads the history of an attachment, with the epoch that has not ended."""

import math
from collections.abc import Sequence

from torch import nn

from ..diagnosis.now import find_at_boundary
from ..findings import Finding
from ..sites.counter import Snapshot
from ..sites.history import History, mean_rates
from ..sites.hooks import SiteHook
from ..sites.run import Run


def history_of(
    base: nn.Module,
    run: Run,
    hooks: Sequence[SiteHook],
) -> History:
    """Return the rows of all epochs. This waits for the device."""
    run.take_counts()
    recorder = run.history
    rows = recorder.rows()

    windows = _open_windows(run)
    if run.installed and _is_trained(windows):
        open_rows = recorder.open_rows(
            math.floor(run.epoch),
            run.sites,
            windows,
            findings=_faults_now(base, run, hooks),
        )
        rows += open_rows
    return History(rows)


def close_last(
    base: nn.Module,
    run: Run,
    hooks: Sequence[SiteHook],
) -> list[Finding]:
    """Add the rows of the present epoch, because no step will end it; return its faults."""
    run.take_counts()
    windows = _open_windows(run)
    if not _is_trained(windows):
        return []

    recorder = run.history
    faults = _faults_now(base, run, hooks)
    recorder.note_findings(faults)

    epoch = math.floor(run.epoch)
    recorder.note_end(epoch, run.sites)
    recorder.close(run.sites, windows)
    return faults


def rates_now(run: Run) -> tuple[float, float] | None:
    """Return the mean nominal and realized rate of the sites that drop, as a report shows them.

    It returns None if no element has passed the sites. This waits for the device.
    """
    run.take_counts()
    shown = [site.tally.shown() for site in run.sites]
    return mean_rates(run.sites, shown)


def _open_windows(run: Run) -> list[Snapshot]:
    """Return the counts of each site since the last window closed."""
    return [site.tally.window() for site in run.sites]


def _is_trained(windows: Sequence[Snapshot]) -> bool:
    """Return whether a site had a call in training mode, or a gradient."""
    return any(window.trained or window.active for window in windows)


def _faults_now(
    base: nn.Module,
    run: Run,
    hooks: Sequence[SiteHook],
) -> list[Finding]:
    """Find the faults that ``step`` would report at the end of the present epoch."""
    next_epoch = math.floor(run.epoch) + 1
    return find_at_boundary(next_epoch, base, run, hooks)
