"""``overlay``: a map of places, as `gradcam` makes it, over the image that it speaks of."""

from typing import Any

from torch import Tensor

from .figure import figure_of
from .values import as_values


def overlay(cam_map: Any, image: Any, ax: Any = None, *, title: str = "Grad-CAM") -> Any:
    """Draw a map over its image, with a color bar.

    Example:
        >>> import torch
        >>> figure = overlay(torch.rand(7, 7), torch.rand(3, 28, 28))
        >>> [ax.get_title() or ax.get_ylabel() for ax in figure.axes]
        ['Grad-CAM', 'value of the map']

    Args:
        cam_map: (h, w), of one image: ``cam.maps[0]`` of `gradcam`. It is stretched over the image.
            Colors go from 0 to 1, or to its maximum where that is larger.
        image: (C, H, W), (H, W, C) or (H, W), with 1 or 3 channels. It is shown from its smallest
            value to its largest, so it may be normalized.
        ax: matplotlib's Axes to draw on. None: a new Figure.
        title: above the picture.

    Returns:
        The Figure: ``figure.savefig("cam.png")``.

    Raises:
        ImportError: where matplotlib is missing.
        ValueError: for a map or an image of another shape, or with values that are not finite.
    """
    values, pixels = _map(cam_map), pixels_of(image)
    figure, ax = figure_of(ax, figsize=(4.2, 3.6))
    height, width = pixels.shape[:2]
    ax.imshow(pixels.numpy(), cmap="gray", vmin=0.0, vmax=1.0)
    top = max(float(values.max()), 1.0)
    drawn = ax.imshow(
        values.numpy(),
        cmap="inferno",
        alpha=(values / top).clamp(0.0, 1.0).mul(0.8).numpy(),  # the image is seen elsewhere
        vmin=0.0,
        vmax=top,
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
        interpolation="bilinear",
    )
    ax.set_title(title)
    ax.set_axis_off()
    figure.colorbar(drawn, ax=ax, label="value of the map", fraction=0.05)
    return figure


def _map(given: Any) -> Tensor:
    """One map, in float32 on the CPU."""
    values = _tensor("cam_map", given)
    if values.ndim != 2:
        raise ValueError(
            f"cam_map must be the map of one image, (h, w), got shape {tuple(values.shape)}: "
            "of a batch take one, as in cam.maps[0]"
        )
    return values


def pixels_of(given: Any) -> Tensor:
    """An image as (H, W, 3) or (H, W), from 0 to 1; for who draws on it."""
    image = _tensor("image", given)
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


def _tensor(name: str, given: Any) -> Tensor:
    values = as_values(name, given)
    if not values.numel() or not values.isfinite().all():
        what = "NaN or Inf" if values.numel() else f"shape {tuple(values.shape)}"
        raise ValueError(f"{name} must hold finite numbers alone, got {what}")
    return values
