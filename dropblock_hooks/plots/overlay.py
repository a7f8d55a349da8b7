"""``overlay``: a map of positions, such as those of `gradcam`, over its image."""

from typing import Any

from .figure import as_finite, figure_of, pixels_of


def overlay(cam_map: Any, image: Any, ax: Any = None, *, title: str = "Grad-CAM") -> Any:
    """Draw a map over its image, with a color bar.

    Example:
        >>> figure = overlay(torch.rand(7, 7), torch.rand(3, 28, 28))
        >>> [ax.get_title() or ax.get_ylabel() for ax in figure.axes]
        ['Grad-CAM', 'value of the map']

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
    values = as_finite("cam_map", cam_map)
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
