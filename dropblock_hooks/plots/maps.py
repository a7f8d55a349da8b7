"""``plot_feature_maps``: the channels of a sample. ``overlay``: a map over its image."""

import math
from typing import Any

import torch

from ..checks import as_count
from .figure import as_values, figure_of, pixels_of


def plot_feature_maps(
    values: Any,
    n: int = 16,
    ax: Any = None,
    *,
    title: str = "feature maps",
    own_scale: bool = False,
) -> Any:
    """Draw channels of the activations of a sample, with a color bar.

    The channels are spread evenly over all channels; each has its number above it.

    Example:
        >>> figure = plot_feature_maps(torch.rand(64, 7, 9), n=6, title="layer1")
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['0', '13', '25', '38', '50', '63']

    Args:
        values: (C, H, W) or (1, C, H, W), such as ``values["layer1"][:1]`` of `capture`.
        n: the largest number of channels.
        ax: the matplotlib Axes; None: a new Figure.
        title: the title.
        own_scale: divide each channel by its largest magnitude.

    Raises:
        ValueError: if the values have another shape, or no drawn value is finite.
    """
    maps = as_values("values", values, finite=False)
    maps = maps[0] if maps.ndim == 4 and len(maps) == 1 else maps
    if maps.ndim != 3:
        shape = tuple(maps.shape)
        raise ValueError(f"values must be (C, H, W) or (1, C, H, W), got shape {shape}")
    if own_scale:
        finite = maps.where(maps.isfinite(), torch.zeros(())).abs()
        maps = maps / finite.amax((1, 2), keepdim=True).clamp(min=1e-30)
    label = "activation / largest of its channel" if own_scale else "activation"
    count = min(len(maps), as_count("n", n))
    channels = [round(i * (len(maps) - 1) / max(count - 1, 1)) for i in range(count)]
    seen = maps[channels]
    if not seen.isfinite().any():
        raise ValueError("the channels to draw hold no finite number")
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    height, width = maps.shape[1:]
    gap = max(height, width) // 12 + 1
    line = max(height // 5, 2)  # above each map, for its number
    sheet = torch.full((rows * (height + line) - line, columns * (width + gap) - gap), math.nan)
    figure, ax = figure_of(ax, figsize=(1.4 + 1.4 * columns, 1.0 + 1.8 * rows * height / width))
    for at, channel in enumerate(channels):
        top, left = at // columns * (height + line), at % columns * (width + gap)
        sheet[top : top + height, left : left + width] = maps[channel]
        ax.text(left, top - 1, str(channel), fontsize=9, va="bottom", ha="left")
    low, high = (float(edge) for edge in seen[seen.isfinite()].aminmax())
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
        cam_map: (h, w), the map of an image, such as ``cam.maps[0]`` of `gradcam`. It is resized
            to the image. Colors go from 0 to 1, or to its maximum if that is larger.
        image: (C, H, W), (H, W, C) or (H, W), with 1 or 3 channels. It is shown from its smallest
            value to its largest, so it may be normalized.
        ax: the matplotlib Axes; None: a new Figure.
        title: the title.

    Raises:
        ValueError: if the map or the image has another shape or values that are not finite.
    """
    values = as_values("cam_map", cam_map)
    if values.ndim != 2:
        shape = tuple(values.shape)
        raise ValueError(f"cam_map must be one map, (h, w), as cam.maps[0], got shape {shape}")
    pixels = pixels_of(image)
    figure, ax = figure_of(ax, figsize=(4.2, 3.6))
    height, width = pixels.shape[:2]
    ax.imshow(pixels.numpy(), cmap="gray", vmin=0.0, vmax=1.0)
    top = max(float(values.max()), 1.0)
    drawn = ax.imshow(
        values.numpy(),
        cmap="inferno",
        alpha=(values / top).clamp(0.0, 1.0).mul(0.8).numpy(),  # shows the image elsewhere
        vmin=0.0,
        vmax=top,
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
        interpolation="bilinear",
    )
    ax.set_title(title)
    ax.set_axis_off()
    figure.colorbar(drawn, ax=ax, label="value of the map", fraction=0.05)
    return figure
