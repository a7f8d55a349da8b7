"""What watches a layer: one class a file. All take `when`, and the options of `Regularizer`.

base  the observer: fields, and what one site has seen
"""

from .base import Observer, Seen, Watch

__all__ = ["Observer", "Seen", "Watch"]
