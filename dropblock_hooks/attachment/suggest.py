"""Gradient bounds, proposed from the norms that were seen before the bounds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ..checks import as_number
from ..quoting import listed
from ..sites.site import Site
from ..tables import Columns, Table


@dataclass(frozen=True)
class Suggestion:
    """One bound of a site, and the proposal."""

    site: str  # its key
    field: str  # "max_norm", "min" or "max"
    bound: float  # its value now
    changed: float | None  # share of the values that it has changed in the last window
    proposed: float | None  # the bound that the wanted share exceeds; None with a reason
    seen: int  # the number of norms; for ClampGrad, of gradients
    over: str  # "window", or "life" where the last window has no norms
    call: str  # the call that sets the bounds of the site; "" with a reason
    reason: str  # why nothing is proposed, or ""


def suggestions(sites: Sequence[Site], share: float) -> Table[Suggestion]:
    """A bound for each site that has one, which this share of the norms exceeds."""
    share = as_number("share", share)
    if not 0.0 < share < 1.0:
        raise ValueError(f"share must be in (0, 1), got {share:g}")
    rows = [row for site in sites for row in _rows(site, share)]
    if not rows:
        there = listed((site.regularizer.label for site in sites), 5) or "no sites"
        raise ValueError(
            "there is nothing to suggest: no site here has a bound on gradients, as ClipGradNorm "
            f"and ClampGrad have (there are: {there})"
        )
    heads = ("site", "bound", "now", "changed", "proposed", "norms", "over")
    names = ("site", "field", "bound", "changed", "proposed", "seen", "over")
    columns: Columns[Suggestion] = dict(zip(heads, map(attrgetter, names), strict=True))
    of = "the norms (of ClampGrad, of the largest magnitudes)"
    title = f"bounds that {share:.4g} of {of} lie beyond"
    calls = list(dict.fromkeys(row.call or f"# {row.site}: {row.reason}" for row in rows))
    return Table(rows, columns, title, notes={"": calls})


def _rows(site: Site, share: float) -> Iterator[Suggestion]:
    counted = site.counter.read()
    norms, over = counted.shown().norms, "window"
    if not norms.bins:
        norms, over = counted.life().norms, "life"
    bound, reason = norms.quantile(1 - share), ""
    if bound is None:
        reason = "no gradient was seen yet: train a step first"
    elif not 0.0 < bound < float("inf"):
        reason = f"no bound has this share beyond it: {1 - share:.4g} of the norms are 0"
    rounded = float(f"{bound or 0.0:.4g}")
    bounds = site.regularizer.bounds.items()
    wanted = {name: sign * rounded for name, sign in bounds if name in site.values}
    given = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
    call = "" if reason else f"attached.set({site.key!r}, {given})"
    for name, value in wanted.items():
        now, changed = site.values[name], counted.shown().share()
        proposed = None if reason else value
        yield Suggestion(site.key, name, now, changed, proposed, norms.count, over, call, reason)
