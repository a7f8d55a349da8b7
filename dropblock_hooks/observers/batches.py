"""What the measured forwards show of the batches that enter the model, for `Watchdog`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import tree_leaves
from ..functional.measures import READ

_IMAGE = 3  # axes
_CHANNELS = 4  # so many may an image have
_NO_INPUTS = ("label", "target")  # arguments whose names begin so are for the loss


@dataclass
class Batches:
    """The batches since the last look at statistics, as far as all their samples are equal.

    Once a batch has different samples, no other batch is compared. Numbers stay on their device
    until a look reads them.
    """

    compared: int = 0  # the batches that were compared
    size: int = 0  # the samples of the last one
    differ: bool = False  # whether a batch has different samples, or cannot be judged
    unread: list[Tensor] = field(default_factory=list)  # of each batch, whether samples differ

    def __reduce__(self) -> Any:
        return Batches, ()  # a copy sees other batches

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare the samples in the arguments of the model, in a measured forward."""
        if self.differ:
            return
        inputs = {name: x for name, x in kwargs.items() if not name.startswith(_NO_INPUTS)}
        tensors = samples_in([*args, *inputs.values()])
        if not tensors:
            self.differ = True
            return
        self.compared += 1
        self.size = max(x.shape[0] for x in tensors)
        for x in tensors:
            self.unread.append(samples_differ(x))
        if tensors[0].device.type in READ:
            self.read()

    def read(self) -> None:
        """Read whether samples differ, which waits for a device."""
        self.differ = self.differ or any(map(bool, self.unread))
        self.unread = []

    def are_equal(self, fewest: int) -> bool:
        """Return whether at least so many batches were compared and had equal samples only."""
        return self.compared >= fewest and not self.differ

    def forget(self) -> None:
        """Begin anew with the next measured forward."""
        self.compared = 0
        self.differ = False
        self.unread = []


def samples_in(inputs: Sequence[Any]) -> Sequence[Tensor]:
    """Return the tensors in the arguments of a model that have several samples along axis 0.

    There is none if the arguments hold something else, such as a list of images or a graph, or if
    axis 0 need not be the batch: in a vector, or in one image without a batch axis.
    """
    leaves = tree_leaves(tuple(inputs), is_leaf=lambda value: isinstance(value, list))
    if not all(_is_known(leaf) for leaf in leaves):
        return []
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.ndim and x.shape[0] > 1]
    has_batch = any(x.ndim > 1 and not _may_be_image(x) for x in tensors)
    return tensors if has_batch else []


def _is_known(value: Any) -> bool:
    """Return whether a value is a plain tensor with elements, a number, a text or None."""
    if not isinstance(value, Tensor):
        return value is None or isinstance(value, bool | int | float | str)
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    return is_plain and not value.is_meta and not value.is_quantized and value.numel() > 0


def _may_be_image(x: Tensor) -> bool:
    """Return whether a tensor may be one image, whose channels are equal if it is gray."""
    return x.ndim == _IMAGE and x.shape[0] <= _CHANNELS and x.is_floating_point()


@torch.no_grad()
def samples_differ(x: Tensor) -> Tensor:
    """Return whether the samples of a batch are not all equal."""
    return (x[1:] != x[:1]).any()
