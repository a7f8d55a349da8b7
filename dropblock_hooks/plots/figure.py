"""What all pictures share: the Figure to draw on, and the numbers and images to draw."""

from typing import Any

import torch
from torch import Tensor

from ..quoting import kind_of


def new_figure(**options: Any) -> Any:
    """A new Figure, which pyplot does not know, or an ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "matplotlib, which draws pictures, is missing: pip install 'dropblock-hooks[plot]'"
        ) from error
    return Figure(layout="constrained", **options)


def figure_of(ax: Any, **options: Any) -> tuple[Any, Any]:
    """The Figure of the given axes, and these axes; without axes, a new Figure and its axes."""
    if ax is None:
        figure = new_figure(**options)
        return figure, figure.add_subplot()
    return ax.figure.figure, ax  # the Figure that a SubFigure is part of


def as_values(name: str, given: Any, finite: bool = True) -> Tensor:
    """Convert a tensor, a NumPy array or a PIL image to a float32 tensor on the CPU."""
    values = given
    if not isinstance(given, Tensor) and hasattr(given, "__array_interface__"):
        import numpy

        values = torch.from_numpy(numpy.array(given))
    if not isinstance(values, Tensor):
        raise ValueError(f"{name} must be a tensor or an array, got {kind_of(given)}")
    if not values.numel() or (finite and not values.isfinite().all()):
        what = "NaN or Inf" if values.numel() else f"shape {tuple(values.shape)}"
        raise ValueError(f"{name} must hold finite numbers alone, got {what}")
    return values.detach().float().cpu()


def pixels_of(given: Any) -> Tensor:
    """An image as (H, W, 3) or (H, W, 1), from 0 to 1."""
    image = as_values("image", given)
    if image.ndim == 2:
        image = image[..., None]
    elif image.ndim == 3 and image.shape[0] in (1, 3):
        image = image.movedim(0, -1)
    if image.ndim != 3 or image.shape[-1] not in (1, 3):
        raise ValueError(
            "image must be one image, (C, H, W), (H, W, C) or (H, W) with 1 or 3 channels, got "
            f"shape {tuple(image.shape)}"
        )
    image = image - image.min()
    return image / image.max().clamp(min=1e-12)
