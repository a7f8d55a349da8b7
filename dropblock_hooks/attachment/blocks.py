"""How the map limits a block, for the rows of a report or a plan."""

from typing import Any

from ..findings import Finding, Kind, Severity
from ..regularizers.base import Regularizer
from ..tables import shown as cell


def is_clipped(block: tuple[int, ...] | None, regularizer: Regularizer) -> bool:
    """Whether a block is smaller than its regularizer says."""
    return block is not None and block != getattr(regularizer, "edges", block)


def block_finding(row: Any) -> Finding | None:
    """The finding that a block is as large as the map, for a row of a report or plan."""
    if row.block_size is not None and row.block_size == row.map_size:
        text = f"the block is as large as the map ({cell(row.map_size)}): it drops whole channels"
    elif row.clipped:
        text = f"the blocks are clipped to the map: {cell(row.block_size)} of {cell(row.map_size)}"
    else:
        return None
    cure = "Ask for a smaller block_size, or use a dropout of channels"
    return Finding(Kind.CLIPPED, Severity.WARNING, (row.site,), text, cure)


def block_cell(row: Any, only_limited: bool = False) -> str:
    """The block of a row of a report or plan; on request only where the map limits it."""
    covers = row.block_size is not None and row.block_size == row.map_size
    mark = " (clipped)" if row.clipped else " (whole map)" if covers else ""
    return f"{cell(row.block_size)}{mark}" if mark or not only_limited else ""
