"""What is done at a layer: one family a file. All take the options of `Regularizer` as keywords.

base        the regularizer: fields, rates, options, one method ``apply``
dropout     Dropout, Dropout1d, Dropout2d, Dropout3d
dropblock   DropBlock1d, DropBlock2d, DropBlock3d
disout      Disout
drop_path   DropPath, StochasticDepth
noise       GaussianNoise, GaussianDropout
gradients   what acts on gradients: ClampGrad, ClipGradNorm, ScaleGrad, ZeroGrad, GradNoise,
            DropGrad2d; `weight_gradients`, of parameters alone: AdaptiveClipGrad, CentralizeGrad
foreign     layers of others, wrapped
retune      Retune: another rate for a layer that drops by itself
droppers    layers that drop by themselves: what holds their rate, what they drop
"""

from .base import Regularizer
from .disout import Disout
from .drop_path import DropPath, StochasticDepth
from .dropblock import DropBlock1d, DropBlock2d, DropBlock3d
from .dropout import Dropout, Dropout1d, Dropout2d, Dropout3d
from .foreign import Foreign
from .gradients import (
    ClampGrad,
    ClipGradNorm,
    DropGrad2d,
    GradNoise,
    ScaleGrad,
    ZeroGrad,
)
from .noise import GaussianDropout, GaussianNoise
from .retune import Retune
from .weight_gradients import AdaptiveClipGrad, CentralizeGrad

__all__ = [
    "AdaptiveClipGrad",
    "CentralizeGrad",
    "ClampGrad",
    "ClipGradNorm",
    "Disout",
    "DropBlock1d",
    "DropBlock2d",
    "DropBlock3d",
    "DropGrad2d",
    "DropPath",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "Foreign",
    "GaussianDropout",
    "GaussianNoise",
    "GradNoise",
    "Regularizer",
    "Retune",
    "ScaleGrad",
    "StochasticDepth",
    "ZeroGrad",
]
