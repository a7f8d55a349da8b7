"""What Grad-CAM explains: one score for each image, computed from the output of a model."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..quoting import kind_with_keys, quote, shown

Wanted = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None


class Scores:
    """Computes one score for each image from an output.

    Args:
        target: the argument of `gradcam`.
        images: the number of images.

    Attributes:
        classes: the class of each image; None before a call, and if a function makes the scores.
    """

    def __init__(self, target: Wanted, images: int) -> None:
        self._target, self._images = target, images
        self.classes: Tensor | None = None

    def __call__(self, output: Any) -> Tensor:
        """Return the scores.

        Raises:
            TypeError, ValueError: if the target does not fit the output.
        """
        if callable(self._target) and not isinstance(self._target, Tensor):
            return self._made(self._target(output), output)
        if not isinstance(output, Tensor):
            first = quote(next(iter(output), 0)) if isinstance(output, Mapping) else "0"
            raise TypeError(
                f"the output is no tensor but {kind_with_keys(output)}: give a function as target, "
                f"as in target=lambda output: output[{first}].amax(1)"
            )
        if output.ndim != 2:
            pick = "output" if output.ndim < 2 else "output[:, 3].flatten(1).mean(1)"
            raise ValueError(
                "the output must be (images, classes) for a target of classes, got shape "
                f"{tuple(output.shape)}: give a function as target that makes one score for each "
                f"image, as in target=lambda output: {pick}"
            )
        if len(output) != self._images:
            raise ValueError(f"the output has {len(output)} rows for {self._images} images")
        classes = output.argmax(1) if self._target is None else self._given(output.shape[1])
        self.classes = classes.to(output.device)
        return output.gather(1, self.classes[:, None])[:, 0]

    def _given(self, k: int) -> Tensor:
        """Check the classes in `target`, which must be below `k`."""
        given: Any = self._target
        values = given.tolist() if hasattr(given, "tolist") else given
        each = list(values) if isinstance(values, Sequence) else [values] * self._images
        if isinstance(values, str) or not all(map(_is_index, each)):
            raise TypeError(
                "target must be a class (an integer), one for each image, or a function of the "
                f"output, got {shown(given)}"
            )
        if len(each) != self._images:
            raise ValueError(
                f"target has {len(each)} classes for {self._images} images: {quote(given)}"
            )
        outside = [value for value in each if not 0 <= value < k]
        if outside:
            raise ValueError(f"target must be in 0..{k - 1} ({k} classes), got {outside[0]}")
        return torch.tensor([operator.index(value) for value in each])

    def _made(self, scores: Any, output: Any) -> Tensor:
        """Check what the function returned."""
        is_tensor = isinstance(scores, Tensor)
        if not is_tensor or not scores.is_floating_point() or scores.shape != (self._images,):
            dtype = f"{str(scores.dtype).removeprefix('torch.')} of shape " if is_tensor else ""
            raise TypeError(
                f"target must return one score for each of {self._images} images, a floating-point "
                f"tensor of shape ({self._images},), got "
                f"{dtype + str(tuple(scores.shape)) if is_tensor else shown(scores)}"
            )
        leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        if not scores.requires_grad and any(x.requires_grad for x in leaves):
            raise ValueError("target must compute its scores by differentiable operations")
        made: Tensor = scores
        return made


def _is_index(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")
