"""What Grad-CAM explains: one score for each image, computed from the output of a model."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..quoting import quote, shown
from .once import no_tensor

Wanted = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None


def scores_of(output: Any, target: Any, images: int) -> tuple[Tensor, Tensor | None]:
    """Return a score for each image, and its class; no classes where `target` is a function.

    Args:
        output: what the model returned.
        target: the argument of `gradcam`.
        images: the number of images.

    Raises:
        TypeError, ValueError: if the target does not fit the output.
    """
    if callable(target) and not isinstance(target, Tensor):
        scores = target(output)
        if not (isinstance(scores, Tensor) and scores.shape == (images,) and scores.requires_grad):
            raise TypeError(
                f"target must return one score for each of {images} images, a tensor of shape "
                f"({images},) with a gradient, got {shown(scores)}"
            )
        return scores, None
    if not isinstance(output, Tensor):
        raise no_tensor(output, "target", ".amax(1)")
    if output.ndim != 2:
        pick = "output" if output.ndim < 2 else "output[:, 3].flatten(1).mean(1)"
        raise ValueError(
            "the output must be (images, classes) for a target of classes, got shape "
            f"{tuple(output.shape)}: give a function as target that makes one score for each "
            f"image, as in target=lambda output: {pick}"
        )
    if len(output) != images:
        raise ValueError(f"the output has {len(output)} rows for {images} images")
    classes = output.argmax(1) if target is None else _classes(target, images, output.shape[1])
    classes = classes.to(output.device)
    return output.gather(1, classes[:, None])[:, 0], classes


def _classes(target: Any, images: int, k: int) -> Tensor:
    """The class of each image, which must be below `k`."""
    classes = torch.ones(())  # of no class
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        classes = torch.as_tensor(target)
    if classes.is_floating_point() or classes.dtype is torch.bool or classes.ndim > 1:
        raise TypeError(
            "target must be a class (an integer), one for each image, or a function of the "
            f"output, got {shown(target)}"
        )
    if classes.ndim and len(classes) != images:
        raise ValueError(f"target has {len(classes)} classes for {images} images: {quote(target)}")
    outside = classes[(classes < 0) | (classes >= k)]
    if len(outside):
        raise ValueError(f"target must be in 0..{k - 1} ({k} classes), got {int(outside[0])}")
    return classes.long().expand(images)
