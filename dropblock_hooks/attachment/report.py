"""Makes the report of all sites as a table, also with the counts of several processes.

`Attachment.report` calls these functions. The table of `plan` has some of the same cells.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

from ..diagnosis.blocks import is_clipped
from ..observers.base import Observer, sees_tensors
from ..quoting import described
from ..registry import stated_fields, text
from ..regularizers.base import Regularizer
from ..regularizers.dropout import DropsShare
from ..sites.counter import Counter, Norms
from ..sites.processes import gathered
from ..sites.run import Run
from ..sites.site import LiveSite
from ..tables import Columns, Section, Short, Table, Varying, named
from ..tables import shown as cell

Size = tuple[int, ...] | None


@dataclass(frozen=True)
class SiteRow:
    """The row of a site in a report.

    Norms belong to the gradients in the last window, before the bound; see `Norms`. For
    `AdaptiveClipGrad` they are divided by the norm of the weights. Without a bound, norms are None.
    """

    site: str  # the key of the site
    regularizer: str  # the regularizer or observer
    acts_on: str  # "activation" or "gradient"
    at: str  # "output", "input", "parameter" or "attribute"
    rate: float | None  # the present main rate or bound
    values: dict[str, float]  # all present rates and bounds, by field
    realized_rate: float | None  # share of the elements dropped or changed in the last window
    total_realized_rate: float | None  # share of the elements dropped or changed since attaching
    mean_norm: float | None
    median_norm: float | None
    p90_norm: float | None
    p99_norm: float | None
    largest_norm: float | None
    calls: int  # calls of the layer
    active_calls: int  # calls in which the regularizer acted; for gradients, the gradients it saw
    calls_per_forward: float | None  # calls of the layer in one forward of the model
    map_size: Size  # spatial size of the last tensor
    map_varies: bool  # whether earlier tensors had other sizes
    block_size: Size  # size of the blocks on this map
    clipped: bool  # whether blocks are smaller than asked for, because the map is smaller
    aliases: tuple[str, ...]  # other names of a shared layer
    observed: Any = None  # the result of an observer for the last window
    frozen: bool = False  # whether the target is a parameter with requires_grad=False
    penalty: float | None = None  # mean value of a penalty in the last window, without its weight


_NAME: Columns[SiteRow] = {"site": lambda row: named(row.site, row.aliases)}
_CALLS: Columns[SiteRow] = {
    "calls\ntotal": attrgetter("calls"),
    "active\ntotal": attrgetter("active_calls"),
}
_NORMS: Columns[SiteRow] = {
    "mean": lambda row: Varying(row.mean_norm),
    "p99": lambda row: Varying(row.p99_norm),
    "largest": lambda row: Varying(row.largest_norm),
}


class Reading(NamedTuple):
    """What a report reads from a site, on one rank or on all ranks together."""

    counter: Counter
    state: Any  # of the observer; None without one, or without any call
    is_open: bool | None  # whether the numbers are of this epoch, not the last; None without any


Readings: TypeAlias = dict[str, Reading]
"""The reading of each site, by key; ``""`` stands for the model."""


def readings(sites: Sequence[LiveSite], run: Run) -> Readings:
    """Read the counts and states of all sites. This waits for the device."""
    run.take_counts()
    result: Readings = {"": Reading(run.counter, state=None, is_open=True)}
    for site in sites:
        state = None if site.watch is None else site.watch.shown()
        counter = site.tally.read()
        result[site.key] = Reading(counter, state, _is_open(site, counter))
    return result


def summed(local: Readings, sites: Sequence[LiveSite]) -> Readings:
    """Return the sums of the counts of all ranks.

    Raises:
        RuntimeError: if the ranks have different sites.
    """
    ranks: list[Readings] = gathered(local)
    if any(list(readings_of_rank) != list(ranks[0]) for readings_of_rank in ranks):
        raise RuntimeError(
            "the ranks have different sites: verify(distributed=True) says where they differ"
        )

    observers = {site.key: site.watch.observer for site in sites if site.watch is not None}
    result: Readings = {}
    for key in local:
        of_ranks = [readings_of_rank[key] for readings_of_rank in ranks]
        result[key] = _sum(of_ranks, observers.get(key))
    return result


def _sum(of_ranks: Sequence[Reading], observer: Observer | None) -> Reading:
    """Return the readings of a site on all ranks as one."""
    counter = reduce(Counter.plus, [reading.counter for reading in of_ranks])
    is_open = _any_open([reading.is_open for reading in of_ranks])
    of_window = of_ranks
    if is_open:  # a rank without calls in this epoch may have the state of the last one
        of_window = [reading for reading in of_ranks if reading.is_open is not False]
    states = [reading.state for reading in of_window if reading.state]
    state = None
    if observer is not None and states:
        state = reduce(observer.merge, states)
    return Reading(counter, state, is_open)


def _site_row(site: LiveSite, numbers: Readings) -> SiteRow:
    """Make the row of a site."""
    counter, state, _ = numbers[site.key]
    life = counter.life()
    shown = counter.shown()
    penalizes = site.regularizer.penalizes
    # a penalty puts its values in the place of norms
    norms_or_penalties = shown.norms
    norms = Norms(None) if penalizes else norms_or_penalties

    forwards = numbers[""].counter.life().calls
    # the `ModelHook` leaves a compiled model, and then counts no forwards
    counts_forwards = forwards and not site.run.compiled

    regularizer = site.regularizer
    size = counter.map_size
    block = None if size is None else regularizer.block_in_force(size)
    return SiteRow(
        site=site.key,
        regularizer=repr(regularizer),
        acts_on=regularizer.acts_on,
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
        calls_per_forward=life.calls / forwards if counts_forwards else None,
        map_size=size,
        map_varies=counter.map_varies,
        block_size=block,
        clipped=is_clipped(block, regularizer),
        aliases=site.aliases,
        observed=_result(site, state) if site.watch and state else None,
        frozen=site.frozen,
        penalty=norms_or_penalties.mean if penalizes else None,
    )


def _result(site: LiveSite, state: Any) -> Any:
    """Compute the result of an observer. Errors name the site."""
    try:
        return site.bound.observer.compute(state)
    except Exception as error:  # the observer may be a user's class
        raise site.error(f"compute raised {described(error)}") from error


def block_cell(row: Any, only_limited: bool = False) -> str:
    """Return the block size of a row; with `only_limited`, only if the map limits the block."""
    covers_map = row.block_size is not None and row.block_size == row.map_size
    mark = ""
    if row.clipped:
        mark = " (clipped)"
    elif covers_map:
        mark = " (whole map)"

    if only_limited and not mark:
        return ""
    return f"{cell(row.block_size)}{mark}"


def frozen_cell(row: Any) -> str:
    """Return the cell that says whether a parameter is frozen."""
    return "yes" if row.frozen else ""  # a table leaves empty columns out


def entry_of(selector: str, row: Any) -> str | None:
    """Return the selector of the entry and the class, by which rows may print as one line.

    None for a layer with several names, because its row prints all of them.
    """
    return None if row.aliases else f"{selector}/{row.site.rpartition('/')[2]}"


def site_table(sites: Sequence[LiveSite], numbers: Readings, title: str) -> Table[SiteRow]:
    """Make the table of all sites, with a section for each kind of site."""
    rows = [_site_row(site, numbers) for site in sites]
    groups: dict[Any, list[tuple[LiveSite, SiteRow]]] = {"activation": [], "gradient": []}
    for site, row in zip(sites, rows, strict=True):
        item = site.regularizer
        group_key = type(item) if isinstance(item, Observer) else item.acts_on
        groups.setdefault(group_key, []).append((site, row))

    sections = chain.from_iterable(_sections(group, numbers) for group in groups.values() if group)
    return Table(rows, columns={}, title=title, sections=sections)


def _sections(
    members: Sequence[tuple[LiveSite, SiteRow]], numbers: Readings
) -> Iterator[Section[SiteRow]]:
    """Make the section of sites of the same kind, and the section of their norms."""
    sites = {site.key: site for site, _ in members}
    rows = [row for _, row in members]
    window, keys_of_window = _shown_window(sites.values(), numbers)

    def entry(row: SiteRow) -> str | None:
        return entry_of(sites[row.site].selector, row)

    def options(row: SiteRow) -> Short:
        return _options_cell(sites[row.site].regularizer)

    def share(row: SiteRow) -> Varying:
        rate = row.realized_rate if row.site in keys_of_window else None
        return Varying(rate, is_share=True)

    def penalty(row: SiteRow) -> Varying:
        return Varying(row.penalty if row.site in keys_of_window else None)

    def rate(row: SiteRow) -> Any:
        return _rate_cell(sites[row.site].regularizer, row)

    first_site, _ = members[0]
    first = first_site.regularizer  # the others are of the same kind
    note = ""
    columns: Columns[SiteRow]
    if isinstance(first, Observer):
        if first.by_epoch:  # otherwise the report shows no result, only calls
            note = f"{first.label}, {window}"
        columns = _observer_columns(first, rows, keys_of_window)
    elif first.acts_on == "gradient":
        note = "gradients (changed: share of their values)"
        has_penalty = any(row.penalty is not None for row in rows)
        of_penalty: Columns[SiteRow] = {f"penalty\n{window}": penalty} if has_penalty else {}
        columns = {"bounds\nnow": _bounds_cell, f"changed\n{window}": share}
        columns |= of_penalty | _CALLS
    else:
        columns = {"rate\nnow": rate, f"realized\n{window}": share, **_CALLS}
        columns |= {"map\nlast": _map_cell, "block\nlast": partial(block_cell, only_limited=True)}
    columns = {**_NAME, "options": options, **columns, "frozen": frozen_cell}
    yield Section(rows, columns, note, entry)

    note = f"norms before the bound, {window} (ClampGrad: largest magnitudes; "
    note += "AdaptiveClipGrad: over weights)"
    yield Section(_with_norms(rows, keys_of_window), _NAME | _NORMS, note, entry)


def _rate_cell(regularizer: Regularizer, row: SiteRow) -> Any:
    """Return the first rate, or all rates with their names.

    A class that drops a share p shows p alone, because the realized rate beside it should match.
    """
    has_one_rate = isinstance(regularizer, DropsShare) or len(regularizer.ranges()) < 2
    return row.rate if has_one_rate else _bounds_cell(row)


def _options_cell(regularizer: Regularizer) -> Short:
    """Return the fields that differ from their defaults. Rates have their own column."""
    rates = regularizer.rates
    stated = stated_fields(regularizer)
    # a `Foreign` states its target under an empty name
    options = [
        f"{name}={text(value)}" for name, value in stated.items() if name and name not in rates
    ]
    return Short(", ".join(options), repr(regularizer))


def _with_norms(rows: Sequence[SiteRow], keys_of_window: set[str]) -> list[SiteRow]:
    """Return the rows with norms of the window that a section shows."""
    of_window = [row for row in rows if row.site in keys_of_window]
    return [row for row in of_window if row.mean_norm is not None]


def _observer_columns(
    observer: Observer, rows: Sequence[SiteRow], keys_of_window: set[str]
) -> Columns[SiteRow]:
    """Return the columns of an observer; by default, one for each key of the first result."""
    # a layer whose parameters have not changed since the last epoch still has its numbers
    if not sees_tensors(observer):
        keys_of_window = {row.site for row in rows}

    readers = observer.columns
    if not readers:
        results = [row.observed for row in rows if row.observed is not None]
        first: Any = results[0] if results else {}
        readers = {head: itemgetter(head) for head in first}

    columns: Columns[SiteRow] = {"calls\ntotal": attrgetter("calls")}
    for head, read in readers.items():
        columns[head] = partial(_result_in_window, read, keys_of_window)
    return columns


def _shown_window(sites: Iterable[LiveSite], numbers: Readings) -> tuple[str, set[str]]:
    """Return the name of the window that a section shows, and the keys of sites with this window.

    A section shows this epoch if any of its sites has counts in this epoch.
    """
    is_open = {site.key: numbers[site.key].is_open for site in sites}
    if _any_open(is_open.values()) is False:
        return "last epoch", set(is_open)
    return "this epoch", {key for key, answer in is_open.items() if answer is not False}


def _any_open(answers: Iterable[bool | None]) -> bool | None:
    """Return `Reading.is_open` of several readings together: that of this epoch, if one is."""
    known = [answer for answer in answers if answer is not None]
    return any(known) if known else None


def _is_open(site: LiveSite, counter: Counter) -> bool | None:
    """Return whether the row of a site shows this epoch, or the last one; None if it is empty."""
    watch = site.watch
    if watch is None:
        has_open = bool(counter.window().total)
        has_closed = bool(counter.closed.total)
    else:
        has_open = not watch.observer.is_empty(watch.open)
        has_closed = watch.closed is not None
    return has_open if has_open or has_closed else None


def _result_in_window(read: Callable[[Any], Any], keys_of_window: set[str], row: SiteRow) -> Any:
    if row.observed is None or row.site not in keys_of_window:
        return None
    return read(row.observed)


def _bounds_cell(row: SiteRow) -> str:
    return ", ".join(f"{name}={cell(bound)}" for name, bound in row.values.items())


def _map_cell(row: SiteRow) -> Any:
    if row.map_varies:
        return f"{cell(row.map_size)} (varies)"
    return "" if row.map_size is None else Varying(row.map_size)
