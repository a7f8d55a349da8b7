"""What Grad-CAM explains: one score for each image, computed from the output of a model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..quoting import quote, shown
from .once import no_tensor

Wanted = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None


class Scores:
    """Computes one score for each image from an output.

    Args:
        target: the argument of `gradcam`.
        images: the number of images.

    Attributes:
        classes: the class of each image; None before a call, and if a function makes the scores.
    """

    def __init__(self, target: Any, images: int) -> None:
        self._target, self.images = target, images
        self.classes: Tensor | None = None

    def __call__(self, output: Any) -> Tensor:
        """Return the scores.

        Raises:
            TypeError, ValueError: if the target does not fit the output.
        """
        if callable(self._target) and not isinstance(self._target, Tensor):
            return self._checked(self._target(output), output)
        if not isinstance(output, Tensor):
            raise no_tensor(output, "target", ".amax(1)")
        if output.ndim != 2:
            pick = "output" if output.ndim < 2 else "output[:, 3].flatten(1).mean(1)"
            raise ValueError(
                "the output must be (images, classes) for a target of classes, got shape "
                f"{tuple(output.shape)}: give a function as target that makes one score for each "
                f"image, as in target=lambda output: {pick}"
            )
        if len(output) != self.images:
            raise ValueError(f"the output has {len(output)} rows for {self.images} images")
        classes = output.argmax(1) if self._target is None else self._given(output.shape[1])
        self.classes = classes.to(output.device)
        return output.gather(1, self.classes[:, None])[:, 0]

    def _given(self, k: int) -> Tensor:
        """The classes in `target`, which must be below `k`."""
        try:
            classes = torch.as_tensor(self._target)
        except (TypeError, ValueError, RuntimeError):
            classes = torch.ones(())
        if classes.is_floating_point() or classes.dtype is torch.bool or classes.ndim > 1:
            raise TypeError(
                "target must be a class (an integer), one for each image, or a function of the "
                f"output, got {shown(self._target)}"
            )
        if classes.ndim and len(classes) != self.images:
            raise ValueError(
                f"target has {len(classes)} classes for {self.images} images: {quote(self._target)}"
            )
        outside = classes[(classes < 0) | (classes >= k)]
        if len(outside):
            raise ValueError(f"target must be in 0..{k - 1} ({k} classes), got {int(outside[0])}")
        return classes.long().expand(self.images)

    def _checked(self, scores: Any, output: Any) -> Tensor:
        """What the function returned, if it is one score for each image."""
        got = shown(scores)
        if isinstance(scores, Tensor):
            got = f"{str(scores.dtype).removeprefix('torch.')} of shape {tuple(scores.shape)}"
            if scores.is_floating_point() and scores.shape == (self.images,):
                leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
                if not scores.requires_grad and any(x.requires_grad for x in leaves):
                    raise ValueError("target must compute its scores by differentiable operations")
                return scores
        raise TypeError(
            f"target must return one score for each of {self.images} images, a floating-point "
            f"tensor of shape ({self.images},), got {got}"
        )
