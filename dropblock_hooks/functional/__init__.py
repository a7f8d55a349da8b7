"""The equations of the regularizers as pure functions of tensors.

dropout     dropout of elements, channels, samples and residual branches
dropblock   dropout of blocks; `disout` distorts them
gamma       the rate of block centers that drops a given share
noise       Gaussian noise
gradients   gradients, bounded by value and by norm; of parameters: `weight_gradients`
masks       random masks, and what they do to a tensor
axes        the axes of a tensor: views with the channels first, and back
sparse      blocks on the CPU, drawn by their seeds; `bits` masks of one bit, `units` whole channels
"""

from .disout import disout
from .dropblock import drop_block1d, drop_block2d, drop_block3d
from .dropout import (
    drop_path,
    dropout,
    dropout1d,
    dropout2d,
    dropout3d,
    stochastic_depth,
)
from .gamma import block_gamma
from .gradients import clamp_grad, clip_grad_norm
from .noise import gaussian_dropout, gaussian_noise
from .weight_gradients import adaptive_clip_grad, centralize_grad

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
