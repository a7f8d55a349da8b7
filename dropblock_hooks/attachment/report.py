"""The report: what has happened at each site."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..findings import Finding, Kind, Severity
from ..observers.base import Observer
from ..registry import name_of, text
from ..regularizers.base import Regularizer
from ..regularizers.rates import RateLike
from ..schedules.base import Schedule, span_of
from ..sites.counter import Totals, read
from ..sites.run import Run
from ..sites.site import Site
from ..tables import Columns, Forms, Section, Table, named, ranged
from ..tables import shown as cell

Size = tuple[int, ...] | None


@dataclass(frozen=True)
class SiteRow:
    """One site in a report. Norms are None where there are none.

    Attributes:
        site: its key.
        regularizer: what is done there.
        acts_on: ``"activation"`` or ``"gradient"``.
        at: ``"output"``, ``"input"``, ``"parameter"`` or ``"attribute"``.
        rate: the main rate, or bound, now.
        values: all rates and bounds now, by field.
        realized_rate: share of the elements that were dropped in the last window; for gradients,
            share of the values that were changed by the bound.
        total_realized_rate: the same since attaching.
        mean_norm: mean norm of the gradients of the last window before the bound, for the unscaled
            loss. For ``per="sample"`` and ``"channel"`` of these parts, for `ClampGrad` the
            largest magnitude, for `AdaptiveClipGrad` divided by the norm of the weights.
        median_norm: their median. Quantiles have an error of up to 9 %.
        p90_norm: their 90 % quantile.
        p99_norm: their 99 % quantile.
        largest_norm: the largest of them.
        calls: forward calls of the layer.
        active_calls: calls in which the regularizer acted; for gradients, the gradients it saw.
        calls_per_forward: calls of the layer in one forward of the model.
        map_size: spatial size of the last tensor.
        map_varies: whether earlier tensors had other sizes.
        block_size: the size of the blocks on this map.
        clipped: whether blocks are smaller than asked for, because the map is smaller.
        aliases: other names of the same, shared, layer.
        observed: what an observer has seen in the last window.
    """

    site: str
    regularizer: str
    acts_on: str
    at: str
    rate: float | None
    values: dict[str, float]
    realized_rate: float | None
    total_realized_rate: float | None
    mean_norm: float | None
    median_norm: float | None
    p90_norm: float | None
    p99_norm: float | None
    largest_norm: float | None
    calls: int
    active_calls: int
    calls_per_forward: float | None
    map_size: Size
    map_varies: bool
    block_size: Size
    clipped: bool
    aliases: tuple[str, ...]
    observed: Any = None


class Readings(NamedTuple):
    """What all sites have counted.

    Attributes:
        sites: by key.
        forwards: of the model so far; None where compiled ones could not be counted.
        observed: the states of observers, by key; None where nothing was seen.
    """

    sites: dict[str, Totals]
    forwards: int | None
    observed: dict[str, Any]


def readings(sites: Sequence[Site], run: Run) -> Readings:
    """What they have counted so far."""
    totals = read([site.counter for site in sites])
    counted = {site.key: each for site, each in zip(sites, totals, strict=True)}
    compiled = any(each.life.compiled for each in totals)
    forwards = run.counter.snapshot().calls
    return Readings(counted, None if compiled else forwards, observations(sites))


def observations(sites: Sequence[Site]) -> dict[str, Any]:
    """The states of the observers among them, by key; None where nothing was seen."""
    return {site.key: site.watch.shown() for site in sites if site.watch is not None}


def results(sites: Sequence[Site], states: Mapping[str, Any]) -> dict[str, Any]:
    """What observers compute from their states, by key; without those that have seen nothing."""
    watches = {site.key: site.watch for site in sites if site.watch is not None}
    return {
        key: watch.observer.compute(states[key])
        for key, watch in watches.items()
        if states[key] is not None
    }


def site_row(site: Site, counted: Totals, forwards: int | None, observed: Any = None) -> SiteRow:
    """The row of a site; `forwards` are those of the model, for the calls in each."""
    size, life, shown = counted.map_size, counted.life, counted.shown
    block = None if size is None else site.regularizer.block_in_force(size)
    norms = shown.norms
    return SiteRow(
        site=site.key,
        regularizer=repr(site.regularizer),
        acts_on=site.regularizer.acts_on,
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
        calls_per_forward=life.calls / forwards if forwards else None,
        map_size=size,
        map_varies=counted.map_varies,
        block_size=block,
        clipped=is_clipped(block, site.regularizer),
        aliases=site.aliases,
        observed=observed,
    )


def scalars(sites: Sequence[Site], prefix: str) -> dict[str, float]:
    """Rates, realized rates of the sites that were active, and what was observed, by tag."""
    found: dict[str, float] = {}
    observed = results(sites, observations(sites))
    totals = read([site.counter for site in sites])
    trained = any(each.window.trained or each.window.active for each in totals)
    for site, counted in zip(sites, totals, strict=True):
        numbers: dict[str, Any] = dict(site.values)
        numbers["realized_rate"] = (counted.window if trained else counted.shown).share()
        seen = observed.get(site.key, {})
        numbers |= seen if isinstance(seen, Mapping) else seen.scalars()
        found |= {f"{prefix}{site.key}/{n}": x for n, x in numbers.items() if x is not None}
    return found


def is_clipped(block: Size, regularizer: Regularizer) -> bool:
    """Whether a block in force is smaller than the one asked for."""
    if block is None:
        return False
    asked = getattr(regularizer, "block_size", None)
    edges = asked if isinstance(asked, tuple) else (asked,) * len(block)
    return any(b < edge for b, edge in zip(block, edges, strict=True) if isinstance(edge, int))


def block_cell(row: Any) -> str:
    """The block of a row of a report or plan."""
    return cell(row.block_size) + (" (clipped)" if row.clipped else "")


class Report(Table[SiteRow]):
    """What happened at each site: regularizers of activations, of gradients, then observers.

    Attributes:
        findings: blocks that are larger than the map, and bounds that change nearly all gradients.
    """

    def __init__(self, sections: Sequence[Section[SiteRow]], rows: Sequence[SiteRow], title: str):
        filled = next((each for each in sections if each.rows), sections[0])
        super().__init__(rows, filled.columns, title, sections=sections)
        self.findings = tuple(finding for row in rows for finding in _clipped(row))


def _clipped(row: SiteRow) -> Iterator[Finding]:
    site, note = (row.site,), Severity.NOTE
    if row.clipped:
        text = f"the blocks are clipped to the map: {cell(row.block_size)} of {cell(row.map_size)}"
        yield Finding(Kind.CLIPPED, note, site, text, "Ask for a smaller block_size")
    share = row.realized_rate or 0.0
    if row.mean_norm is not None and share > _NEARLY_ALL and row.active_calls >= _FEW:
        text = f"the bound changed {share:.0%} of the gradients; their mean norm was "
        text += f"{row.mean_norm:.3g}"
        cure = "Raise the bound or lower the learning rate: the bound sets the length of each step"
        yield Finding(Kind.CLIPPED, note, site, text, cure)


_NEARLY_ALL, _FEW = 0.9, 10

_OF_GRADIENTS = "gradients (changed: share of their values that was changed)"
_OF_NORMS = "norms before the bound (ClampGrad: largest magnitudes; AdaptiveClipGrad: over weights)"


def site_table(sites: Sequence[Site], have: Readings, title: str) -> Report:
    """The rows of all sites with what they have counted, which print as a table."""
    forms = {site.key: shortened(site.regularizer) for site in sites}
    shared: Columns[SiteRow] = {
        "site": lambda row: named(row.site, row.aliases),
        "regularizer": lambda row: forms[row.site],
    }
    calls: Columns[SiteRow] = {
        "calls": _calls,
        "active": lambda row: row.active_calls,
    }
    columns: Columns[SiteRow] = {
        **shared,
        "rate now": lambda row: row.rate,
        "realized": lambda row: row.realized_rate,
        **calls,
        "map": lambda row: cell(row.map_size) + (" (varies)" if row.map_varies else ""),
        "block": block_cell,
    }
    gradients: Columns[SiteRow] = {
        **shared,
        "bound now": _bound,
        "changed": lambda row: row.realized_rate,
        **calls,
    }
    norms: Columns[SiteRow] = {
        "site": shared["site"],
        "mean": lambda row: row.mean_norm,
        "p50": partial(_quantile, "median_norm"),
        "p90": partial(_quantile, "p90_norm"),
        "p99": partial(_quantile, "p99_norm"),
        "largest": lambda row: row.largest_norm,
    }
    observed = results(sites, have.observed)
    rows = {
        site.key: site_row(site, have.sites[site.key], have.forwards, observed.get(site.key))
        for site in sites
    }
    watching = [site for site in sites if isinstance(site.regularizer, Observer)]
    acting = [rows[site.key] for site in sites if site not in watching]
    sections = [
        Section([row for row in acting if row.acts_on != "gradient"], columns),
        Section([row for row in acting if row.acts_on == "gradient"], gradients, _OF_GRADIENTS),
        Section([row for row in acting if row.mean_norm is not None], norms, _OF_NORMS),
        *_observed(watching, rows, {**shared, "calls": calls["calls"]}),
    ]
    return Report(sections, list(rows.values()), title)


def _observed(
    sites: Sequence[Site], rows: Mapping[str, SiteRow], plain: Columns[SiteRow]
) -> Iterator[Section[SiteRow]]:
    """What observers have seen: the sites of each class under its headings."""
    for kind in dict.fromkeys(type(site.regularizer) for site in sites):
        group = [site for site in sites if type(site.regularizer) is kind]
        note, columns = group[0].regularizer.headings()  # type: ignore[attr-defined]  # an Observer
        if not columns:
            seen = [rows[site.key].observed for site in group]
            columns = {name: operator.itemgetter(name) for name in next(filter(None, seen), {})}
        shown = {name: partial(_of_observed, find) for name, find in columns.items()}
        yield Section([rows[site.key] for site in group], {**plain, **shown}, note)


def _of_observed(find: Callable[[Any], Any], row: SiteRow) -> Any:
    return None if row.observed is None else find(row.observed)


def _calls(row: SiteRow) -> str:
    """The number of calls; with those in one forward of the model, where that is not one."""
    each = row.calls_per_forward
    return cell(row.calls) + (f" ({each:.4g} per forward)" if each not in (None, 0, 1) else "")


def _quantile(name: str, row: SiteRow) -> str | None:
    """A quantile with the two digits that are known."""
    norm = getattr(row, name)
    return None if norm is None else f"{norm:.2g}"


def _bound(row: SiteRow) -> str | None:
    """Both bounds, or one with its direction; of a factor that it is one."""
    low, high = row.values.get("min"), row.values.get("max")
    if low is not None and high is not None:
        return ranged((low, high))
    if low is not None or high is not None:
        return f"<= {cell(high)}" if low is None else f">= {cell(low)}"
    if "scale" in row.values:
        return f"x {cell(row.values['scale'])}"
    return cell(row.rate)


def shortened(regularizer: Regularizer) -> Forms:
    """A regularizer as written; with schedules as ranges; and without its name, which a key has."""
    whole = short = repr(regularizer)
    for name, rate in regularizer.rates.items():
        if callable(rate):
            short = short.replace(f"{name}={text(rate)}", f"{name}={_span(rate)}", 1)
    label = regularizer.label  # of a Foreign it ends in a bracket, and its repr goes on inside
    head = f"{label[:-1]}, " if label.endswith(")") else f"{label}("
    options = short[len(head) : -1] if short.startswith(head) else ""
    untold = (
        "" if isinstance(regularizer, Observer) else short
    )  # the note tells an observer's class
    return Forms((whole, short, options or untold))


def _span(rate: RateLike) -> str:
    """The lowest and the highest value of a schedule, where they are known."""
    low, high = span_of(rate)
    if math.isfinite(high - low):
        return ranged(low if low == high else (low, high))
    return f"{name_of(type(rate))}(…)" if isinstance(rate, Schedule) else text(rate)
