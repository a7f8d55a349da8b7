"""Pictures, by matplotlib (the extra ``plot``): each function returns a Figure.

``figure.savefig("picture.png")`` writes it. Without matplotlib, ImportError is raised.

overlay       `overlay`: a map of positions over its image
feature_maps  `plot_feature_maps`: the channels of a sample
depth         `plot_activations`, `plot_gradient_flow`: the results of observers, layer by layer
masks         `plot_masks`: the dropped positions of the maps of a model, over its image
figure        the Figure to draw on, numbers and images: what all pictures share
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
