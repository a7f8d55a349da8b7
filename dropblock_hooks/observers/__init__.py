"""What watches a layer: one class a file. All take `when`, and the options of `Regularizer`.

base              the observer: fields, and what one site has seen
capture           `Capture`: keeps activations and gradients
kept_calls        `Record`: one call, kept
activation_stats  moments, shares, dead and saturated channels of what a layer gives
gradient_stats    the same of the gradient that comes back to it
weight_stats      moments of a layer's parameters, and how far their norm has moved
watchdog          `Watchdog`: what goes wrong first, and where
watched           what its sites keep
batch_norm        BatchNorm's running statistics against those of its batches
measuring         what these take: how often, which bins
moments           sums of values on the device
saturation        where activations are flat
statistics        the sums as plain numbers
"""

from .activation_stats import ActivationStats
from .base import Observer, Seen, Watch
from .capture import Capture
from .gradient_stats import GradientStats
from .kept_calls import Record
from .watchdog import Watchdog
from .weight_stats import WeightStats

__all__ = [
    "ActivationStats",
    "Capture",
    "GradientStats",
    "Observer",
    "Record",
    "Seen",
    "Watch",
    "Watchdog",
    "WeightStats",
]
