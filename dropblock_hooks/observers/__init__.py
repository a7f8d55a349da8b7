"""Observers of layers. All take `when`, and the options of `Regularizer`.

base      `Observer`: three methods; `Watch`: the states of a site
moments   sums of values, shares, a histogram, channels that are alive
stats     `ActivationStats`, `GradientStats`, `WeightStats`
capture   `Capture`: keeps activations and gradients
watchdog  `Watchdog`: names the first layer where something goes wrong; the state of its sites
"""

from .base import Observer, Seen, Watch
from .capture import Capture, Record
from .stats import ActivationStats, GradientStats, WeightStats
from .watchdog import Watchdog

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
