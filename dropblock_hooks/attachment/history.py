"""Reads the history of an attachment with its open epoch, and adds the last epoch to it.

`Attachment.history` calls `history_of`. `Attachment.remove` calls `close_last`, and trainers log
`rates_now`.
"""

import math
from collections.abc import Sequence

from torch import nn

from ..diagnosis.now import find_in_open_epoch
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
    recorder = run.history
    rows = recorder.rows()

    was_trained = run.was_trained()  # takes the counts of compiled code, too
    # with active="always", a site acts in evaluation mode
    has_open_rows = was_trained or recorder.was_active(run.sites)
    # after `Attachment.remove`, `rows` has the last epoch already
    if run.installed and has_open_rows:
        open_rows = recorder.open_rows(
            math.floor(run.epoch),
            run.sites,
            _open_windows(run),
            findings=find_in_open_epoch(base, run, hooks) if was_trained else (),
        )
        rows += open_rows
    return History(rows)


def close_last(run: Run, faults: Sequence[Finding]) -> None:
    """Add the rows of the present epoch, because no step will end it.

    Its faults are noted only if the model was trained in it.
    """
    recorder = run.history
    if run.was_trained():
        recorder.note_findings(faults)
    elif not recorder.was_active(run.sites):
        return

    epoch = math.floor(run.epoch)
    recorder.note_end(epoch, run.sites)
    recorder.close(run.sites, _open_windows(run))


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
