"""Noise on the embeddings of tokens.

y = x + u * alpha / sqrt(L * d)             with u uniform in [-1, 1), for x of (N, L, d)
"""

import torch
from torch import Tensor

from ..checks import NON_NEGATIVE, as_number, check_floating, check_tensor
from .masks import uniform_like


def add_embedding_noise(
    x: Tensor, alpha: float | Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Add uniform noise to embeddings (N, L, d); compiled code passes the rate as a tensor.

    Raises:
        TypeError: if the embeddings are no floating-point tensor.
        ValueError: if the embeddings have another number of axes.
    """
    check_floating(x)
    if x.ndim != 3:
        raise ValueError(f"needs embeddings of the shape (N, L, d), got shape {tuple(x.shape)}")
    is_off = not isinstance(alpha, Tensor) and alpha == 0.0  # reading a tensor may wait
    if is_off or x.numel() == 0:
        return x

    _, length, width = x.shape
    bound = alpha / (length * width) ** 0.5
    return (x + uniform_like(x, bound, generator)).to(x.dtype)


def neftune(
    input: Tensor, alpha: float, training: bool = True, *, generator: torch.Generator | None = None
) -> Tensor:
    """Adds uniform noise in ±alpha / sqrt(L * d) to embeddings of the shape (N, L, d).

    With alpha = 0 or in evaluation, `input` itself is returned and no random number is drawn.

    Example:
        >>> y = neftune(torch.zeros(2, 16, 64), 5.0)

    Args:
        input: floating-point tensor (N, L, d): N sequences of L tokens, including padding, with d
            channels each.
        alpha: scale of the noise, a number >= 0.
        training: False returns `input`.
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range, or `input` has another number of axes.

    Reference:
        Jain et al., 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning"
        (https://arxiv.org/abs/2310.05914).
    """
    alpha = as_number("alpha", alpha, allowed=NON_NEGATIVE)
    check_tensor(input)
    if not training:
        return input
    return add_embedding_noise(input, alpha, generator)
