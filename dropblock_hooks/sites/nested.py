"""The floating-point tensors in a nested value, and others put in their place."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class Nested:
    """Puts others in the place of all tensors of a nested value.

    Attributes:
        tensors: what it holds now.
    """

    def __init__(self, value: Any) -> None:
        self.leaves, self.nesting = tree_flatten(value)
        self.places = [i for i, x in enumerate(self.leaves) if _is_watched(x)]
        self.tensors: list[Tensor] = [self.leaves[i] for i in self.places]

    def __call__(self, new: Sequence[Any]) -> Any:
        leaves = list(self.leaves)
        for place, x in zip(self.places, new, strict=True):
            leaves[place] = x
        return tree_unflatten(leaves, self.nesting)


def _is_watched(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
