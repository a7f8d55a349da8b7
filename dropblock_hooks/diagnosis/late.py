"""Finds loops that call ``step(epoch)`` after the epoch, so that each rate is an epoch late.

`find_before_step` calls `find_late_step` before the time moves, but not for a removed attachment.
`verify` repeats the finding, which stays in `Run.late`.
"""

from collections.abc import Sequence

from .. import messages
from ..findings import Finding
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.windows import windows

_FEWEST = 2  # a single call before ``step(0)`` may be a trial
_TOLERANCE = 0.1  # the numbers of calls in the first two epochs may differ by this share


def find_late_step(t: float, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """Find out whether the first two calls of ``step`` came after their epochs.

    Such a loop makes as many training forwards before ``step(0)`` as between ``step(0)`` and
    ``step(1)``. A trial before the training, or a search for a learning rate, makes another number
    of them.

    Args:
        t: the time to which ``step`` is about to move.
        run: the state that all sites share.
        hooks: the hooks of all sites.
    """
    begins_again = t < run.epoch  # another training begins
    if begins_again:
        run.late = []
    if begins_again or t not in (0, 1):
        run.early = 0  # only a ``step(1)`` that comes next after ``step(0)`` may use it
    if run.epoch != 0:
        return []
    is_first_step = t == 0 and not run.stepped
    if is_first_step:
        run.early = _training_calls(run, hooks)
        return []

    calls_before = run.early
    if t != 1 or calls_before < _FEWEST:
        return []

    run.early = 0
    # ``step(0)`` has closed no window, so the window still has the calls before it
    calls_after = _training_calls(run, hooks) - calls_before
    difference = abs(calls_after - calls_before)
    is_same_number = difference <= _TOLERANCE * calls_before
    if not is_same_number or not _rates_change(t, hooks):
        return []
    finding = messages.STEPPED_LATE.finding(epoch=t, early=calls_before, later=calls_after)
    run.late = [finding]
    return run.late


def _training_calls(run: Run, hooks: Sequence[SiteHook]) -> int:
    """Return the training calls of the open window: those of the layer with the most calls."""
    window, _ = windows(run, hooks)
    counts = (window.model, *window.sites.values())
    return max(snapshot.trained for snapshot in counts)


def _rates_change(t: float, hooks: Sequence[SiteHook]) -> bool:
    """Return whether a rate at time `t` differs from the present one."""
    for hook in hooks:
        site = hook.site
        if site.moves and site.regularizer.values(t) != site.values:
            return True
    return False
