"""Pictures, by matplotlib (the extra ``plot``): each function returns a Figure.

overlay  `overlay`: a map of places, over the image that it speaks of
masks    `plot_masks`: what is dropped of the maps of a model, over its image
figure   the Figure to draw on, and what is said where matplotlib is missing
"""

from .masks import plot_masks
from .overlay import overlay

__all__ = ["overlay", "plot_masks"]
