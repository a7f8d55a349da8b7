"""How compiled code hands tensors to what keeps them: two operators, run in Python at their time.

What is to get them is named by a number in a tensor, so that another copy of a model compiles
nothing anew. The operators say that they change that tensor: so they are neither left out nor put
in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..handles import find

UNKNOWN = -1
"""The ticket of a call that is repeated, in a backward."""


@torch.library.custom_op("dropblock_hooks::capture_values", mutates_args=("handle",))
def capture_values(
    handle: Tensor, tensors: Sequence[Tensor], nesting: str, training: bool
) -> Tensor:
    """Give what a layer has given to the keeper; the ticket of the call."""
    keeper = find(handle)
    ticket = UNKNOWN if keeper is None else keeper.see_compiled(tensors, nesting, training)
    return torch.tensor(ticket, device="cpu")


@capture_values.register_fake
def _(handle: Tensor, tensors: Sequence[Tensor], nesting: str, training: bool) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("dropblock_hooks::capture_gradient", mutates_args=("handle",))
def capture_gradient(handle: Tensor, grad: Tensor, at: int, ticket: Tensor | None) -> None:
    """Give a gradient to the keeper."""
    keeper = find(handle)
    if keeper is not None:
        keeper.take_gradient(grad, at, UNKNOWN if ticket is None else int(ticket))


@capture_gradient.register_fake
def _(handle: Tensor, grad: Tensor, at: int, ticket: Tensor | None) -> None:
    return None
