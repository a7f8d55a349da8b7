"""Whether the samples in the batches of measured forwards are all equal, for `Watchdog`.

A `ModelHook` calls `Batches.compare` after each measured forward, for the rule ``equal_inputs``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import tree_leaves
from ..functional.measures import READ

_IMAGE = 3  # the axes of an image
_CHANNELS = 4  # the most channels of an image
_CONSTANTS = (int, float, str, type(None))  # arguments that are no samples
_MOST_UNREAD = 4096  # numbers on the device, which bounds their memory
_NO_INPUTS = ("label", "target")  # arguments whose names begin so are for the loss


@dataclass
class Batches:
    """The batches since the last look at statistics, as long as all their samples are equal.

    Once a batch has different samples, no other batch is compared. Numbers stay on their device
    until a look reads them.
    """

    compared: int = 0  # the number of compared batches
    size: int = 0  # the number of samples in the last batch
    differ: bool = False  # whether a batch has different samples, or cannot be judged
    # for each compared tensor, whether samples differ
    unread: list[Tensor] = field(default_factory=list)

    def __reduce__(self) -> Any:
        return Batches, ()  # a copy sees other batches

    def compare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare the samples in the arguments of the model, in a measured forward."""
        if self.differ:
            return
        inputs = {name: x for name, x in kwargs.items() if not name.startswith(_NO_INPUTS)}
        tensors = samples_in([*args, *inputs.values()])
        if not tensors:
            self.differ = True
            return

        self.compared += 1
        self.size = tensors[0].shape[0]
        self.unread += map(samples_differ, tensors)
        # on a CPU, reading does not wait
        if tensors[0].device.type in READ or len(self.unread) >= _MOST_UNREAD:
            self.read()

    def read(self) -> None:
        """Read whether samples differ; this waits for a device."""
        self.differ = self.differ or any(map(bool, self.unread))
        self.unread = []

    def are_equal(self, fewest: int) -> bool:
        """Return whether at least `fewest` batches were compared, all with equal samples."""
        return self.compared >= fewest and not self.differ

    def forget(self) -> None:
        """Begin anew with the next measured forward."""
        self.compared = 0
        self.differ = False
        self.unread = []


def samples_in(inputs: Sequence[Any]) -> Sequence[Tensor]:
    """Return the tensors in the arguments of a model that have several samples along axis 0.

    The result is empty if the arguments hold other objects, such as a list of images or a graph. It
    is also empty if axis 0 may not be the batch, as in a vector, or in an image without a batch.
    """
    # a list stays whole and is not plain, because it may hold one sample in each item
    leaves = tree_leaves(tuple(inputs), is_leaf=is_list)
    values = [leaf for leaf in leaves if not isinstance(leaf, _CONSTANTS)]
    if not all(map(_is_plain, values)):
        return []
    tensors = [x for x in values if x.ndim and x.shape[0] > 1]
    # if one tensor has a batch, axis 0 of the others is taken for it, too
    return tensors if any(map(_has_batch, tensors)) else []


def is_list(value: Any) -> bool:
    """Return whether a value is a list."""
    return isinstance(value, list)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor whose values can be compared."""
    if type(value) not in (Tensor, nn.Parameter) or not value.numel():
        return False
    is_dense = value.layout is torch.strided and not value.is_nested
    return is_dense and not value.is_meta and not value.is_quantized


def _has_batch(x: Tensor) -> bool:
    """Return whether axis 0 is surely the batch: not in a vector, nor in what may be one image."""
    may_be_image = x.ndim == _IMAGE and x.shape[0] <= _CHANNELS and x.is_floating_point()
    return x.ndim > 1 and not may_be_image


@torch.no_grad()
def samples_differ(x: Tensor) -> Tensor:
    """Return whether the samples of a batch are not all equal."""
    return (x[1:] != x[:1]).any()
