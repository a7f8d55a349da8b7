"""The report: what has happened at each site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .site import Site
from .table import Table
from .table import shown as cell

Size = tuple[int | tuple[int, int], ...] | None


@dataclass(frozen=True)
class SiteRow:
    """One site: its rates are shares of the elements, sizes are in elements per axis."""

    site: str
    regularizer: str
    at: str
    rate: float | None
    realized_rate: float | None
    total_realized_rate: float | None
    calls: int
    active_calls: int
    calls_per_forward: float | None
    map_size: Size
    block_size: Size
    clipped: bool
    aliases: tuple[str, ...]


def site_row(site: Site, forwards: int | None) -> SiteRow:
    """The row of a site, of a model with this many forwards so far."""
    asked = getattr(site.regularizer, "block_size", None)
    block = site.block_size
    return SiteRow(
        site=site.key,
        regularizer=repr(site.regularizer),
        at=site.at,
        rate=site.rate,
        realized_rate=site.realized_rate,
        total_realized_rate=site.total_realized_rate,
        calls=site.calls,
        active_calls=site.active_calls,
        calls_per_forward=site.calls / forwards if forwards else None,
        map_size=site.map_size,
        block_size=block,
        clipped=block is not None and is_clipped(block, asked),
        aliases=site.aliases,
    )


def is_clipped(block: tuple[int | tuple[int, int], ...], asked: object) -> bool:
    """Whether a block in force is smaller than the one asked for, on any map."""
    edges = asked if isinstance(asked, tuple) else (asked,) * len(block)
    lows = [b[0] if isinstance(b, tuple) else b for b in block]
    return any(low < edge for low, edge in zip(lows, edges, strict=True) if isinstance(edge, int))


def _several(calls: float | None) -> str:
    return "" if calls is None or calls in (0, 1) else f" ({calls:.4g} per forward)"


def site_table(sites: Sequence[Site], title: str, forwards: int | None = None) -> Table[SiteRow]:
    """The rows of all sites, which print as a table."""
    return Table(
        [site_row(site, forwards) for site in sites],
        {
            "site": lambda row: (
                row.site + (f" (= {', '.join(row.aliases)})" if row.aliases else "")
            ),
            "regularizer": lambda row: row.regularizer,
            "rate now": lambda row: row.rate,
            "realized": lambda row: row.realized_rate,
            "calls": lambda row: cell(row.calls) + _several(row.calls_per_forward),
            "active": lambda row: row.active_calls,
            "map": lambda row: row.map_size,
            "block": lambda row: cell(row.block_size) + (" (clipped)" if row.clipped else ""),
        },
        title,
    )
