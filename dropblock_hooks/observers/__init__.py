"""What watches a layer: one class a file. All take `when`, and the options of `Regularizer`.

base        the observer: fields, and what one site has seen
capture     `Capture`: keeps activations and gradients
kept_calls  `Record`: one call, kept
in_graph    how compiled code hands tensors on
"""

from .base import Observer, Seen, Watch
from .capture import Capture
from .kept_calls import Record

__all__ = ["Capture", "Observer", "Record", "Seen", "Watch"]
