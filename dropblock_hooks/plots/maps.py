"""``plot_feature_maps`` and ``overlay``; the Figure and the images that all pictures share."""

import math
from typing import Any

import torch
from torch import Tensor

from ..checks import as_count
from ..planning.dry_run import shape_of


def plot_feature_maps(
    values: Any,
    n: int = 16,
    ax: Any = None,
    *,
    title: str = "feature maps",
    own_scale: bool = False,
) -> Any:
    """Draw evenly spread channels of a sample, each below its number, with a color bar.

    Example:
        >>> figure = plot_feature_maps(torch.rand(64, 7, 9), n=6, title="layer1")
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['0', '13', '25', '38', '50', '63']

    Args:
        values: (C, H, W), or (N, C, H, W), of which the first sample is drawn.
        n: the largest number of channels.
        ax: the matplotlib Axes; None: a new Figure.
        title: the title.
        own_scale: divide each channel by its largest magnitude.

    Raises:
        ValueError: if the values have another shape, or no drawn value is finite.
    """
    maps = as_values("values", values, "a tensor (C, H, W) or (N, C, H, W)", 3, 4, gaps=True)
    maps = maps[0] if maps.ndim == 4 else maps
    label = "activation"
    if own_scale:
        label = "activation / largest of its channel"
        largest = maps.nan_to_num(0.0, 0.0, 0.0).abs().amax((1, 2), keepdim=True)
        maps = maps / largest.clamp(min=1e-30)
    count = min(len(maps), as_count("n", n))
    channels = [round(i * (len(maps) - 1) / max(count - 1, 1)) for i in range(count)]
    finite = maps[channels][maps[channels].isfinite()]
    if not len(finite):
        raise ValueError("the channels to draw hold no finite number")
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    height, width = maps.shape[1:]
    gap, line = max(height, width) // 12 + 1, max(height // 5, 2)  # the line is for the number
    sheet = torch.full((rows * (height + line) - line, columns * (width + gap) - gap), math.nan)
    figure, ax = figure_of(ax, figsize=(1.4 + 1.4 * columns, 1.0 + 1.8 * rows * height / width))
    for at, channel in enumerate(channels):
        top, left = at // columns * (height + line), at % columns * (width + gap)
        sheet[top : top + height, left : left + width] = maps[channel]
        ax.text(left, top - 1, str(channel), fontsize=9, va="bottom", ha="left")
    low, high = float(finite.min()), float(finite.max())
    colors = "viridis"
    if low < 0 < high:
        colors, high = "RdBu_r", max(-low, high)
        low = -high
    drawn = ax.imshow(sheet.numpy(), interpolation="nearest", cmap=colors, vmin=low, vmax=high)
    ax.set_title(f"{title}\n{count} of {len(maps)} channels, {height} × {width}", pad=14)
    ax.set_axis_off()
    figure.colorbar(drawn, ax=ax, label=label, fraction=0.05, shrink=0.8)
    return figure


def overlay(cam_map: Any, image: Any, ax: Any = None, *, title: str = "Grad-CAM") -> Any:
    """Draw a map over its image, with a color bar.

    Example:
        >>> overlay(torch.rand(7, 7), torch.rand(3, 28, 28)).axes[0].get_title()
        'Grad-CAM'

    Args:
        cam_map: (h, w), such as ``cam.maps[0]`` of `gradcam`. It is resized to the image. Colors go
            from 0 to 1, or to its maximum if that is larger.
        image: (C, H, W), (H, W, C) or (H, W), with 1 or 3 channels. It is shown from its smallest
            value to its largest, so it may be normalized.
        ax: the matplotlib Axes; None: a new Figure.
        title: the title.

    Raises:
        ValueError: if the map or the image has another shape or values that are not finite.
    """
    values = as_values("cam_map", cam_map, "one map (h, w), as cam.maps[0],", 2)
    pixels = pixels_of(image)
    figure, ax = figure_of(ax, figsize=(4.2, 3.6))
    ax.imshow(pixels.numpy(), cmap="gray", vmin=0.0, vmax=1.0)
    height, width = pixels.shape[:2]
    top = max(float(values.max()), 1.0)
    scale: dict[str, Any] = {"cmap": "inferno", "vmin": 0.0, "vmax": top}
    box = (-0.5, width - 0.5, height - 0.5, -0.5)
    alpha = (values / top).clamp(0.0, 1.0).mul(0.8).numpy()  # shows the image elsewhere
    drawn = ax.imshow(values.numpy(), alpha=alpha, extent=box, interpolation="bilinear", **scale)
    ax.set_title(title)
    ax.set_axis_off()
    figure.colorbar(drawn, ax=ax, label="value of the map", fraction=0.05)
    return figure


def new_figure(**options: Any) -> Any:
    try:
        from matplotlib.figure import Figure  # which pyplot does not know
    except ImportError as error:
        message = "pictures need matplotlib: pip install 'dropblock-hooks[plot]'"
        raise ImportError(message) from error
    return Figure(layout="constrained", **options)


def figure_of(ax: Any, **options: Any) -> tuple[Any, Any]:
    """The Figure of the given axes, and these axes; without axes, a new Figure and its axes."""
    if ax is None:
        figure = new_figure(**options)
        return figure, figure.add_subplot()
    return ax.figure.figure, ax  # the Figure that a SubFigure is part of


def as_values(name: str, given: Any, form: str, *ranks: int, gaps: bool = False) -> Tensor:
    """A tensor, NumPy array or PIL image as float32 on the CPU; with `gaps`, some may be NaN."""
    if hasattr(given, "__array_interface__"):
        import numpy

        given = torch.from_numpy(numpy.array(given))
    fits = isinstance(given, Tensor) and given.ndim in ranks and given.isfinite().any()
    if not (fits and (gaps or given.isfinite().all())):
        raise ValueError(f"{name} must be {form} of finite numbers, got {shape_of(given)}")
    values: Tensor = given.detach().float().cpu()
    return values


def pixels_of(given: Any) -> Tensor:
    """An image as (H, W, 3) or (H, W, 1), from 0 to 1."""
    image = as_values("image", given, "one image (C, H, W), (H, W, C) or (H, W)", 2, 3)
    image = image[None] if image.ndim == 2 else image
    image = image.movedim(0, -1) if image.shape[0] in (1, 3) else image
    if image.shape[-1] not in (1, 3):
        raise ValueError(f"image must have 1 or 3 channels, got shape {tuple(image.shape)}")
    image = image - image.min()
    return image / image.max().clamp(min=1e-12)
