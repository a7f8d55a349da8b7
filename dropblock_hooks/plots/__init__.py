"""Pictures, by matplotlib (the extra ``plot``): each function returns a Figure.

``figure.savefig("picture.png")`` writes it. Without matplotlib, ImportError is raised.
Fonts and colors are those of matplotlib, so your own style applies. The pictures of the
documentation read on light and on dark pages: ``style.use("dropblock_hooks.plots.light_and_dark")``
of matplotlib selects their style.

- `maps`: `plot_feature_maps`, the channels of a sample; `overlay`, a map over its image
- `depth`: `plot_activations` and `plot_gradient_flow`, the results of observers by layer
- `run`: `plot_run`, the rates of a training by epoch; `plot_schedules`, the rates of a spec
- `masks`: `plot_masks`, the dropped positions of the maps of a model, over its image
"""

from .depth import plot_activations, plot_gradient_flow
from .maps import overlay, plot_feature_maps
from .masks import plot_masks
from .run import plot_run, plot_schedules

__all__ = [
    "overlay",
    "plot_activations",
    "plot_feature_maps",
    "plot_gradient_flow",
    "plot_masks",
    "plot_run",
    "plot_schedules",
]
