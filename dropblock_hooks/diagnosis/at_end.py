"""Reports the faults of a training that ends: in ``remove``, or when the process ends.

`Attachment.remove` calls `find_at_end`. For attachments that were never removed, Python calls
`tell_at_exit` when the process ends.
"""

import atexit
import sys
from collections.abc import Iterable, Sequence
from weakref import WeakSet

from torch import nn

from ..findings import Finding, tell
from ..sites.hooks import SiteHook
from ..sites.model_hook import ModelHook
from ..sites.run import Run
from .endings import find_forgotten
from .now import find_in_open_epoch

_installed: WeakSet[ModelHook] = WeakSet()
"""The hooks of all attachments.

Those of copied models are left out, because a copy may be an average of weights, which is not
trained.
"""


def remember_until_exit(hook: ModelHook) -> None:
    """Check an attachment when the process ends, because a script may never call `remove`."""
    _installed.add(hook)


@atexit.register
def tell_at_exit() -> None:
    """Warn of the faults of the attachments that were not removed, as `remove` would."""
    for model_hook in list(_installed):
        run = model_hook.run
        model = model_hook.model
        if model is None or not run.installed:
            continue

        error = getattr(sys, "last_value", None)  # the error that has ended the script
        of_last_epoch = find_in_last_epoch(model, run, model_hook.hooks, error)
        findings = find_at_end(run, model_hook.hooks, of_last_epoch)
        tell(findings, run.told)


def find_in_last_epoch(
    model: nn.Module,
    run: Run,
    hooks: Sequence[SiteHook],
    error: BaseException | None,
) -> list[Finding]:
    """Find the faults of the last epoch, which is still open; none if an error ends the training.

    The error may have come in the middle of a forward or a backward, whose counts would look like a
    fault. Or a GPU has failed, which can't be read any more.
    """
    return find_in_open_epoch(model, run, hooks) if error is None else []


def find_at_end(
    run: Run,
    hooks: Iterable[SiteHook],
    of_last_epoch: Sequence[Finding],
) -> list[Finding]:
    """Find the faults to report after a training.

    Args:
        run: the state of the attachment.
        hooks: its hooks.
        of_last_epoch: the faults of the last epoch, which no ``step`` has ended.
    """
    sites = [hook.site for hook in hooks]
    findings = find_forgotten(run, sites)
    if run.stepped:  # otherwise the training was not divided into epochs
        findings += of_last_epoch
    return findings
