"""Activations and gradients layer by layer, as observers have measured them."""

import math
from collections.abc import Sequence
from typing import Any

from ..attachment.attachment import Attachment
from ..attachment.report import SiteRow
from ..observers.stats import ActivationStats, GradientStats
from ..selectors.wrappers import named_modules
from ..sites.site import Site
from .maps import figure_of


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
    sites = _measured(attached, GradientStats, clips=True)
    names = list(dict.fromkeys(site.name for site, _ in sites))
    figure, ax = _axes(ax, names, "gradients", attached)
    ax.set_ylabel("of the unscaled loss")
    places = [(names.index(site.name), site, row) for site, row in sites]
    found = [(x, row.observed) for x, _, row in places if row.observed]
    clips = [(x, site.values["max_norm"], row) for x, site, row in places if not row.observed]
    if found:
        xs = [x for x, _ in found]
        ax.plot(xs, [o.norm or math.nan for _, o in found], "o-", ms=4, label="norm, mean")
        ax.plot(xs, [o.largest or math.nan for _, o in found], ".:", ms=4, label="largest value")
    _mark(ax, [x for x, o in found if o.norm == 0], "vC0", "0")
    _mark(ax, [x for x, o in found if o.left_out], "xC3", "NaN or Inf")
    if clips:
        at, bounds, rows = zip(*clips, strict=True)
        spread = [row.median_norm for row in rows], [row.p99_norm for row in rows]
        ax.vlines(at, *spread, "C2", alpha=0.5, lw=4, label="norms before the bound: 50 to 99 %")
        ax.plot(at, [row.mean_norm for row in rows], "x", color="C2", label="their mean")
        ax.plot(at, bounds, "_", color="C3", ms=14, label="bound")
    elif not any(o.norm for _, o in found):  # a log scale needs a value above 0
        ax.set_ylim(1e-3, 1.0)
    ax.legend(fontsize=8, framealpha=0.6)
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
    seen = _measured(attached, ActivationStats)
    edges, *others = {getattr(site.regularizer, "edges", ()) for site, _ in seen}
    if others:
        raise ValueError("the sites count into different bins: give all the same low and high")
    observed = [row.observed for _, row in seen]
    labels = [f"{site.name or '.'}  {row.observed.zeros or 0:.0%}" for site, row in seen]
    figure, ax = _axes(ax, labels, "activations (below: share of zeros)", attached)
    ax.set_ylabel("magnitude")
    columns = [[n / (sum(o.histogram) or 1) for n in o.histogram[1:-1]] for o in observed]
    shares = list(map(list, zip(*columns, strict=True)))
    sides = [i - 0.5 for i in range(len(seen) + 1)]
    drawn = ax.pcolormesh(sides, edges, shares, cmap="Blues", vmin=0.0)
    ax.plot([o.rms for o in observed], "o-", color="C1", ms=3, label="rms")
    _mark(ax, [x for x, o in enumerate(observed) if o.left_out], "xC3", "NaN or Inf")
    used = [i for i, row in enumerate(shares) if max(row) > 1e-3]
    ax.set_ylim(edges[min(used, default=0)], edges[max(used, default=len(edges) - 2) + 1])
    ax.legend(fontsize=8, framealpha=0.6)
    figure.colorbar(drawn, ax=ax, label="share of the values that are not 0")
    return figure


def _measured(attached: Attachment, kind: type, clips: bool = False) -> list[tuple[Site, SiteRow]]:
    """The sites of a class of observers, or that clip by a norm, with values, in model order."""
    order = {name: i for i, (name, _) in enumerate(named_modules(attached._base))}
    sites = []
    for site, row in zip(attached, attached.report(), strict=True):
        seen = isinstance(site.regularizer, kind) and row.observed and row.observed.calls
        if seen or (clips and "max_norm" in site.values and row.mean_norm is not None):
            sites.append((site, row))
    if not sites:
        raise RuntimeError(
            f"nothing to draw: attach {kind.__name__}(), and draw after a forward and a backward"
        )
    return sorted(sites, key=lambda pair: (order.get(pair[0].owner, 0), pair[0].name))


def _axes(ax: Any, names: Sequence[str], title: str, attached: Attachment) -> tuple[Any, Any]:
    """The Figure and axes with a place for each name, on a log scale."""
    labels = [name or "." for name in names]
    width, height = 1.8 + 0.28 * len(labels), 3.2 + 0.06 * max(map(len, labels))
    figure, ax = figure_of(ax, figsize=(min(max(5.0, width), 14.0), height))
    ax.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
    ax.set_xlim(-0.6, len(labels) - 0.4)
    ax.set_yscale("log", nonpositive="clip")
    ax.set_title(f"{title}, epoch {attached.epoch:g}", fontsize=10)
    return figure, ax


def _mark(ax: Any, xs: list[int], style: str, label: str) -> None:
    """Mark these places at the lower edge."""
    if xs:
        at_edge: dict[str, Any] = {"ls": "", "transform": ax.get_xaxis_transform()}
        ax.plot(xs, [0.02] * len(xs), style, ms=5, label=label, **at_edge)
