"""The size of a residual branch relative to its shortcut.

ratio = rms(y - x) / rms(x)        of a block with the input x and the output y = x + branch
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from . import in_graph
from .kernels import launch
from .masks import wide_dtype
from .measures import due_call, if_due, norm_of, nothing
from .operators import operator


def new_branch() -> Tensor:
    """The sums of squares of `branch_squares` before the first call."""
    return torch.zeros(2, dtype=torch.float64)


def branch_squares(y: Tensor, x: Tensor) -> Tensor:
    """The sums of squares of ``y - x`` and of `x`, in float64; zeros if one is not finite.

    The difference is taken of each two values, because that of the sums would lose its digits.
    """
    dtype = torch.promote_types(y.dtype, torch.float32)
    shortcut = x.to(dtype)
    branch = y.to(dtype) - shortcut
    norms = torch.stack((_norm(branch), _norm(shortcut)))
    squares = norms.to(wide_dtype(y.device)).square()
    is_finite = squares.sum() < math.inf  # False for NaN, too
    return torch.where(is_finite, squares, 0.0)


def _norm(x: Tensor) -> Tensor:
    """The norm of a tensor. That of `norm_of` is quicker on a CPU, where it reads a number."""
    if launch.is_traced() or launch.is_on(x.device, x.dtype):
        norm: Tensor = vector_norm(x, dtype=wide_dtype(x.device))
        return norm
    return norm_of(x)


def branch_ratio(squares: Tensor) -> float | None:
    """The ratio of the norms; None without a call, or if the shortcut is 0."""
    of_branch, of_shortcut = squares.tolist()
    return math.sqrt(of_branch / of_shortcut) if of_shortcut else None


def _fits_graph(y: Tensor, x: Tensor, state: Tensor, branch: Tensor, **others: Any) -> bool:
    """Whether AOTAutograd can trace into `add_branch`."""
    return in_graph.fits_kernels(y, x, state, branch)


@operator(
    "add_branch(Tensor y, Tensor x, bool training, int every, Tensor state, Tensor(a!) branch) "
    "-> ()",
    fake=nothing,
    fits_graph=_fits_graph,
)
@torch.no_grad()
def add_branch(
    y: Tensor, x: Tensor, training: bool, every: int, state: Tensor, branch: Tensor
) -> None:
    """Add a call of a block in compiled code, before `measures.add_statistics` counts it.

    Args:
        y: the output of the block.
        x: its input, of the same shape.
        training: the mode of the block.
        every: each n-th call is measured.
        state: of `measures.add_statistics`.
        branch: the sums of squares; changed.
    """
    due = due_call(training, every, state)
    if due is False or not y.numel():
        return
    added = branch + branch_squares(y, x)
    branch.copy_(if_due(due, added, branch))
