"""The picture: test images in rows, networks in columns, each with the map over the image."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from dropblock_hooks.plots import overlay
from experiments.reporting.plot_style import entitle, wrapped
from experiments.saliency.measure import Picture
from experiments.saliency.spread import Box, entropies, touched

COLUMN, ROW = 1.5, 1.55  # inches


def plot_saliency(picture: Picture, threshold: float, study: str = "") -> Figure:
    """Maps over images, each from zero to its own largest value; boxes that are touched are solid.

    Args:
        picture: what is shown.
        threshold: of a box that is touched.
        study: its name, for the title.
    """
    rows, columns = len(picture.numbers), 1 + len(picture.maps)
    size = (max(4.0, COLUMN * columns + 0.7), ROW * rows + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for row, line in enumerate(grid):
        image, boxes = picture.images[row], picture.boxes[row] if picture.boxes else ()
        _draw_image(line[0], image, boxes)
        line[0].set_xlabel(f"image {picture.numbers[row]}, class {picture.labels[row]}")
        for axes, maps in zip(line[1:], picture.maps.values(), strict=True):
            _draw_map(axes, maps[row], image, boxes, threshold)
    for axes, name in zip(grid[0], ["image", *picture.maps], strict=True):
        axes.set_title(wrapped(name, 18))
    drawn = grid[0][-1].images[-1]
    label = "share of the map's largest value"
    figure.colorbar(drawn, ax=grid.ravel().tolist(), label=label, fraction=0.03, aspect=30)
    named = f"{study}: " if study else ""
    entitle(figure, f"{named}Grad-CAM of the images' classes, seed {picture.seed}")
    return figure


def _draw_image(axes: Axes, image: Tensor, boxes: Sequence[Box]) -> None:
    shown = image.movedim(0, -1) - image.min()
    shown = (shown / shown.max().clamp(min=1e-12)).squeeze(-1)
    axes.imshow(shown.numpy(), cmap="gray", vmin=0, vmax=1)
    _finish(axes, boxes, [True] * len(boxes))


def _draw_map(
    axes: Axes, map_: Tensor, image: Tensor, boxes: Sequence[Box], threshold: float
) -> None:
    top, height = map_.max(), image.shape[-2:]
    overlay(map_ / top if top > 0 else map_, image, ax=axes, title="")
    axes.images[-1].colorbar.remove()  # one for all
    hits = touched(map_[None], [boxes], (height[0], height[1]), threshold)[0] if boxes else []
    _finish(axes, boxes, hits)
    text = f"entropy {entropies(map_[None]).item():.2f}" if top > 0 else "empty map"
    axes.set_xlabel(f"{text}, {sum(hits)} of {len(hits)}" if boxes else text)


def _finish(axes: Axes, boxes: Sequence[Box], hits: Sequence[bool]) -> None:
    """Boxes, and no ticks."""
    for (top, left, side), hit in zip(boxes, hits, strict=True):
        style = {"linestyle": "-" if hit else (0, (1, 2)), "linewidth": 1.2 if hit else 0.9}
        place = (left - 0.5, top - 0.5)
        axes.add_patch(Rectangle(place, side, side, fill=False, edgecolor="#56B4E9", **style))
    axes.set_axis_on()
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
