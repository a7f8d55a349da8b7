"""The Figure to draw on, the numbers to draw, and the checks that all pictures share."""

from typing import Any

import torch
from torch import Tensor

from ..quoting import kind_of

MISSING = "pictures are drawn by matplotlib, which is missing: pip install 'dropblock-hooks[plot]'"


def figure_of(ax: Any = None, **options: Any) -> tuple[Any, Any]:
    """The Figure of the given axes, and these axes; without axes, those of a new Figure.

    Raises:
        ImportError: if matplotlib is missing; the message names the extra.
        TypeError: if `ax` is no axes.
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
    """A new Figure, which pyplot does not know, and its axes, row by row.

    Raises:
        ImportError: if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(MISSING) from error
    figure = Figure(layout="constrained", **options)
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def as_values(name: str, given: Any, *, finite: bool = False) -> Tensor:
    """Convert a tensor, a NumPy array or a PIL image to a float32 tensor on the CPU.

    Raises:
        ValueError: if it has no real numbers, or, with `finite`, none or some that are not finite.
    """
    values = given
    if not isinstance(given, Tensor) and hasattr(given, "__array_interface__"):
        import numpy

        values = numpy.asarray(given)
        values = torch.from_numpy(values.copy()) if values.dtype.kind in "biuf" else given
    if not isinstance(values, Tensor):
        maps = ": give one of its maps, as in cam.maps[0]" if hasattr(given, "maps") else ""
        raise ValueError(f"{name} must be a tensor or an array, got {kind_of(given)}{maps}")
    if values.is_meta or values.is_complex():
        what = "a tensor on the meta device" if values.is_meta else str(values.dtype)
        raise ValueError(f"{name} must hold real numbers, got {what}")
    values = values.detach().to_dense().float().cpu()
    if finite and not (values.numel() and values.isfinite().all()):
        what = "NaN or Inf" if values.numel() else f"shape {tuple(values.shape)}"
        raise ValueError(f"{name} must hold finite numbers alone, got {what}")
    return values
