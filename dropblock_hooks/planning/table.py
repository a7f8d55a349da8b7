"""The table of a plan: a row for each site to be, and the main rate over its schedule."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..attachment.place import Placement
from ..attachment.report import block_cell, entry_of, is_clipped
from ..findings import Finding
from ..regularizers.base import rate_range
from ..regularizers.retune import held_rate
from ..selectors.index import HELD
from ..selectors.wrappers import bare_type
from ..sites.site import Site
from ..tables import Section, Short, Table, named, ranged

Size = tuple[int, ...]
Range = tuple[float, float]


@dataclass(frozen=True)
class PlanRow:
    """One planned site. Without a forward, `shape`, `layout`, `calls` and sizes are None."""

    site: str  # its key in the Attachment
    selector: str  # the selector of its spec entry
    regularizer: str  # the regularizer or observer
    type: str  # class name of the layer
    at: str  # "output", "input", "parameter" or "attribute"
    shape: Any  # of the tensor of the last call; of a tuple, list or dict its type and size
    layout: str | None  # the axes, where the regularizer needs them
    calls: int | None  # calls of the layer per forward
    aliases: tuple[str, ...]  # other names of the same, shared, layer
    map_size: Size | None  # spatial size of the map seen last
    block_size: Size | None  # the block size on this map
    clipped: bool  # whether the block was clipped to the map
    rate: float | Range | None  # the nominal rate, (lowest, highest) over the schedule
    expected_share: float | Range | None  # of the elements that are dropped at these rates
    problem: str | None  # why it can't work there


class Plan(Table[PlanRow]):
    """The planned sites as a table, with problems and warnings below it.

    Example:
        >>> plan(nn.Sequential(nn.ReLU()), {"0": Dropout(0.1)}, torch.ones(2, 3)).problems
        ()

    Attributes:
        problems: the errors; ``attach(..., example_input=...)`` raises a `SpecError` with them.
        warnings: a line for each likely mistake and each note.
        findings: the warnings as `Finding` objects, grouped by cause.
    """

    def __init__(
        self, rows: Sequence[PlanRow], title: str, problems: list[str], findings: list[Finding]
    ) -> None:
        self.problems = tuple(problems)
        self.findings = tuple(findings)
        notes = {"problems": self.problems, "warnings": self.warnings}
        section = Section(rows, _COLUMNS, entry=lambda row: entry_of(row.selector, row))
        super().__init__(rows, _COLUMNS, title, sections=[section], notes=notes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The findings as text."""
        return tuple(map(str, self.findings))


_COLUMNS: dict[str, Any] = {
    "site": lambda row: named(row.site, row.aliases),
    "type": lambda row: Short(row.type),
    "shape": lambda row: row.shape,
    "layout": lambda row: row.layout,
    "calls": lambda row: row.calls,
    "block": block_cell,
    "rate": lambda row: ranged(row.rate),
    "expected": lambda row: ranged(row.expected_share),
}


def plan_row(
    key: str, p: Placement, site: Site | None = None, shape: Any = None, problem: str | None = None
) -> PlanRow:
    """The row of a placement; without a forward there is no site that has met anything."""
    regularizer, target = p.regularizer, p.target
    size, calls = (None, None) if site is None else (site.map_size, site.calls)
    block = None if size is None else regularizer.block_in_force(size)
    held = getattr(target.module, target.local) if site and target.form else None
    rates = rate_range(regularizer) or ()
    name = next(iter(regularizer.rates), "")
    shares = [
        regularizer.expected_share({**regularizer.values(0.0), name: rate}, size or None)
        for rate in rates
    ]
    idle = calls == 0 and not held_rate(regularizer)  # which may be read without a call
    return PlanRow(
        site=key,
        selector=str(p.entry.selector),
        regularizer=repr(regularizer),
        type=bare_type(target.module).__name__,
        at=HELD[target.form].noun if target.form else regularizer.at,
        shape=tuple(held.shape) if isinstance(held, Tensor) else shape,
        layout=site.layout or None if site and calls else None,
        calls=calls,
        aliases=target.aliases,
        map_size=size,
        block_size=block,
        clipped=is_clipped(block, regularizer),
        rate=range_of(rates),
        expected_share=0.0 if idle else range_of(shares),
        problem=problem,
    )


def range_of(values: Iterable[float | None]) -> float | Range | None:
    """The lowest and the highest value, or one number if they are equal."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return known[0] if min(known) == max(known) else (min(known), max(known))
