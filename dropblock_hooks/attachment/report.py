"""The report of all sites, as a table and for loggers."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter, itemgetter
from statistics import mean
from typing import Any, NamedTuple

from ..findings import Finding, Kind, Severity
from ..observers.base import Observer
from ..quoting import kind_of
from ..registry import stated_fields, text
from ..regularizers.base import Regularizer
from ..sites.counter import Counter
from ..sites.run import Run
from ..sites.site import Site
from ..tables import Columns, Section, Short, Table, Varying, named
from ..tables import shown as cell

Size = tuple[int, ...] | None


@dataclass(frozen=True)
class SiteRow:
    """The row of a site in a report. Without a bound there are no norms: they are None.

    The norms are of the gradients of the last window before the bound, for the unscaled loss: of
    samples or channels with ``per=``. For `ClampGrad` they are largest magnitudes, and for
    `AdaptiveClipGrad` they are divided by the norm of the weights. Quantiles are exact to 9 %.
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


class Readings(NamedTuple):
    """The counts of all sites and the states of observers, by key."""

    sites: dict[str, Counter]
    forwards: int | None  # of the model; None if compiled ones could not be counted
    observed: dict[str, Any]  # None before the first call


def readings(sites: Sequence[Site], run: Run) -> Readings:
    """The counts and states of now."""
    forwards = None if run.compiled else run.counter.life().calls
    return Readings({site.key: site.counter.read() for site in sites}, forwards, _states(sites))


def _states(sites: Sequence[Site]) -> dict[str, Any]:
    return {site.key: site.watch.shown() for site in sites if site.watch is not None}


def _results(sites: Sequence[Site], states: Mapping[str, Any]) -> dict[str, Any]:
    """The results of observers by key, without observers that were never called."""
    known = {site.key: site.watch for site in sites if site.watch is not None}
    held = {key: state for key, state in states.items() if state is not None}
    return {key: known[key].observer.compute(state) for key, state in held.items()}


def scalars(sites: Sequence[Site], prefix: str) -> dict[str, float]:
    """Rates, realized rates of active sites and results of observers, by tag."""
    found: dict[str, float] = {}
    observed = _results(sites, _states(sites))
    windows = [site.counter.read().window() for site in sites]
    trained = any(window.trained or window.active for window in windows)
    for site, window in zip(sites, windows, strict=True):
        numbers: dict[str, Any] = dict(site.values)
        numbers["realized_rate"] = (window if trained else site.counter.shown()).share()
        seen = observed.get(site.key, {})
        numbers |= seen if isinstance(seen, Mapping) else seen.scalars()
        found |= {f"{prefix}{site.key}/{n}": x for n, x in numbers.items() if x is not None}
    return found


def log(writer: Any, scalars: Mapping[str, float], sites: Sequence[Site], step: int) -> None:
    """Give scalars and histograms to a writer, as far as it takes them; see `Attachment.log`."""
    if hasattr(writer, "add_scalar"):
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, step)
        if hasattr(writer, "add_histogram_raw"):
            for tag, counts, edges in _histograms(sites):
                pairs = list(zip(counts, map(mean, pairwise(edges)), strict=True))
                writer.add_histogram_raw(
                    tag,
                    min=edges[0],
                    max=edges[-1],
                    num=sum(counts),
                    sum=sum(n * x for n, x in pairs),
                    sum_squares=sum(n * x * x for n, x in pairs),
                    bucket_limits=edges[1:],
                    bucket_counts=counts,
                    global_step=step,
                )
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(dict(scalars), step=step)
    elif hasattr(writer, "log"):
        given: dict[str, Any] = dict(scalars)
        if "wandb" in (getattr(writer, "__name__", ""), type(writer).__module__.split(".")[0]):
            make = sys.modules["wandb"].Histogram
            given |= {tag: make(np_histogram=bins) for tag, *bins in _histograms(sites)}
        writer.log(given, step=step)
    else:
        raise TypeError(
            "log takes a writer with add_scalar (TensorBoard's), log (a run of wandb) or "
            f"log_metrics, got {kind_of(writer)}: others take attached.scalars()"
        )


def _histograms(sites: Sequence[Site]) -> Iterator[tuple[str, list[int], list[float]]]:
    """Histograms of observers: tags, counts and edges, without empty bins at the ends."""
    observed = _results(sites, _states(sites))
    for site in sites:
        counts = getattr(observed.get(site.key), "histogram", ())
        edges = getattr(site.regularizer, "edges", ())
        if edges and any(counts):
            ends = [0.0, *edges, 2 * edges[-1]]
            held = [i for i, count in enumerate(counts) if count]
            kept = slice(held[0], held[-1] + 1)
            yield f"reg/{site.key}/histogram", list(counts[kept]), ends[held[0] : held[-1] + 2]


def site_row(site: Site, have: Readings, observed: Any) -> SiteRow:
    """The row of a site."""
    counted, item = have.sites[site.key], site.regularizer
    size, life, shown = counted.map_size, counted.life(), counted.shown()
    norms = shown.norms
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
        calls_per_forward=life.calls / have.forwards if have.forwards else None,
        map_size=size,
        map_varies=counted.map_varies,
        block_size=block,
        clipped=is_clipped(block, item),
        aliases=site.aliases,
        observed=observed,
    )


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


class Report(Table[SiteRow]):
    """The table of sites: regularizers of activations, of gradients, then observers.

    Attributes:
        findings: blocks as large as the map, and bounds that change nearly all gradients.
    """

    @property
    def findings(self) -> tuple[Finding, ...]:
        found = [find(row) for find in (block_finding, _bound_finding) for row in self.rows]
        return tuple(filter(None, found))


def _bound_finding(row: SiteRow) -> Finding | None:
    share, norm = row.realized_rate or 0.0, row.mean_norm
    if norm is not None and share > 0.9 and row.active_calls >= 10:
        text = f"the bound changed {share:.0%} of the gradients, of mean norm {norm:.3g}"
        cure = "Raise the bound or lower the learning rate: the bound sets the length of each step"
        return Finding(Kind.CLIPPED, Severity.NOTE, (row.site,), text, cure)
    return None


def site_table(sites: Sequence[Site], have: Readings, title: str) -> Report:
    """The rows of all sites, which print as a table with a section for each kind of site."""
    observed = _results(sites, have.observed)
    rows = [site_row(site, have, observed.get(site.key)) for site in sites]
    groups: dict[Any, list[tuple[Site, SiteRow]]] = {"activation": [], "gradient": []}
    for site, row in zip(sites, rows, strict=True):
        item = site.regularizer
        group = type(item) if isinstance(item, Observer) else item.acts_on
        groups.setdefault(group, []).append((site, row))
    sections: list[Section[SiteRow]] = []
    for members in filter(None, groups.values()):
        sections += _sections(members, have)
    return Report(rows, {}, title, sections=sections)


def _sections(
    members: Sequence[tuple[Site, SiteRow]], have: Readings
) -> Iterator[Section[SiteRow]]:
    """The section of sites of the same kind, and the section of their norms."""
    known = {site.key: site for site, _ in members}
    rows, first = [row for _, row in members], members[0][0].regularizer
    open_ = {key for key, site in known.items() if _is_open(site, have.sites[key])}
    window = "this epoch" if open_ else "last epoch"

    def entry(row: SiteRow) -> str | None:
        return entry_of(known[row.site].selector, row)

    def share(row: SiteRow) -> Varying:
        return Varying(row.realized_rate if row.site in open_ or not open_ else None)

    note = ""
    name: Columns[SiteRow] = {"site": lambda row: named(row.site, row.aliases)}
    options: Columns[SiteRow] = {"options": lambda row: _options(known[row.site].regularizer)}
    calls: Columns[SiteRow] = {"calls\ntotal": _calls}
    active: Columns[SiteRow] = {**calls, "active\ntotal": attrgetter("active_calls")}
    if isinstance(first, Observer):
        note, found = first.headings()
        note = note.replace(first.label, f"{first.label}, {window}", 1)
        seen: Any = next((row.observed for row in rows if row.observed is not None), {})
        found = found or {head: itemgetter(head) for head in seen}

        def observed(find: Callable[[Any], Any], row: SiteRow) -> Any:
            return None if row.observed is None else find(row.observed)

        columns = calls | {head: partial(observed, find) for head, find in found.items()}
    elif first.acts_on == "gradient":
        note = "gradients (changed: share of their values)"
        columns = {
            "bounds\nnow": lambda row: ", ".join(f"{n}={cell(x)}" for n, x in row.values.items()),
            f"changed\n{window}": share,
            **active,
        }
    else:
        columns = {"rate\nnow": attrgetter("rate"), f"realized\n{window}": share, **active}
        columns["map\nlast"] = _map_cell
        columns["block\nlast"] = partial(block_cell, only_limited=True)
    yield Section(rows, name | options | columns, note, entry)
    norms: Columns[SiteRow] = {
        "mean": lambda row: Varying(row.mean_norm),
        "p99": lambda row: Varying(row.p99_norm),
        "largest": lambda row: Varying(row.largest_norm),
    }
    note = f"norms before the bound, {window} (ClampGrad: largest magnitudes; AdaptiveClipGrad: "
    note += "over weights)"
    yield Section([r for r in rows if r.mean_norm is not None], name | norms, note, entry)


def _is_open(site: Site, counted: Counter) -> bool:
    """Whether its row shows this epoch, rather than the last one."""
    watch = site.watch
    if watch is not None:
        return watch.closed is None or not watch.observer.is_empty(watch.open)
    return bool(counted.window().total) or not counted.closed().total


def _calls(row: SiteRow) -> str:
    """The number of calls; also the number in a forward of the model, unless that is 1."""
    each = row.calls_per_forward
    return cell(row.calls) + (f" ({each:.4g} per forward)" if each not in (None, 0, 1) else "")


def _map_cell(row: SiteRow) -> Any:
    if row.map_size is None:
        return ""
    return f"{cell(row.map_size)} (varies)" if row.map_varies else Varying(row.map_size)


def entry_of(selector: str, row: Any) -> str | None:
    """The spec entry and the class, which rows have in common that print as one line."""
    return None if row.aliases else f"{selector}/{row.site.rpartition('/')[2]}"


def _options(regularizer: Regularizer) -> Short:
    """The fields of a regularizer without its rates."""
    stated = stated_fields(regularizer).items()
    own = [f"{n}={text(x)}" for n, x in stated if n and n not in regularizer.rates]
    return Short(", ".join(own), repr(regularizer))
