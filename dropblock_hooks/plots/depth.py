"""Activations and gradients layer by layer, as observers have measured them."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from ..attachment.attachment import Attachment
from ..attachment.lookup import in_model_order
from ..attachment.report import SiteRow
from ..observers.stats import ActivationStats, GradientStats
from ..selectors.index import Index
from ..sites.site import LiveSite
from .maps import figure_of, name_colors

_Measured: TypeAlias = tuple[LiveSite, SiteRow]
"""A site that has values, and its row of the report."""


def plot_gradient_flow(attached: Attachment, ax: Any = None) -> Any:
    """Draw the gradient norms of the layers, in the order of the model, on a log scale.

    Each site of `GradientStats` gives its mean norm and its largest value. Each site that clips by
    a norm gives its bound and the norms before clipping. A triangle marks a gradient of 0. A cross
    marks a layer with NaN or Inf, which are left out of the values.

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
    measured = _measured(attached, GradientStats, with_bounds=True)
    names: list[str] = []
    for site, _ in measured:
        if site.name not in names:
            names.append(site.name)
    figure, ax = _axes(ax, names, "gradients", attached)
    ax.set_ylabel("of the unscaled loss")

    positions = []
    results = []
    bounded = []
    for site, row in measured:
        if row.observed:
            positions.append(names.index(site.name))
            results.append(row.observed)
        else:
            bounded.append((site, row))

    _draw_norms(ax, positions, results)
    if bounded:
        _draw_bounds(ax, names, bounded)
    elif not any(result.norm for result in results):
        ax.set_ylim(1e-3, 1.0)  # a log scale needs a value above 0

    name_colors(ax)
    return figure


def _draw_norms(ax: Any, positions: list[int], results: list[Any]) -> None:
    """Draw the mean norms and the largest values that `GradientStats` has measured."""
    norms = []
    largest = []
    zeros = []
    nonfinite = []
    for position, result in zip(positions, results, strict=True):
        # a log scale has no 0, and leaves NaN out
        norms.append(result.norm or math.nan)
        largest.append(result.largest or math.nan)
        if result.norm == 0:
            zeros.append(position)
        if result.left_out:
            nonfinite.append(position)

    if results:
        ax.plot(positions, norms, "o-", ms=4, label="norm, mean")
        ax.plot(positions, largest, ".:", ms=4, label="largest value")
    _mark(ax, zeros, "vC0", "0")
    _mark(ax, nonfinite, "xC3", "NaN or Inf")


def _draw_bounds(ax: Any, names: list[str], bounded: list[_Measured]) -> None:
    """Draw the bounds of the sites that clip, and the norms before these bounds."""
    positions = []
    bounds = []
    means = []
    medians = []
    high = []
    for site, row in bounded:
        positions.append(names.index(site.name))
        bounds.append(site.values["max_norm"])
        means.append(row.mean_norm)
        medians.append(row.median_norm)
        high.append(row.p99_norm)

    label = "norms before the bound: 50 to 99 %"
    ax.vlines(positions, medians, high, "C2", alpha=0.5, lw=4, label=label)
    ax.plot(positions, means, "x", color="C2", label="their mean")
    ax.plot(positions, bounds, "_", color="C3", ms=14, mew=2, label="bound")


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
    measured = _measured(attached, ActivationStats)
    edges = _common_edges(measured)

    labels = []
    histograms = []
    rms = []
    nonfinite = []
    for position, (site, row) in enumerate(measured):
        result = row.observed
        zeros = result.zeros or 0
        labels.append(f"{site.name or '.'}  {zeros:.0%}")
        histograms.append(result.histogram)
        rms.append(result.rms)
        if result.left_out:
            nonfinite.append(position)

    figure, ax = _axes(ax, labels, "activations (below: share of zeros)", attached)
    ax.set_ylabel("magnitude")

    shares = _shares_of_bins(histograms)
    number = len(labels)
    sides = [position - 0.5 for position in range(number + 1)]
    mesh = ax.pcolormesh(sides, edges, shares, cmap="Blues", vmin=0.0)
    ax.plot(rms, "o-", color="C1", ms=3, label="rms")
    _mark(ax, nonfinite, "xC3", "NaN or Inf")

    first, last = _used_bins(shares)
    lowest = edges[first]
    highest = edges[last + 1]
    ax.set_ylim(lowest, highest)

    name_colors(ax)
    figure.colorbar(mesh, ax=ax, label="share of the values that are not 0")
    return figure


def _common_edges(measured: list[_Measured]) -> tuple[float, ...]:
    """Return the edges of the bins of all sites, or raise an error if they differ."""
    observers: list[Any] = [site.regularizer for site, _ in measured]
    edges: tuple[float, ...] = observers[0].edges
    for observer in observers:
        if observer.edges != edges:
            raise ValueError("the sites count into different bins: give all the same low and high")
    return edges


def _shares_of_bins(histograms: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the share of each layer's values in each bin. A row is a bin, a column is a layer.

    The two outer bins have no edge, so they count in the sums only.
    """
    columns = []
    for histogram in histograms:
        total = sum(histogram) or 1
        inner = histogram[1:-1]
        column = [count / total for count in inner]
        columns.append(column)

    rows = zip(*columns, strict=True)
    return [list(row) for row in rows]


def _used_bins(shares: list[list[float]]) -> tuple[int, int]:
    """Return the first and the last bin that holds more than 0.1 % of the values of a layer."""
    used = []
    for position, row in enumerate(shares):
        largest = max(row)
        if largest > 1e-3:
            used.append(position)

    if not used:
        return 0, len(shares) - 1
    return used[0], used[-1]


def _measured(attached: Attachment, observer: type, with_bounds: bool = False) -> list[_Measured]:
    """Return the sites of an observer class that have values, in model order.

    Sites whose layers are gone from the model come last. With `with_bounds`, include the sites that
    clip by a norm and have seen a gradient.
    """

    def is_drawn(site: LiveSite, row: SiteRow) -> bool:
        is_observed = isinstance(site.regularizer, observer)
        if is_observed and row.observed and row.observed.calls:
            return True
        has_norms = "max_norm" in site.values and row.mean_norm is not None
        return with_bounds and has_norms

    row_of = dict(zip(attached._sites, attached.report(), strict=True))
    drawn = []
    for site, row in row_of.items():
        if is_drawn(site, row):
            drawn.append(site)
    if not drawn:
        raise RuntimeError(
            f"nothing to draw: attach {observer.__name__}(), and draw after a forward and a "
            "backward"
        )

    ordered = in_model_order(drawn, Index(attached._base))
    return [(site, row_of[site]) for site in ordered]


def _axes(ax: Any, names: Sequence[str], title: str, attached: Attachment) -> tuple[Any, Any]:
    """Return a Figure and its axes with one position for each name, on a log scale."""
    labels = [name or "." for name in names]
    number = len(labels)
    longest = max(map(len, labels))

    needed = 1.8 + 0.28 * number
    width = min(max(5.0, needed), 14.0)
    height = 3.2 + 0.06 * longest
    figure, ax = figure_of(ax, figsize=(width, height))

    ax.set_xticks(range(number), labels, rotation=90, fontsize="small")
    ax.set_xlim(-0.6, number - 0.4)
    ax.set_yscale("log", nonpositive="clip")
    ax.set_title(f"{title}, epoch {attached.epoch:g}", fontsize="medium")
    return figure, ax


def _mark(ax: Any, positions: list[int], style: str, label: str) -> None:
    """Mark these positions at the lower edge of the axes."""
    if not positions:
        return
    heights = [0.02] * len(positions)  # as shares of the height of the axes
    transform = ax.get_xaxis_transform()
    ax.plot(positions, heights, style, ls="", ms=5, label=label, transform=transform)
