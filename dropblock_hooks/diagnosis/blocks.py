"""Finds blocks of DropBlock that are as large as the map of their layer.

`Attachment.verify` asks for them after a forward, and `plan` before the training.
"""

from collections.abc import Sequence
from dataclasses import replace

from .. import messages
from ..findings import Finding, Severity
from ..regularizers.base import MapSize, Regularizer
from ..sites.site import LiveSite
from ..sites.windows import Window
from ..tables import shown


def find_whole_maps(sites: Sequence[LiveSite], window: Window) -> list[Finding]:
    """Find the sites that dropped whole channels in a window, because their maps are too small.

    Blocks that have just the size of the map are left out, because they may be meant. So is a site
    with maps of several sizes, because some of them may be larger.
    """
    findings = []
    for site in sites:
        counter = site.tally  # the window has the counts of compiled code
        size = counter.map_size
        if size is None or counter.map_varies or not window.sites[site.key].active:
            continue
        block = site.regularizer.block_in_force(size)
        if is_clipped(block, site.regularizer):
            findings += of_whole_map(site.key, site.regularizer, block, size)
    return findings


def is_clipped(block: MapSize, regularizer: Regularizer) -> bool:
    """Return whether the block on a map is smaller than the block of the regularizer."""
    return block is not None and block != getattr(regularizer, "edges", block)


def of_whole_map(
    key: str, regularizer: Regularizer, block: MapSize, size: MapSize
) -> list[Finding]:
    """Return a warning if each block covers the whole map, and a note if it has just this size.

    Blocks of this size may be meant: the paper has them in the last stage of a ResNet.
    """
    reaches_out = getattr(regularizer, "border", "") == "across"  # a part of it lies on the map
    if block is None or block != size or reaches_out:
        return []
    finding = messages.WHOLE_MAP.finding(key, size=shown(size))
    if not is_clipped(block, regularizer):
        finding = replace(finding, severity=Severity.NOTE)
    return [finding]
