"""What watches a layer: one class a file. All take `when`, and the options of `Regularizer`.

base              the observer: fields, and what one site has seen
activation_stats  moments, shares, dead and saturated channels of what a layer gives
gradient_stats    the same of the gradient that comes back to it
measuring         what these take: how often, which bins
moments           sums of values on the device
saturation        where activations are flat
statistics        the sums as plain numbers
"""

from .activation_stats import ActivationStats
from .base import Observer, Seen, Watch
from .gradient_stats import GradientStats

__all__ = ["ActivationStats", "GradientStats", "Observer", "Seen", "Watch"]
