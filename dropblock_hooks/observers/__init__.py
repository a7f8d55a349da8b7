"""What watches a layer: one class a file. All take `when`, and the options of `Regularizer`.

base      the observer: fields, and what one site has seen
watchdog  `Watchdog`: what goes wrong first, and where
watched   what its sites keep
"""

from .base import Observer, Seen, Watch
from .watchdog import Watchdog

__all__ = ["Observer", "Seen", "Watch", "Watchdog"]
