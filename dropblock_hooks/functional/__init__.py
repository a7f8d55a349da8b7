"""The equations of the regularizers as pure functions of tensors. Their rates are floats.

A value outside the range that a docstring states is a ValueError, and another type a TypeError.

dropout     dropout of elements, channels, samples and residual branches; Gaussian noise
dropblock   dropout and noise (Disout) in blocks; the seed rate at which blocks drop a given share
clamping    bounds of activations: a clamp, or a soft cap
embeddings  noise on the embeddings of tokens
gradients   bounds of gradients by value and by norm, adaptive clipping, centralization
penalties   penalties of activations and parameters, and their gradients
foreach     the same by norm, for all gradients of an update in a constant number of operators
memory      bounds of norms that follow from the norms of earlier updates
masks       random masks and noise, and their application to a tensor
operators   operators of compiled code: blocks, and the counts of a site
cells       the rows of numbers that tell these operators the rates, and what to count
measures    measurements of tensors for observers, eager and in compiled code
outliers    kurtosis, values far from the mean, and channels far above the others, for observers
residual    the size of a residual branch relative to its shortcut, for observers
sparse      large tensors on the CPU: blocks, whole channels and samples
kernels     Triton kernels for tensors on a GPU, and where they can run
"""

from .clamping import clamp_activation
from .dropblock import block_gamma, disout, drop_block1d, drop_block2d, drop_block3d
from .dropout import (
    drop_path,
    dropout,
    dropout1d,
    dropout2d,
    dropout3d,
    gaussian_dropout,
    gaussian_noise,
    stochastic_depth,
)
from .embeddings import neftune
from .gradients import adaptive_clip_grad, centralize_grad, clamp_grad, clip_grad_norm
from .memory import adagc, new_memory, skip_update, zclip
from .penalties import activity_l1, activity_l2, l2_sp, z_loss

__all__ = [
    "activity_l1",
    "activity_l2",
    "adagc",
    "adaptive_clip_grad",
    "block_gamma",
    "centralize_grad",
    "clamp_activation",
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
    "l2_sp",
    "neftune",
    "new_memory",
    "skip_update",
    "stochastic_depth",
    "z_loss",
    "zclip",
]
