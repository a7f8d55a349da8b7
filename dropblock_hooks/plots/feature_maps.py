"""``plot_feature_maps``: the channels of a sample, as a grid of pictures."""

import math
from typing import Any

import torch

from ..checks import as_count
from .figure import as_values, figure_of


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
    maps = as_values("values", values)
    maps = maps[0] if maps.ndim == 4 and len(maps) == 1 else maps
    if maps.ndim != 3 or not maps.numel():
        shape = tuple(maps.shape)
        raise ValueError(f"values must be (C, H, W) or (1, C, H, W), got shape {shape}")
    label = "activation"
    if own_scale:
        label = "activation / largest of its channel"
        finite = maps.where(maps.isfinite(), torch.zeros(())).abs()
        maps = maps / finite.amax((1, 2), keepdim=True).clamp(min=1e-30)
    count = min(len(maps), as_count("n", n))
    channels = [round(i * (len(maps) - 1) / max(count - 1, 1)) for i in range(count)]
    seen = maps[channels]
    if not seen.isfinite().any():
        raise ValueError("the channels to draw hold no finite number")
    columns = math.ceil(math.sqrt(len(channels)))
    rows = math.ceil(len(channels) / columns)
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
    scale: dict[str, Any] = {"cmap": colors, "vmin": low, "vmax": high}
    drawn = ax.imshow(sheet.numpy(), interpolation="nearest", **scale)
    ax.set_title(f"{title}\n{len(channels)} of {len(maps)} channels, {height} × {width}", pad=14)
    ax.set_axis_off()
    figure.colorbar(drawn, ax=ax, label=label, fraction=0.05, shrink=0.8)
    return figure
