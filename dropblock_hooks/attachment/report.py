"""The report of all sites, as a table; of several processes, the sums of their counts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

from torch import distributed

from ..observers.base import Observer
from ..quoting import described
from ..registry import stated_fields, text
from ..regularizers.base import Regularizer
from ..sites.counter import Counter
from ..sites.run import Run, world_size
from ..sites.site import Site
from ..tables import Columns, Section, Short, Table, Varying, named
from ..tables import shown as cell

Size = tuple[int, ...] | None


@dataclass(frozen=True)
class SiteRow:
    """The row of a site in a report.

    Its norms are of the gradients in the last window, before the bound; see `Norms`. For
    `AdaptiveClipGrad` they are divided by the norm of the weights. None without a bound.
    """

    site: str  # its key
    regularizer: str  # or the observer
    acts_on: str  # "activation" or "gradient"
    at: str  # "output", "input", "parameter" or "attribute"
    rate: float | None  # the main rate, or bound, now
    values: dict[str, float]  # all rates and bounds now, by field
    realized_rate: float | None  # share of the elements dropped or changed in the last window
    total_realized_rate: float | None  # the same since attaching
    mean_norm: float | None
    median_norm: float | None
    p90_norm: float | None
    p99_norm: float | None
    largest_norm: float | None
    calls: int  # of the layer
    active_calls: int  # in which the regularizer acted; for gradients, the gradients it saw
    calls_per_forward: float | None  # calls of the layer in one forward of the model
    map_size: Size  # spatial size of the last tensor
    map_varies: bool  # whether earlier tensors had other sizes
    block_size: Size  # of the blocks on this map
    clipped: bool  # whether blocks are smaller than asked for, because the map is smaller
    aliases: tuple[str, ...]  # other names of the same, shared, layer
    observed: Any = None  # the result of an observer for the last window
    frozen: bool = False  # whether it is a parameter with requires_grad=False


Readings: TypeAlias = dict[str, tuple[Counter, Any]]
"""The counts of each site, and the state of its observer, by key; ``""`` is the model itself."""


def readings(sites: Sequence[Site], run: Run) -> Readings:
    run.take_counts()
    have = {site.key: (site.tally.read(), site.watch and site.watch.shown()) for site in sites}
    return {"": (run.counter, None), **have}


def gathered(mine: Any) -> list[Any]:
    """The objects of all ranks, in the order of the ranks."""
    if not world_size():
        raise RuntimeError(
            "distributed=True needs a process group: call torch.distributed.init_process_group "
            "first, or leave distributed= out"
        )
    found: list[Any] = [None] * world_size()
    distributed.all_gather_object(found, mine)
    return found


def summed(mine: Readings, sites: Sequence[Site]) -> Readings:
    """The sums of the counts of all ranks; RuntimeError on each rank if their sites differ."""
    ranks: list[Readings] = gathered(mine)
    if any(list(each) != list(ranks[0]) for each in ranks):
        raise RuntimeError(
            "the ranks have different sites: verify(distributed=True) says where they differ"
        )
    total = {key: reduce(Counter.plus, (each[key][0] for each in ranks)) for key in mine}
    have: Readings = {key: (counter, None) for key, counter in total.items()}
    for site in sites:
        states = [state for each in ranks if (state := each[site.key][1])]
        if site.watch is not None and states:
            have[site.key] = total[site.key], reduce(site.watch.observer.merge, states)
    return have


def _site_row(site: Site, have: Readings) -> SiteRow:
    (counted, state), item = have[site.key], site.regularizer
    size, life, shown = counted.map_size, counted.life(), counted.shown()
    norms, forwards = shown.norms, have[""][0].life().calls
    block = None if size is None else item.block_in_force(size)
    return SiteRow(
        site=site.key,
        regularizer=repr(item),
        acts_on=item.acts_on,
        at=site.at,
        rate=site.rate,
        values=dict(site.values),
        realized_rate=shown.share(),
        total_realized_rate=life.share(),
        mean_norm=norms.mean,
        median_norm=norms.quantile(0.5),
        p90_norm=norms.quantile(0.9),
        p99_norm=norms.quantile(0.99),
        largest_norm=norms.largest,
        calls=life.calls,
        active_calls=life.active,
        calls_per_forward=None if site.run.compiled or not forwards else life.calls / forwards,
        map_size=size,
        map_varies=counted.map_varies,
        block_size=block,
        clipped=is_clipped(block, item),
        aliases=site.aliases,
        observed=_result(site, state) if site.watch and state else None,
        frozen=site.frozen,
    )


def _result(site: Site, state: Any) -> Any:
    try:
        return site.bound.observer.compute(state)
    except Exception as error:  # of an observer that somebody else wrote
        raise site.error(f"compute raised {described(error)}") from error


def is_clipped(block: tuple[int, ...] | None, regularizer: Regularizer) -> bool:
    return block is not None and block != getattr(regularizer, "edges", block)


def block_cell(row: Any, only_limited: bool = False) -> str:
    """The block of a row of a report or plan; on request only where the map limits it."""
    covers = row.block_size is not None and row.block_size == row.map_size
    mark = " (clipped)" if row.clipped else " (whole map)" if covers else ""
    return f"{cell(row.block_size)}{mark}" if mark or not only_limited else ""


def frozen_cell(row: Any) -> str:
    return "yes" if row.frozen else ""  # a table leaves empty columns out


def entry_of(selector: str, row: Any) -> str | None:
    """The spec entry and the class, which rows have in common that print as one line."""
    return None if row.aliases else f"{selector}/{row.site.rpartition('/')[2]}"


def site_table(sites: Sequence[Site], have: Readings, title: str) -> Table[SiteRow]:
    """The rows of all sites, which print as a table with a section for each kind of site."""
    rows = [_site_row(site, have) for site in sites]
    groups: dict[Any, list[tuple[Site, SiteRow]]] = {"activation": [], "gradient": []}
    for site, row in zip(sites, rows, strict=True):
        item = site.regularizer
        group = type(item) if isinstance(item, Observer) else item.acts_on
        groups.setdefault(group, []).append((site, row))
    sections = chain.from_iterable(_sections(group, have) for group in groups.values() if group)
    return Table(rows, {}, title, sections=sections)


def _sections(
    members: Sequence[tuple[Site, SiteRow]], have: Readings
) -> Iterator[Section[SiteRow]]:
    """The section of sites of the same kind, and the section of their norms."""
    known = {site.key: site for site, _ in members}
    rows, first = [row for _, row in members], members[0][0].regularizer
    open_ = {key for key, site in known.items() if _is_open(site, have[key][0])}
    window = "this epoch" if open_ else "last epoch"

    def entry(row: SiteRow) -> str | None:
        return entry_of(known[row.site].selector, row)

    def options(row: SiteRow) -> Short:
        item = known[row.site].regularizer
        stated = {n: x for n, x in stated_fields(item).items() if n and n not in item.rates}
        return Short(", ".join(f"{n}={text(x)}" for n, x in stated.items()), repr(item))

    def share(row: SiteRow) -> Varying:
        return Varying(row.realized_rate if row.site in open_ or not open_ else None)

    note = ""
    columns: Columns[SiteRow] = {}
    calls: Columns[SiteRow] = {"calls\ntotal": attrgetter("calls")}
    if isinstance(first, Observer):
        note = f"{first.label}, {window}" if first.by_epoch else ""
        seen: Any = next((row.observed for row in rows if row.observed is not None), {})
        found = first.columns or {head: itemgetter(head) for head in seen}
        calls |= {head: partial(_observed, find) for head, find in found.items()}
    else:
        calls["active\ntotal"] = attrgetter("active_calls")
        if first.acts_on == "gradient":
            note = "gradients (changed: share of their values)"
            columns = {"bounds\nnow": _bounds_cell, f"changed\n{window}": share}
        else:
            columns = {"rate\nnow": attrgetter("rate"), f"realized\n{window}": share}
            calls["map\nlast"] = _map_cell
            calls["block\nlast"] = partial(block_cell, only_limited=True)
    name: Columns[SiteRow] = {"site": lambda row: named(row.site, row.aliases)}
    frozen: Columns[SiteRow] = {"frozen": frozen_cell}
    yield Section(rows, {**name, "options": options, **columns, **calls, **frozen}, note, entry)
    norms: Columns[SiteRow] = {
        "mean": lambda row: Varying(row.mean_norm),
        "p99": lambda row: Varying(row.p99_norm),
        "largest": lambda row: Varying(row.largest_norm),
    }
    note = f"norms before the bound, {window} (ClampGrad: largest magnitudes; "
    note += "AdaptiveClipGrad: over weights)"
    yield Section([row for row in rows if row.mean_norm is not None], name | norms, note, entry)


def _is_open(site: Site, counted: Counter) -> bool:
    """Whether its row shows this epoch, rather than the last one."""
    watch = site.watch
    if watch is not None:
        return watch.closed is None or not watch.observer.is_empty(watch.open)
    return bool(counted.window().total) or not counted.closed.total


def _observed(find: Callable[[Any], Any], row: SiteRow) -> Any:
    return None if row.observed is None else find(row.observed)


def _bounds_cell(row: SiteRow) -> str:
    return ", ".join(f"{name}={cell(bound)}" for name, bound in row.values.items())


def _map_cell(row: SiteRow) -> Any:
    if row.map_varies:
        return f"{cell(row.map_size)} (varies)"
    return "" if row.map_size is None else Varying(row.map_size)
