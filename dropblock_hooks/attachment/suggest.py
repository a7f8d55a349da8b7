"""Bounds for gradients, proposed from the norms that were seen before the bounds of now."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..checks import as_number
from ..quoting import listed
from ..sites.norms import NO_NORMS
from ..sites.site import Site
from ..tables import WIDTH, Table, html_list


@dataclass(frozen=True)
class Suggestion:
    """One bound of a site: what it is, and what it would be.

    Attributes:
        site: its key in the Attachment.
        field: the bound: ``"max_norm"``, ``"min"`` or ``"max"``.
        bound: what it is now.
        changed: share of the values that it has changed in the last window.
        proposed: the bound beyond which the wanted share lies, to 4 digits; None for a reason.
        seen: how many norms there were; of a `ClampGrad`, values.
        over: ``"window"``, or ``"life"`` where the last window has none.
        call: what puts the bounds of the site in place; "" where there is none.
        reason: why nothing is proposed; "" where something is.
    """

    site: str
    field: str
    bound: float
    changed: float | None
    proposed: float | None
    seen: int
    over: str
    call: str
    reason: str


class Suggestions(Table[Suggestion]):
    """A row for each bound, and below them the calls that set the new ones."""

    def _below(self) -> list[str]:
        """Each site once: what to call, or why nothing is proposed."""
        lines = (row.call or f"# {row.site}: {row.reason}" for row in self.rows)
        return list(dict.fromkeys(lines))

    def to_text(self, width: int = WIDTH) -> str:
        """The table as text of at most so many columns; the calls stand whole below it."""
        return "\n".join([super().to_text(width), "", *self._below()])

    def _repr_html_(self) -> str:
        return f"{super()._repr_html_()}\n{html_list('to set them', self._below())}"


def suggestions(sites: Sequence[Site], share: float) -> Suggestions:
    """A bound for each site that has one, beyond which this share of the norms lies."""
    share = as_number("share", share)
    if not 0.0 < share < 1.0:
        raise ValueError(f"share must be in (0, 1), got {share:g}")
    rows = [row for site in sites for row in _rows(site, share)]
    if not rows:
        there = listed((site.regularizer.label for site in sites), 5)
        raise ValueError(
            "there is nothing to suggest: no site here has a bound on gradients, as ClipGradNorm "
            f"and ClampGrad have (there are: {there or 'no sites'})"
        )
    columns = {
        "site": lambda row: row.site,
        "bound": lambda row: row.field,
        "now": lambda row: row.bound,
        "changed": lambda row: row.changed,
        "proposed": lambda row: row.proposed,
        "norms": lambda row: row.seen,
        "over": lambda row: row.over,
    }
    title = f"bounds that {share:.4g} of the norms (of ClampGrad, of the values) lie beyond"
    return Suggestions(rows, columns, title)


def _rows(site: Site, share: float) -> Iterator[Suggestion]:
    """A row for each bound of a site."""
    if not site.regularizer.bounds_at(1.0):
        return
    counted = site.record.read(norms=True)
    norms, over = counted.shown_norms, "window"
    if norms is None:
        norms, over = counted.norms.get("life", NO_NORMS), "life"
    bound = norms.quantile(1 - share)
    rounded = float(f"{bound or 0.0:.4g}")
    reason = ""
    if bound is None:
        reason = "no gradient was seen yet: train a step first"
    elif not 0.0 < bound < float("inf"):
        reason = f"no bound has this share beyond it: {1 - share:.4g} of the norms are 0"
    wanted = site.regularizer.bounds_at(rounded)
    given = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
    call = "" if reason else f"attached.set({site.key!r}, {given})"
    for name, value in wanted.items():
        yield Suggestion(
            site=site.key,
            field=name,
            bound=site.values[name],
            changed=counted.shown.share(),
            proposed=None if reason else value,
            seen=norms.count,
            over=over,
            call=call,
            reason=reason,
        )
