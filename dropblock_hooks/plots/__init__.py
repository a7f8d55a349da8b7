"""Pictures, by matplotlib (the extra ``plot``): each function returns a Figure.

overlay       `overlay`: a map of places, over the image that it speaks of
feature_maps  `plot_feature_maps`: the channels of one sample
figure        the Figure to draw on, and what is said where matplotlib is missing
"""

from .feature_maps import plot_feature_maps
from .overlay import overlay

__all__ = ["overlay", "plot_feature_maps"]
