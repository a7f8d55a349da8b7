"""Activations and gradients layer by layer, as observers have measured them."""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

from ..attachment.attachment import Attachment
from ..attachment.report import SiteRow
from ..observers.stats import ActivationStats, GradientStats
from ..selectors.wrappers import named_modules
from ..sites.site import Site
from .figure import figure_of

_Rows = list[tuple[Site, SiteRow]]
_LONGEST = 30  # characters of a name below an axis


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
    at = {name: i for i, name in enumerate(names)}
    figure, ax = _figure_of(ax, _shortened(names))
    xs = [at[site.name] for site, _ in seen]
    for style, label, field in (("o-", "norm, mean", "norm"), (".:", "largest value", "largest")):
        values = [getattr(row.observed, field) or math.nan for _, row in seen]
        if seen:
            ax.plot(xs, values, style, ms=4, label=label)
    _mark(ax, [at[s.name] for s, row in seen if row.observed.norm == 0], "v", "C0", "0")
    _mark(ax, [at[s.name] for s, row in seen if row.observed.left_out], "x", "C3", "NaN or Inf")
    if clips:
        xs = [at[site.name] for site, _ in clips]
        norms = [row for _, row in clips]
        spread = [row.median_norm for row in norms], [row.p99_norm for row in norms]
        bounds = [site.values["max_norm"] for site, _ in clips]
        ax.vlines(xs, *spread, "C2", alpha=0.5, lw=4, label="norms before the bound: 50 to 99 %")
        ax.plot(xs, [row.mean_norm for row in norms], "x", color="C2", label="their mean")
        ax.plot(xs, bounds, "_", color="C3", ms=14, label="bound")
    elif not any(row.observed.norm for _, row in seen):  # a log scale needs a value above 0
        ax.set_ylim(1e-3, 1.0)
    _finish(ax, "gradients", attached)
    ax.set_yscale("log", nonpositive="clip")
    ax.set_ylabel("of the unscaled loss")
    return figure


def plot_activations(attached: Attachment, ax: Any = None) -> Any:
    """Draw the magnitudes of the activations: one histogram for each site of `ActivationStats`.

    Dark means that many values have this magnitude. The line is the root mean square. The name
    shows the share of zeros. A cross marks a layer with NaN or Inf. The layers are in the order of
    the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> attached = attach(model, {"*": ActivationStats()})
        >>> y = model(torch.randn(16, 4))
        >>> figure = plot_activations(attached)
        >>> figure.axes[0].get_ylabel()
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
    names = _shortened([site.name for site, _ in seen])
    zeros = [row.observed.zeros or 0 for _, row in seen]
    labels = [f"{name}  {share:.0%}" for name, share in zip(names, zeros, strict=True)]
    figure, ax = _figure_of(ax, labels)
    histograms = [row.observed.histogram for _, row in seen]
    columns = [[n / (sum(counts) or 1) for n in counts[1:-1]] for counts in histograms]
    drawn = ax.pcolormesh(
        [i - 0.5 for i in range(len(seen) + 1)],
        edges,
        [list(line) for line in zip(*columns, strict=True)],
        cmap="Blues",
        vmin=0.0,
    )
    rms = [math.nan if row.observed.rms is None else row.observed.rms for _, row in seen]
    ax.plot(rms, "o-", color="C1", ms=3, label="rms")
    _mark(ax, [i for i, (_, r) in enumerate(seen) if r.observed.left_out], "x", "C3", "NaN or Inf")
    _finish(ax, "activations (below: share of zeros)", attached)
    ax.set_yscale("log")
    used = [i for i in range(len(edges) - 1) if any(column[i] > 1e-3 for column in columns)]
    ax.set_ylim(edges[min(used, default=0)], edges[max(used, default=len(edges) - 2) + 1])
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
    """The sites of one class of observers that have measured something, with their rows."""
    ours = [(site, row) for site, row in rows if isinstance(site.regularizer, kind)]
    seen = [(site, row) for site, row in ours if row.observed and row.observed.calls]
    if needed and not seen:
        raise RuntimeError(
            f"there is nothing to draw: attach {kind.__name__}() to layers, and draw after a "
            "forward and a backward"
        )
    return seen


def _shortened(names: Sequence[str]) -> list[str]:
    """The names; long ones without the components that all begin with."""
    cut = os.path.commonprefix(list(names)).rfind(".") + 1  # noqa: RUF071
    if len(names) == 1 or max(map(len, names)) <= _LONGEST:
        cut = 0
    return [f"…{name[cut:]}" if cut else name or "." for name in names]


def _figure_of(ax: Any, labels: Sequence[str]) -> tuple[Any, Any]:
    """The Figure and axes with a place for each label."""
    figure, ax = figure_of(ax, figsize=(min(max(5.0, 1.8 + 0.28 * len(labels)), 14.0), 3.8))
    ax.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
    ax.set_xlim(-0.6, len(labels) - 0.4)
    return figure, ax


def _mark(ax: Any, xs: Iterable[int], marker: str, color: str, label: str) -> None:
    """Mark places at the lower edge."""
    low, xs = ax.get_xaxis_transform(), list(xs)
    if xs:
        ys = [0.02] * len(xs)
        ax.plot(xs, ys, marker, color=color, ms=5, ls="", transform=low, label=label)


def _finish(ax: Any, what: str, attached: Attachment) -> None:
    ax.set_title(f"{what}, epoch {attached.epoch:g}", fontsize=10)
    ax.legend(fontsize=8, framealpha=0.6)
