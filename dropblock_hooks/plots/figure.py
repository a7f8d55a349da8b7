"""What all pictures share: the Figure to draw on, and the numbers and images to draw."""

from typing import Any

import torch
from torch import Tensor

from ..quoting import kind_of


def new_figure(**options: Any) -> Any:
    """A new Figure, which pyplot does not know.

    Raises:
        ImportError: if matplotlib is missing; the message names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "matplotlib, which draws pictures, is missing: pip install 'dropblock-hooks[plot]'"
        ) from error
    return Figure(layout="constrained", **options)


def figure_of(ax: Any = None, **options: Any) -> tuple[Any, Any]:
    """The Figure of the given axes, and these axes; without axes, those of a new Figure.

    Raises:
        TypeError: if `ax` is no axes.
    """
    if ax is None:
        figure = new_figure(**options)
        return figure, figure.add_subplot()
    if not hasattr(ax, "imshow"):
        raise TypeError(f"ax must be one matplotlib Axes, got {kind_of(ax)}")
    return ax.figure.figure, ax  # the Figure that a SubFigure is part of


def as_values(name: str, given: Any, *, finite: bool = False) -> Tensor:
    """Convert a tensor, a NumPy array or a PIL image to a float32 tensor on the CPU.

    Raises:
        ValueError: if it has no real numbers, or, with `finite`, none or some that are not finite.
    """
    values = given
    if not isinstance(given, Tensor) and hasattr(given, "__array_interface__"):
        import numpy

        values = torch.from_numpy(numpy.array(given))
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


def pixels_of(given: Any) -> Tensor:
    """An image as (H, W, 3) or (H, W), from 0 to 1."""
    image = as_values("image", given, finite=True)
    if image.ndim == 3 and image.shape[0] in (1, 3):
        image = image.movedim(0, -1)
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[-1] not in (1, 3)):
        more = ": of a batch take one, as in x[0]" if image.ndim == 4 else ""
        raise ValueError(
            "image must be (C, H, W), (H, W, C) or (H, W) with 1 or 3 channels, got shape "
            f"{tuple(image.shape)}{more}"
        )
    image = image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image
    image = image - image.min()
    return image / image.max().clamp(min=1e-12)
