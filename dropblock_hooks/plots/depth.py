"""Activations and gradients layer by layer, as observers have measured them."""

import math
from collections.abc import Sequence
from typing import Any

from ..attachment.attachment import Attachment
from ..attachment.report import SiteRow
from ..observers.stats import ActivationStats, GradientStats
from ..selectors.index import Index
from ..sites.site import LiveSite
from .maps import figure_of


def plot_gradient_flow(attached: Attachment, ax: Any = None) -> Any:
    """Draw the gradient norms of the layers, in the order of the model, on a log scale.

    Each site of `GradientStats` gives its mean norm and its largest value. Each site that clips by
    a norm gives its bound and the norms before it. A triangle marks a gradient of 0. A cross marks
    a layer with NaN or Inf, which are left out of the values.

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
    names = list(dict.fromkeys(site.name for site, _ in measured))
    figure, ax = _axes(ax, names, "gradients", attached)
    ax.set_ylabel("of the unscaled loss")

    observed = [(site, row) for site, row in measured if row.observed]
    positions = [names.index(site.name) for site, _ in observed]
    results = [row.observed for _, row in observed]
    _draw_norms(ax, positions, results)

    bounded = [(site, row) for site, row in measured if not row.observed]
    if bounded:
        _draw_bounds(ax, names, bounded)
    elif not any(result.norm for result in results):
        ax.set_ylim(1e-3, 1.0)  # a log scale needs a value above 0

    ax.legend(fontsize=8, framealpha=0.6)
    return figure


def _draw_norms(ax: Any, positions: list[int], results: list[Any]) -> None:
    """Draw the mean norms and the largest values that `GradientStats` has measured."""
    if results:
        norms = [result.norm or math.nan for result in results]
        largest = [result.largest or math.nan for result in results]
        ax.plot(positions, norms, "o-", ms=4, label="norm, mean")
        ax.plot(positions, largest, ".:", ms=4, label="largest value")

    zeros = []
    nonfinite = []
    for position, result in zip(positions, results, strict=True):
        if result.norm == 0:
            zeros.append(position)
        if result.left_out:
            nonfinite.append(position)
    _mark(ax, zeros, "vC0", "0")
    _mark(ax, nonfinite, "xC3", "NaN or Inf")


def _draw_bounds(ax: Any, names: list[str], bounded: list[tuple[LiveSite, SiteRow]]) -> None:
    """Draw the bounds of the sites that clip, and the norms before these bounds."""
    positions = [names.index(site.name) for site, _ in bounded]
    bounds = [site.values["max_norm"] for site, _ in bounded]
    means = [row.mean_norm for _, row in bounded]
    medians = [row.median_norm for _, row in bounded]
    high = [row.p99_norm for _, row in bounded]

    label = "norms before the bound: 50 to 99 %"
    ax.vlines(positions, medians, high, "C2", alpha=0.5, lw=4, label=label)
    ax.plot(positions, means, "x", color="C2", label="their mean")
    ax.plot(positions, bounds, "_", color="C3", ms=14, label="bound")


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
    edges, *other_edges = {getattr(site.regularizer, "edges", ()) for site, _ in measured}
    if other_edges:
        raise ValueError("the sites count into different bins: give all the same low and high")

    results = [row.observed for _, row in measured]
    labels = [f"{site.name or '.'}  {row.observed.zeros or 0:.0%}" for site, row in measured]
    figure, ax = _axes(ax, labels, "activations (below: share of zeros)", attached)
    ax.set_ylabel("magnitude")

    shares = _shares_of_bins([result.histogram for result in results])
    sides = [position - 0.5 for position in range(len(results) + 1)]
    mesh = ax.pcolormesh(sides, edges, shares, cmap="Blues", vmin=0.0)

    ax.plot([result.rms for result in results], "o-", color="C1", ms=3, label="rms")
    nonfinite = [position for position, result in enumerate(results) if result.left_out]
    _mark(ax, nonfinite, "xC3", "NaN or Inf")

    first, last = _used_bins(shares)
    ax.set_ylim(edges[first], edges[last + 1])

    ax.legend(fontsize=8, framealpha=0.6)
    figure.colorbar(mesh, ax=ax, label="share of the values that are not 0")
    return figure


def _shares_of_bins(histograms: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the share of each layer's values in each bin: a row is a bin, a column a layer.

    The two outer bins have no edge, so they count in the sums only.
    """
    columns = []
    for histogram in histograms:
        total = sum(histogram) or 1
        columns.append([count / total for count in histogram[1:-1]])
    return [list(row) for row in zip(*columns, strict=True)]


def _used_bins(shares: list[list[float]]) -> tuple[int, int]:
    """Return the first and the last bin that holds more than 0.1 % of the values of a layer."""
    used = [i for i, row in enumerate(shares) if max(row) > 1e-3]
    if not used:
        return 0, len(shares) - 1
    return used[0], used[-1]


def _measured(
    attached: Attachment, observer: type, with_bounds: bool = False
) -> list[tuple[LiveSite, SiteRow]]:
    """Return the sites of an observer class that have values, in model order.

    With `with_bounds`, include the sites that clip by a norm and have seen a gradient.
    """

    def is_drawn(site: LiveSite, row: SiteRow) -> bool:
        if isinstance(site.regularizer, observer) and row.observed and row.observed.calls:
            return True
        return with_bounds and "max_norm" in site.values and row.mean_norm is not None

    rows = zip(attached._sites, attached.report(), strict=True)
    measured = [(site, row) for site, row in rows if is_drawn(site, row)]
    if not measured:
        raise RuntimeError(
            f"nothing to draw: attach {observer.__name__}(), and draw after a forward and a "
            "backward"
        )

    modules = Index(attached._base).modules
    positions = {name: position for position, name in enumerate(modules)}

    def position_of(pair: tuple[LiveSite, SiteRow]) -> tuple[int, str]:
        site, _ = pair
        return positions.get(site.owner, 0), site.name

    return sorted(measured, key=position_of)


def _axes(ax: Any, names: Sequence[str], title: str, attached: Attachment) -> tuple[Any, Any]:
    """Return a Figure and its axes with one position for each name, on a log scale."""
    labels = [name or "." for name in names]
    width = 1.8 + 0.28 * len(labels)
    height = 3.2 + 0.06 * max(map(len, labels))
    figure, ax = figure_of(ax, figsize=(min(max(5.0, width), 14.0), height))

    ax.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
    ax.set_xlim(-0.6, len(labels) - 0.4)
    ax.set_yscale("log", nonpositive="clip")
    ax.set_title(f"{title}, epoch {attached.epoch:g}", fontsize=10)
    return figure, ax


def _mark(ax: Any, positions: list[int], style: str, label: str) -> None:
    """Mark these positions at the lower edge of the axes."""
    if not positions:
        return
    heights = [0.02] * len(positions)  # as shares of the height of the axes
    transform = ax.get_xaxis_transform()
    ax.plot(positions, heights, style, ls="", ms=5, label=label, transform=transform)
