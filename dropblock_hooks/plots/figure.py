"""The Figure that a picture is drawn on."""

from typing import Any

MISSING = "pictures are drawn by matplotlib, which is missing: pip install 'dropblock-hooks[plot]'"


def figure_of(ax: Any = None, **options: Any) -> tuple[Any, Any]:
    """The Figure of the given axes, and these axes; without axes a new Figure with one.

    The new one is of no window and of no list of pyplot's: it ends with its last reference.

    Args:
        ax: axes of matplotlib, or None.
        options: of a new Figure.

    Raises:
        ImportError: where matplotlib is missing; it says which extra to install.
        TypeError: for `ax` that is no axes.
    """
    if ax is None:
        figure, axes = grid_of(1, 1, **options)
        return figure, axes[0][0]
    try:
        from matplotlib.axes import Axes
    except ImportError as error:
        raise ImportError(MISSING) from error
    if not isinstance(ax, Axes):
        raise TypeError(f"ax must be one matplotlib Axes, got {type(ax).__name__}")
    return ax.figure.figure, ax  # the Figure that a SubFigure is part of


def grid_of(rows: int, columns: int, **options: Any) -> tuple[Any, list[list[Any]]]:
    """A new Figure, and its axes, row by row.

    Raises:
        ImportError: where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(MISSING) from error
    figure = Figure(layout="constrained", **options)
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()
