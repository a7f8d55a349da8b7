"""What a layer gives as maps, for who draws them, whatever the regularizer of its site takes."""

from typing import Any

from torch import Tensor

from ..functional import axes
from ..regularizers.dropblock import DropBlock2d
from .forms import Forms
from .site import Site


def maps_of(site: Site, x: Tensor, told: Any = ()) -> Tensor | None:
    """A tensor as (N, C, h, w), as what takes maps would read it; None where it holds none.

    Args:
        site: at the layer that gives it; its ``layout``, ``grid`` and ``prefix_tokens`` are obeyed.
        x: the tensor.
        told: what the layer took and gave in this call.
    """
    if site.evidence is None:
        return None
    options = site.regularizer
    try:
        reading = DropBlock2d(
            0.0, 1, layout=options.layout, grid=options.grid, prefix_tokens=options.prefix_tokens
        )
        return axes.as_map(x, Forms(reading, site.evidence, site.control.sizes).of(x, told))
    except ValueError:
        return None  # vectors, tokens of no known grid, a layout of other axes
