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
        values: activations, (C, H, W) or (N, C, H, W). The first sample is drawn.
        n: the largest number of channels.
        ax: the matplotlib Axes; None: a new Figure.
        title: the title.
        own_scale: divide each channel by its largest magnitude.

    Raises:
        ValueError: if the values have another shape, or no drawn value is finite.
    """
    maps = as_values("values", values, "a tensor (C, H, W) or (N, C, H, W)", 3, 4, gaps=True)
    if maps.ndim == 4:
        maps = maps[0]

    label = "activation"
    if own_scale:
        label = "activation / largest of its channel"
        maps = _with_own_scale(maps)

    channels = _evenly_spread(len(maps), as_count("n", n))
    drawn = maps[channels]
    finite = drawn[drawn.isfinite()]
    if not len(finite):
        raise ValueError("the channels to draw hold no finite number")

    sheet, corners = _on_a_sheet(drawn)
    columns = _columns_for(len(channels))
    rows = math.ceil(len(channels) / columns)
    height, width = maps.shape[1:]
    figure, ax = figure_of(ax, figsize=(1.4 + 1.4 * columns, 1.0 + 1.8 * rows * height / width))
    for channel, (top, left) in zip(channels, corners, strict=True):
        ax.text(left, top - 1, str(channel), fontsize="small", va="bottom", ha="left")

    colors, low, high = _color_scale(float(finite.min()), float(finite.max()))
    image = ax.imshow(sheet.numpy(), interpolation="nearest", cmap=colors, vmin=low, vmax=high)
    number = f"{len(channels)} of {len(maps)} channels"
    ax.set_title(f"{title}\n{number}, {height} × {width}", pad=14)
    ax.set_axis_off()
    figure.colorbar(image, ax=ax, label=label, fraction=0.05, shrink=0.8)
    return figure


def _with_own_scale(maps: Tensor) -> Tensor:
    """Divide each channel by its largest magnitude."""
    finite_or_zero = maps.nan_to_num(0.0, 0.0, 0.0)
    largest = finite_or_zero.abs().amax((1, 2), keepdim=True)
    return maps / largest.clamp(min=1e-30)


def _evenly_spread(total: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `total`, from the first to the last."""
    count = min(total, most)
    step = (total - 1) / max(count - 1, 1)
    return [round(i * step) for i in range(count)]


def _columns_for(count: int) -> int:
    """Return the number of columns in which so many channels are drawn."""
    return math.ceil(math.sqrt(count))


def _on_a_sheet(maps: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return an image with all channels side by side, and the upper left corner of each."""
    count, height, width = maps.shape
    columns = _columns_for(count)
    rows = math.ceil(count / columns)
    space_above = max(height // 5, 2)  # for the number of the channel
    space_beside = max(height, width) // 12 + 1

    height_of_sheet = rows * (height + space_above) - space_above  # without that of the first row
    width_of_sheet = columns * (width + space_beside) - space_beside
    sheet = torch.full((height_of_sheet, width_of_sheet), math.nan)  # matplotlib leaves NaN blank
    corners = []
    for position, channel in enumerate(maps):
        row, column = divmod(position, columns)
        top = row * (height + space_above)
        left = column * (width + space_beside)
        sheet[top : top + height, left : left + width] = channel
        corners.append((top, left))
    return sheet, corners


def _color_scale(low: float, high: float) -> tuple[str, float, float]:
    """Return a color map and its ends; values of both signs get a map with 0 in the middle."""
    if low < 0 < high:
        end = max(-low, high)
        return "RdBu_r", -end, end
    return "viridis", low, high


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
    ax.imshow(
        pixels.numpy(),
        cmap="gray",
        vmin=0.0,
        vmax=1.0,
    )

    height, width = pixels.shape[:2]
    edges_of_image = (-0.5, width - 0.5, height - 0.5, -0.5)
    top = max(float(values.max()), 1.0)
    opacity = (values / top).clamp(0.0, 1.0) * 0.8  # low values let the image show through
    heat = ax.imshow(
        values.numpy(),
        alpha=opacity.numpy(),
        extent=edges_of_image,
        interpolation="bilinear",
        cmap="inferno",
        vmin=0.0,
        vmax=top,
    )

    ax.set_title(title)
    ax.set_axis_off()
    figure.colorbar(heat, ax=ax, label="value of the map", fraction=0.05)
    return figure


def new_figure(**options: Any) -> Any:
    """Make a Figure of matplotlib that pyplot does not know, so that it is freed after use.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = "pictures need matplotlib: pip install 'dropblock-hooks[plot]'"
        raise ImportError(message) from error
    return Figure(layout="constrained", **options)


def figure_of(ax: Any, **options: Any) -> tuple[Any, Any]:
    """Return the Figure of the axes, and the axes; for None, a new Figure and its axes."""
    if ax is None:
        figure = new_figure(**options)
        return figure, figure.add_subplot()
    return ax.figure.figure, ax  # `ax.figure` may be a SubFigure, which is part of a Figure


def name_colors(ax: Any) -> None:
    """Write the legend beside the axes, where it covers nothing.

    Without a layout that makes room for it, a place beside the axes can lie outside the figure. The
    legend is in the axes then.
    """
    place: dict[str, Any] = {"loc": "best"}
    if ax.figure.figure.get_layout_engine() is not None:
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    ax.legend(fontsize="small", framealpha=0.6, **place)


def as_values(name: str, values: Any, expected: str, *ranks: int, gaps: bool = False) -> Tensor:
    """Convert a tensor, NumPy array or PIL image to float32 on the CPU.

    With `gaps`, some of the values may be NaN or Inf, but not all.

    Raises:
        ValueError: if the values have another number of axes, or are not finite.
    """
    if hasattr(values, "__array_interface__"):
        import numpy

        copied = numpy.array(values)  # because the memory of a PIL image can't be written
        values = torch.from_numpy(copied)

    is_valid = False
    if isinstance(values, Tensor) and values.ndim in ranks:
        finite = values.isfinite()
        enough = finite.any() if gaps else finite.all()
        is_valid = values.numel() > 0 and bool(enough)
    if not is_valid:
        raise ValueError(f"{name} must be {expected} of finite numbers, got {shape_of(values)}")

    converted: Tensor = values.detach().float().cpu()
    return converted


def pixels_of(image: Any) -> Tensor:
    """Convert an image to (H, W, 3) or (H, W, 1), with values from 0 to 1.

    Raises:
        ValueError: if the image does not have 1 or 3 channels, or has values that are not finite.
    """
    pixels = as_values("image", image, "one image (C, H, W), (H, W, C) or (H, W)", 2, 3)
    if pixels.ndim == 2:
        pixels = pixels[None]
    if pixels.shape[0] in (1, 3):
        pixels = pixels.movedim(0, -1)
    if pixels.shape[-1] not in (1, 3):
        raise ValueError(f"image must have 1 or 3 channels, got shape {tuple(pixels.shape)}")

    pixels = pixels - pixels.min()
    return pixels / pixels.max().clamp(min=1e-12)
