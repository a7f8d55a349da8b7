"""How the tensors of one site are read: asked at every call, remembered by shape."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..functional.axes import PARAMETER, Form, are_numbers
from ..layouts.autograd_graph import UNTOLD, channels_of
from ..layouts.hints import Evidence
from ..layouts.infer import form_of
from ..layouts.map_sizes import MapSizes
from ..regularizers.base import Regularizer

_PARAMETER = Form(PARAMETER)
_MOST_SHAPES = 256  # that a site remembers


class Forms:
    """How the axes of the tensors of one site are read.

    Attributes:
        regularizer: its options, and the number of spatial axes that it needs.
        evidence: what the model tells about the layer; None for a parameter.
        sizes: what the model has met in this forward.
        last: the form of the tensor seen last; None before the first.
    """

    def __init__(
        self, regularizer: Regularizer, evidence: Evidence | None, sizes: MapSizes
    ) -> None:
        self.regularizer, self.evidence, self.sizes = regularizer, evidence, sizes
        self.last: Form | None = None if evidence else _PARAMETER
        self._known: dict[torch.Size, Form] = {}  # where nothing but the shape decides
        self._turned: dict[int, str] = {}  # where the channels were, by rank

    @property
    def reads_sizes(self) -> bool:
        """Whether sizes among the layer's keywords may be needed: where tokens form a map."""
        spatial = self.regularizer.spatial
        may_be_tokens = self.evidence is not None and self.evidence.last is not None
        return spatial is not None and spatial > 1 and may_be_tokens

    @property
    def reads_grids(self) -> bool:
        """Whether the grid of its tokens may have to be that of what the model has met."""
        options = self.regularizer
        return self.reads_sizes and options.grid is None and options.layout not in ("NCHW", "NHWC")

    def of(self, x: Tensor, told: Any = ()) -> Form:
        """How the axes of a tensor are read; `told` is what the layer took and gave.

        Raises:
            ValueError: where that can't be known.
        """
        if self.evidence is None:
            return _PARAMETER
        shape = x.shape
        if is_compiling():  # no side effects, and no hash of a traced size
            seen = self._turned.get(x.ndim, "")
            return form_of(self.regularizer, self.evidence, shape, told, seen, self.sizes)
        try:
            form = self._known.get(shape)
        except TypeError:  # a symbolic size, as in make_fx, has no hash
            form = None
        if form is None:
            seen = self._seen(x, self.evidence)
            form = form_of(self.regularizer, self.evidence, shape, told, seen, self.sizes)
            # of a grid, what the layer was told in this call has its say
            if form.grid is None and are_numbers(shape):
                if len(self._known) >= _MOST_SHAPES:
                    self._known.clear()
                self._known[shape] = form
        self.last = form
        return form

    def _seen(self, x: Tensor, evidence: Evidence) -> str:
        """What the graph says of the channels, or has said of a tensor of this rank.

        Of tokens it is asked until it has told, since their forms are not remembered.
        """
        if evidence.own or self.regularizer.layout != "auto":
            return ""
        known = self._turned.get(x.ndim, "")
        if known and x.ndim == 3:
            return known
        seen = channels_of(x)
        if seen in ("", UNTOLD):
            return known or seen
        self._turned[x.ndim] = seen
        return seen
