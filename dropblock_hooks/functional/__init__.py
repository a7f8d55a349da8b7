"""The equations of the regularizers as pure functions of tensors. Their rates are floats.

All functions raise a TypeError if a rate or a bound is no number, and a ValueError for any other
value that the docstring does not allow.

- `dropout`: dropout of elements, channels, samples and residual branches; Gaussian noise
- `dropblock`: dropout and noise (Disout) in blocks; the seed rate γ for a wanted dropped share
- `clamping`: bounds of activations, by a clamp or a soft cap
- `embeddings`: noise on the embeddings of tokens
- `gradients`: bounds of gradients by value and by norm, adaptive clipping, centralization
- `foreach`: the functions of `gradients` for all gradients of an update at once
- `penalties`: penalties of activations and parameters, and their gradients
- `memory`: bounds of norms that follow from the norms of earlier updates
- `masks`: random masks and noise, and their application to a tensor
- `operators`: operators of compiled code for blocks, and for the counts of a site
- `in_graph`: operators whose kernels become a part of the compiled graph
- `cells`: the tensors by which compiled code gets its rates and adds to its counts
- `measures`: measurements of tensors for observers, eager and in compiled code
- `outliers`: kurtosis, values far from the mean, and channels far above the others
- `residual`: the size of a residual branch relative to its shortcut
- `sparse`: fast dropping of elements, blocks, channels and samples of large tensors on the CPU
- `kernels`: Triton kernels for tensors on a GPU, and the conditions under which they run
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
