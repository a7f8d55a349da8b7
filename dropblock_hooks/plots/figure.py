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
    try:
        from matplotlib.axes import Axes
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(MISSING) from error
    if ax is None:
        figure = Figure(layout="constrained", **options)
        return figure, figure.add_subplot()
    if not isinstance(ax, Axes):
        raise TypeError(f"ax must be one matplotlib Axes, got {type(ax).__name__}")
    return ax.get_figure(), ax
