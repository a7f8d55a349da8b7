"""Pictures, by matplotlib (the extra ``plot``): each function returns a Figure.

overlay       `overlay`: a map of places, over the image that it speaks of
feature_maps  `plot_feature_maps`: the channels of one sample
depth         `plot_activations`, `plot_gradient_flow`: what observers have seen, layer by layer
masks         `plot_masks`: what is dropped of the maps of a model, over its image
values        what somebody gave, as numbers to draw
figure        the Figure to draw on, and what is said where matplotlib is missing
"""

from .depth import plot_activations, plot_gradient_flow
from .feature_maps import plot_feature_maps
from .masks import plot_masks
from .overlay import overlay

__all__ = [
    "overlay",
    "plot_activations",
    "plot_feature_maps",
    "plot_gradient_flow",
    "plot_masks",
]
