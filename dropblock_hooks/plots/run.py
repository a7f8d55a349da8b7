"""A training over its epochs: the rates that were set and realized, and the rates of a spec."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..attachment.attachment import Attachment
from ..checks import as_count
from ..schedules import rates_at_depth, value_at
from ..sites.history import MODEL, HistoryRow
from ..specs.spec import Spec
from .maps import new_figure

_MOST_NAMES = 10  # lines of a legend
_PER_EPOCH = 20  # values of a schedule
_MOST_VALUES = 2_000  # of a schedule, for long trainings


def plot_run(attached: Attachment) -> Any:
    """Draw the rate that was set and the rate that was realized at each site, over the epochs.

    A solid line with dots shows the realized rates of a site. The dashed line of the same color
    shows the rates that were set, as means of the epochs. If sites bound gradients, a second panel
    shows the mean norms of the gradients, with dashed lines for the bounds at the ends of the
    epochs. A cross marks an epoch with a finding about the site. Observers are left out.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> attached = attach(model, {"1": Dropout(p=LinearSchedule(0.0, 0.2))}, epochs=2)
        >>> for epoch in range(2):
        ...     attached.step(epoch)
        ...     y = model(torch.ones(16, 4))
        >>> figure = plot_run(attached)
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['1/Dropout']

    Args:
        attached: an attachment that was trained; it may be removed.

    Raises:
        RuntimeError: if its history has no rates and no norms.
    """
    rows = [row for row in attached.history if row.site != MODEL]
    dropping = _by_site([row for row in rows if row.expected_rate is not None])
    bounded = _by_site([row for row in rows if row.mean_norm is not None])
    if not dropping and not bounded:
        raise RuntimeError(
            "nothing to draw: the history has no realized rate and no norm. Attach a dropout or a "
            "bound of gradients, and train with attached.step(epoch)"
        )

    count = bool(dropping) + bool(bounded)
    figure = new_figure(figsize=(6.4, 0.8 + 2.8 * count))
    panels = iter(figure.subplots(count, 1, squeeze=False)[:, 0])
    if dropping:
        ax = next(panels)
        _draw_sites(ax, dropping, _realized, _expected)
        ax.set_ylabel("realized rate (dashed: nominal)")
    if bounded:
        ax = next(panels)
        _draw_sites(ax, bounded, _norm, _bound)
        ax.set_ylabel("mean norm (dashed: bound)")
        ax.set_yscale("log", nonpositive="clip")
    return figure


def _realized(row: HistoryRow) -> float | None:
    return row.realized_rate


def _expected(row: HistoryRow) -> float | None:
    return row.expected_rate


def _norm(row: HistoryRow) -> float | None:
    return row.mean_norm


def _bound(row: HistoryRow) -> float | None:
    return row.rate  # for a site that bounds gradients, the bound


def _by_site(rows: Sequence[HistoryRow]) -> dict[str, list[HistoryRow]]:
    """Return the rows of each site, in the order of the epochs."""
    sites: dict[str, list[HistoryRow]] = {}
    for row in sorted(rows, key=lambda row: row.epoch):
        sites.setdefault(row.site, []).append(row)
    return sites


def _draw_sites(
    ax: Any,
    sites: dict[str, list[HistoryRow]],
    measured: Callable[[HistoryRow], Any],
    was_set: Callable[[HistoryRow], Any],
) -> None:
    """Draw two lines for each site: the measured values, and the values that were set."""
    for number, (key, rows) in enumerate(sites.items()):
        color = f"C{number % 10}"
        epochs = [row.epoch for row in rows]
        values = [measured(row) for row in rows]
        ax.plot(epochs, values, ".-", color=color, label=key)
        ax.plot(epochs, [was_set(row) for row in rows], "--", color=color, lw=1, alpha=0.7)

        faulty = [place for place, row in enumerate(rows) if row.findings]
        if faulty:
            at = [epochs[place] for place in faulty]
            ax.plot(at, [values[place] for place in faulty], "x", color=color)

    ax.set_xlabel("epoch")
    ax.xaxis.get_major_locator().set_params(integer=True)
    _name_lines(ax)


def _name_lines(ax: Any) -> None:
    """Write a legend of the first lines, and the number of the others."""
    lines, names = ax.get_legend_handles_labels()
    title = None
    if len(names) > _MOST_NAMES:
        title = f"the first {_MOST_NAMES} of {len(names)}"
    ax.legend(
        lines[:_MOST_NAMES],
        names[:_MOST_NAMES],
        title=title,
        fontsize="small",
        framealpha=0.6,
    )


class Curve(NamedTuple):
    """The values of a rate over time, at the first and at the last site of its entry."""

    label: str
    of_first: list[float]
    of_last: list[float]


def plot_schedules(spec: Any, epochs: int) -> Any:
    """Draw the rates of a spec over the epochs, before training: one part for each kind of rate.

    A `ByDepth` is drawn as the area between the first and the last of its sites.

    Example:
        >>> spec = {"layer4.*": DropBlock2d(p=LinearSchedule(0.0, 0.1)), "fc": Dropout(0.2)}
        >>> figure = plot_schedules(spec, epochs=10)
        >>> [ax.get_ylabel() for ax in figure.axes]
        ['p']

    Args:
        spec: any spec that `attach` accepts.
        epochs: length of the training, at least 1, for schedules without a length of their own.

    Raises:
        SpecError: if the spec has a fault.
        ValueError: if no regularizer has a rate, or `epochs` is below 1.
    """
    epochs = as_count("epochs", epochs)
    times = _times(epochs)
    curves_by_rate = _curves(Spec(spec), epochs, times)
    if not curves_by_rate:
        raise ValueError("nothing to draw: no regularizer of the spec has a rate")

    count = len(curves_by_rate)
    figure = new_figure(figsize=(6.4, 0.8 + 2.4 * count))
    axes = figure.subplots(count, 1, squeeze=False)[:, 0]
    for ax, (name, curves) in zip(axes, curves_by_rate.items(), strict=True):
        _draw_curves(ax, times, curves)
        ax.set_ylabel(name)
    return figure


def _curves(spec: Spec, epochs: int, times: Sequence[float]) -> dict[str, list[Curve]]:
    """Evaluate all rates of a spec, and return their curves by the name of the rate."""
    curves_by_rate: dict[str, list[Curve]] = {}
    for entry in spec.entries:
        for regularizer in entry.regularizers or ():
            # as of two sites, because without a model their number is not known
            first = rates_at_depth(regularizer.rates, epochs, 0, 2)
            last = rates_at_depth(regularizer.rates, epochs, 1, 2)
            label = f"{entry.selector}/{regularizer.label}"
            for name in regularizer.rates:
                of_first = [value_at(first[name], t) for t in times]
                of_last = [value_at(last[name], t) for t in times]
                curve = Curve(label, of_first, of_last)
                curves_by_rate.setdefault(name, []).append(curve)
    return curves_by_rate


def _draw_curves(ax: Any, times: Sequence[float], curves: Sequence[Curve]) -> None:
    """Draw a line for each rate, and an area if it differs between sites."""
    for number, curve in enumerate(curves):
        color = f"C{number % 10}"
        ax.plot(times, curve.of_last, color=color, label=curve.label)
        if curve.of_first != curve.of_last:
            ax.fill_between(times, curve.of_first, curve.of_last, color=color, alpha=0.25)
    ax.set_xlabel("epoch")
    _name_lines(ax)


def _times(epochs: int) -> list[float]:
    """Return the times at which the schedules are evaluated, from 0 to before `epochs`."""
    step = max(1 / _PER_EPOCH, epochs / _MOST_VALUES)
    count = round(epochs / step)
    return [i * step for i in range(count)]
