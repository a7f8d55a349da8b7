"""Activations and gradients layer by layer, as observers have measured them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..attachment.attachment import Attachment
from ..attachment.report import SiteRow
from ..observers.stats import ActivationStats, GradientStats
from ..selectors.wrappers import named_modules
from ..sites.site import Site
from .figure import figure_of

_Rows = list[tuple[Site, SiteRow]]


def plot_gradient_flow(attached: Attachment, ax: Any = None) -> Any:
    """Draw the gradient norms of the layers, in the order of the model, on a log scale.

    Each site of `GradientStats` gives its mean norm and its largest value; each site that clips by
    a norm gives its bound and the norms before it. A triangle marks a gradient of 0, a cross a
    layer with NaN or Inf, which are in none of the values.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> attached = attach(model, {"*": GradientStats(), "2": ClipGradNorm(1.0)})
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> figure = plot_gradient_flow(attached)
        >>> [text.get_text() for text in figure.axes[0].get_xticklabels()]
        ['0', '1', '2']

    Args:
        attached: an attachment with `GradientStats`, or with regularizers that clip by a norm.
        ax: the matplotlib Axes; None: a new Figure.

    Raises:
        RuntimeError: if no gradient was seen.
    """
    rows = _rows_in_model_order(attached)
    clips = [(s, row) for s, row in rows if "max_norm" in s.values and row.mean_norm is not None]
    seen = _seen(rows, GradientStats, needed=not clips)
    names = list(dict.fromkeys(s.name for s, row in rows if (s, row) in seen or (s, row) in clips))
    figure, ax = _axes(ax, [name or "." for name in names], "gradients", attached)
    found = [(names.index(site.name), row.observed) for site, row in seen]
    if found:
        xs = [x for x, _ in found]
        ax.plot(xs, [o.norm or math.nan for _, o in found], "o-", ms=4, label="norm, mean")
        ax.plot(xs, [o.largest or math.nan for _, o in found], ".:", ms=4, label="largest value")
    _mark(ax, ((x, o.norm == 0) for x, o in found), "vC0", "0")
    _mark(ax, ((x, o.left_out) for x, o in found), "xC3", "NaN or Inf")
    if clips:
        xs = [names.index(site.name) for site, _ in clips]
        spread = [row.median_norm for _, row in clips], [row.p99_norm for _, row in clips]
        ax.vlines(xs, *spread, "C2", alpha=0.5, lw=4, label="norms before the bound: 50 to 99 %")
        ax.plot(xs, [row.mean_norm for _, row in clips], "x", color="C2", label="their mean")
        bounds = [site.values["max_norm"] for site, _ in clips]
        ax.plot(xs, bounds, "_", color="C3", ms=14, label="bound")
    elif not any(o.norm for _, o in found):  # a log scale needs a value above 0
        ax.set_ylim(1e-3, 1.0)
    ax.legend(fontsize=8, framealpha=0.6)
    ax.set_ylabel("of the unscaled loss")
    return figure


def plot_activations(attached: Attachment, ax: Any = None) -> Any:
    """Draw the magnitudes of the activations: one histogram for each site of `ActivationStats`.

    Dark means that many values have this magnitude. The line is the root mean square. The name
    shows the share of zeros. A cross marks a layer with NaN or Inf.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> attached = attach(model, {"*": ActivationStats()})
        >>> y = model(torch.randn(16, 4))
        >>> plot_activations(attached).axes[0].get_ylabel()
        'magnitude'

    Args:
        attached: an attachment with `ActivationStats`.
        ax: the matplotlib Axes; None: a new Figure.

    Raises:
        RuntimeError: if no activation was seen.
        ValueError: if the sites have different bins.
    """
    seen = _seen(_rows_in_model_order(attached), ActivationStats)
    kinds = {getattr(site.regularizer, "edges", ()) for site, _ in seen}
    if len(kinds) > 1:
        raise ValueError("the sites count into different bins: give all the same low and high")
    edges = kinds.pop()
    observed = [row.observed for _, row in seen]
    labels = [f"{site.name or '.'}  {row.observed.zeros or 0:.0%}" for site, row in seen]
    figure, ax = _axes(ax, labels, "activations (below: share of zeros)", attached)
    columns = [[n / (sum(o.histogram) or 1) for n in o.histogram[1:-1]] for o in observed]
    shares = list(map(list, zip(*columns, strict=True)))
    sides = [i - 0.5 for i in range(len(seen) + 1)]
    drawn = ax.pcolormesh(sides, edges, shares, cmap="Blues", vmin=0.0)
    rms = [math.nan if o.rms is None else o.rms for o in observed]
    ax.plot(rms, "o-", color="C1", ms=3, label="rms")
    _mark(ax, ((x, o.left_out) for x, o in enumerate(observed)), "xC3", "NaN or Inf")
    used = [i for i, row in enumerate(shares) if max(row) > 1e-3]
    ax.set_ylim(edges[min(used, default=0)], edges[max(used, default=len(edges) - 2) + 1])
    ax.legend(fontsize=8, framealpha=0.6)
    ax.set_ylabel("magnitude")
    figure.colorbar(drawn, ax=ax, label="share of the values that are not 0")
    return figure


def _rows_in_model_order(attached: Attachment) -> _Rows:
    layers = {name: i for i, (name, _) in enumerate(named_modules(attached._base))}

    def place(pair: tuple[Site, SiteRow]) -> tuple[int, str]:
        name = pair[0].name  # of a layer or of a parameter
        return layers.get(name, layers.get(name.rpartition(".")[0], 0)), name

    return sorted(zip(attached, attached.report(), strict=True), key=place)


def _seen(rows: _Rows, kind: type, needed: bool = True) -> _Rows:
    """The sites of a class of observers that have measured something, with their rows."""
    ours = [(site, row) for site, row in rows if isinstance(site.regularizer, kind)]
    seen = [(site, row) for site, row in ours if row.observed and row.observed.calls]
    if needed and not seen:
        raise RuntimeError(
            f"there is nothing to draw: attach {kind.__name__}() to layers, and draw after a "
            "forward and a backward"
        )
    return seen


def _axes(ax: Any, labels: Sequence[str], title: str, attached: Attachment) -> tuple[Any, Any]:
    """The Figure and axes with a place for each label, on a log scale."""
    width, height = 1.8 + 0.28 * len(labels), 3.2 + 0.06 * max(map(len, labels))
    figure, ax = figure_of(ax, figsize=(min(max(5.0, width), 14.0), height))
    ax.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
    ax.set_xlim(-0.6, len(labels) - 0.4)
    ax.set_yscale("log", nonpositive="clip")
    ax.set_title(f"{title}, epoch {attached.epoch:g}", fontsize=10)
    return figure, ax


def _mark(ax: Any, marked: Iterable[tuple[int, Any]], style: str, label: str) -> None:
    """Mark the places of the true values at the lower edge."""
    if xs := [x for x, value in marked if value]:
        at_edge: dict[str, Any] = {"ls": "", "transform": ax.get_xaxis_transform()}
        ax.plot(xs, [0.02] * len(xs), style, ms=5, label=label, **at_edge)
