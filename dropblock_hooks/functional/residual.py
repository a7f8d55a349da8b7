"""The size of a residual branch relative to its shortcut.

`ActivationStats` calls `add_squares` in eager forwards, and compiled code calls `add_branch`.

ratio = rms(y - x) / rms(x)        of a block with the input x and the output y = x + branch
"""

import math
from typing import Any

import torch
from torch import Tensor

from . import in_graph
from .kernels import launch
from .masks import wide_dtype
from .measures import CALLS, due_call, if_due, norm_of, nothing, recomputes
from .operators import operator


def new_branch() -> Tensor:
    """The sums of the results of `branch_squares`, before the first call."""
    return torch.zeros(2, dtype=torch.float64)


def add_squares(sums: Tensor, y: Tensor, x: Tensor) -> None:
    """Add the result of `branch_squares` for a call to the sums."""

    def with_kernels() -> None:
        from .kernels import branch as kernels

        kernels.add(y, x, sums)

    def with_torch() -> None:
        sums.add_(branch_squares(y, x))

    if _kernels_take(y, x):
        launch.or_else(with_kernels, with_torch)
    else:
        with_torch()


def _kernels_take(y: Tensor, x: Tensor) -> bool:
    """Whether kernels are used for a call of a block."""
    return y.numel() > 0 and y.device == x.device and launch.takes(y) and launch.takes(x)


def branch_squares(y: Tensor, x: Tensor) -> Tensor:
    """The sums of squares of ``y - x`` and of `x`, in float64; zeros if one is not finite.

    The values are subtracted before they are squared, because a difference of squares would lose
    its digits.
    """
    dtype = torch.promote_types(y.dtype, torch.float32)
    shortcut = x.to(dtype)
    branch = y.to(dtype) - shortcut
    # norms, because in float32 the squares of large values would overflow
    norms = torch.stack((norm_of(branch), norm_of(shortcut)))
    squares = norms.to(wide_dtype(y.device)).square()
    is_finite = squares.sum() < math.inf  # False for NaN, too
    return torch.where(is_finite, squares, 0.0)


def branch_ratio(squares: Tensor) -> float | None:
    """The ratio of the norms; None without a call, or if the shortcut is 0."""
    of_branch, of_shortcut = squares.tolist()
    return math.sqrt(of_branch / of_shortcut) if of_shortcut else None


def _fits_graph(y: Tensor, x: Tensor, state: Tensor, branch: Tensor, **others: Any) -> bool:
    """Whether AOTAutograd can trace into `add_branch`."""
    # `fits_kernels` checks the dtype of its first tensor only
    return launch.is_on(x.device, x.dtype) and in_graph.fits_kernels(y, x, state, branch)


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
    """Add a call of a block in compiled code.

    It runs before `measures.add_statistics`, which counts the call in `state`, because the count
    decides whether the call is measured.

    Args:
        y: the output of the block.
        x: its input, of the same shape.
        training: the mode of the block.
        every: each n-th call is measured.
        state: the tensor of `measures.add_statistics`.
        branch: the sums of squares; changed.
    """

    def with_kernels() -> None:
        from .kernels import branch as kernels
        from .kernels.moments import Gate

        gate = Gate(state, training, counts=True, calls=CALLS, every=every)
        kernels.add(y, x, branch, gate)

    def with_torch() -> None:
        due = due_call(training, every, state)  # a bool, or a tensor that is not read
        if due is False or not y.numel():
            return
        added = branch + branch_squares(y, x)
        branch.copy_(if_due(due, added, branch))

    if recomputes():
        return
    if _kernels_take(y, x):
        launch.or_else(with_kernels, with_torch)
    else:
        with_torch()
