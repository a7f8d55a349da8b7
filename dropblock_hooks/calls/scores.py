"""What Grad-CAM explains: one score for each image, made of the output of a model."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..quoting import kind_of, quote, shown

Wanted = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None


class Scores:
    """Makes the scores of an output, and keeps what they are of.

    Attributes:
        classes: of each image, as a tensor of indices; None before an output is seen, or where a
            function makes the scores.
    """

    def __init__(self, target: Wanted) -> None:
        self._target = target
        self._function = target if callable(target) and not isinstance(target, Tensor) else None
        self.classes: Tensor | None = None

    def __call__(self, output: Any) -> Tensor:
        """One score for each image.

        Raises:
            TypeError, ValueError: for a target that does not fit the output.
        """
        if self._function is not None:
            return self._made(self._function(output))
        if not isinstance(output, Tensor):
            keys = f" with {quote(list(output))}" if isinstance(output, Mapping) else ""
            first = quote(next(iter(output), 0)) if isinstance(output, Mapping) else "0"
            raise TypeError(
                f"the output is no tensor but {kind_of(output)}{keys}: give a function as target, "
                f"as in target=lambda output: output[{first}].amax(1)"
            )
        if output.ndim != 2:
            raise ValueError(
                "the output must be (images, classes) for a target of classes, got shape "
                f"{tuple(output.shape)}: give a function as target that makes one score for each "
                "image, as in target=lambda output: output[:, 3].mean((1, 2))"
            )
        n, k = output.shape
        classes = output.argmax(1) if self._target is None else self._given(n, k)
        self.classes = classes.to(output.device)
        return output.gather(1, self.classes[:, None])[:, 0]

    def _given(self, n: int, k: int) -> Tensor:
        """The classes that were asked for, checked."""
        given: Any = self._target
        if isinstance(given, Tensor | Sequence) or hasattr(given, "__array__"):
            values = given.tolist() if hasattr(given, "tolist") else given
        else:
            values = given
        each = [values] * n if not isinstance(values, Sequence) else list(values)
        if isinstance(values, str) or not all(map(_is_index, each)):
            raise TypeError(
                "target must be a class (an integer), one for each image, or a function of the "
                f"output, got {shown(given)}"
            )
        if len(each) != n:
            raise ValueError(f"target has {len(each)} classes for {n} images: {quote(given)}")
        outside = [value for value in each if not 0 <= operator.index(value) < k]
        if outside:
            raise ValueError(f"target must be in 0..{k - 1} ({k} classes), got {outside[0]}")
        return torch.tensor([operator.index(value) for value in each])

    def _made(self, scores: Any) -> Tensor:
        """What the function has made, checked."""
        if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.ndim > 1:
            raise TypeError(
                "target must return one score for each image, a floating-point tensor of shape "
                f"(images,), got {_shape(scores)}"
            )
        return scores.reshape(-1)


def _is_index(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return shown(value)
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
