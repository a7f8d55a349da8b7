"""The equations of the regularizers as pure functions of tensors. Their rates are floats.

A value outside the range that a docstring states is a ValueError, and another type a TypeError.

dropout     dropout of elements, channels, samples and residual branches
dropblock   dropout of blocks
gamma       the seed rate at which blocks drop a given share
noise       Gaussian noise, also in blocks (Disout)
gradients   bounds of gradients by value and by norm, adaptive clipping, centralization
masks       random masks, and their application to a tensor
sparse      large tensors on the CPU: blocks, whole channels and samples; masks of bits
"""

from .dropblock import drop_block1d, drop_block2d, drop_block3d
from .dropout import drop_path, dropout, dropout1d, dropout2d, dropout3d, stochastic_depth
from .gamma import block_gamma
from .gradients import adaptive_clip_grad, centralize_grad, clamp_grad, clip_grad_norm
from .noise import disout, gaussian_dropout, gaussian_noise

__all__ = [
    "adaptive_clip_grad",
    "block_gamma",
    "centralize_grad",
    "clamp_grad",
    "clip_grad_norm",
    "disout",
    "drop_block1d",
    "drop_block2d",
    "drop_block3d",
    "drop_path",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "gaussian_dropout",
    "gaussian_noise",
    "stochastic_depth",
]
