"""Finds updates of the optimizer that `SkipUpdate` has left out.

`Attachment.verify` asks for them.
"""

from collections.abc import Sequence

from .. import messages
from ..findings import Finding
from ..regularizers.memory import WithMemory
from ..sites.site import LiveSite
from ..sites.windows import Window


def find_skipped(sites: Sequence[LiveSite], window: Window, epoch: float) -> list[Finding]:
    """Find the sites with updates that were left out in a window."""
    findings = []
    for site in sites:
        regularizer = site.regularizer
        skips = isinstance(regularizer, WithMemory) and not regularizer.clips
        if not skips:
            continue

        # an update is skipped as a whole, so the share of its values is the share of updates
        counts = window.sites[site.key]
        share = float(counts.share() or 0.0)
        skipped = round(share * counts.active)
        if skipped:
            finding = messages.SKIPPED_UPDATES.finding(
                site.key,
                epoch=epoch,
                skipped=skipped,
                updates=counts.active,
                percent=100.0 * share,
            )
            findings.append(finding)
    return findings
