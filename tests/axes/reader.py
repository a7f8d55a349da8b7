"""Asks the package how it reads a tensor of one layer, without a regularizer that acts on it."""

import re

from dropblock_hooks.axes.facts import ModelFacts
from dropblock_hooks.axes.grids import Grids
from dropblock_hooks.axes.options import AxisOptions
from dropblock_hooks.axes.reader import Reader as OneLayer
from dropblock_hooks.selectors.index import Index
from dropblock_hooks.selectors.stages import stage_channels

_HELPS = r"layout=|grid=|needs (an axis|a \d-D tensor)|add one of length 1"


class Reader:
    """Reads tensors of the layers of one model.

    Attributes:
        stages: the names of the layers that end a feature stage.
    """

    def __init__(self, model):
        self._model, self._index, self._grids = model, Index(model), Grids()
        self._facts = ModelFacts(self._index)
        self.stages = set(stage_channels(self._index))

    def read(self, layer, x, spatial):
        """How the output of a layer is read: text, "-" where it is refused.

        Args:
            layer: its name.
            x: the tensor.
            spatial: how many axes of a map are needed; None needs the channels alone.
        """
        facts = self._facts.of(self._index.modules[layer], "output")
        try:
            return text_of(OneLayer(AxisOptions(), facts, self._grids, spatial=spatial).view(x))
        except ValueError as error:
            return "-" if re.search(_HELPS, str(error)) else f"no help: {error}"

    def watch(self):
        """Follow the sizes of maps in the next forward."""
        self._grids.watch(self._model)

    def close(self):
        """Take the hooks of `watch` off."""
        self._grids.unwatch(self._model)


def text_of(view):
    """One reading as the table has it."""
    grid = "" if view.grid is None else " " + "x".join(map(str, view.grid))
    return f"{view.layout}{grid}" + (f" +{view.prefix}" if view.prefix else "")
