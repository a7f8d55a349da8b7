"""Asks the package how it reads a tensor of one layer, without a regularizer that acts on it."""

from dropblock_hooks import ClipGradNorm, Dropout2d, Dropout3d
from dropblock_hooks.layouts.hints import Hints
from dropblock_hooks.layouts.map_sizes import MapSizes, size_hooks_on, watch_sizes
from dropblock_hooks.selectors.index import Index
from dropblock_hooks.selectors.stages import stage_channels, stage_ratios
from dropblock_hooks.sites.forms import Forms
from dropblock_hooks.sites.hooks import take_off

_NEEDS = {None: ClipGradNorm(1.0, per="channel"), 2: Dropout2d(0.1), 3: Dropout3d(0.1)}


class Reader:
    """Reads tensors of the layers of one model.

    Attributes:
        stages: the names of the layers that end a feature stage.
    """

    def __init__(self, model):
        self._model, self._index, self._sizes = model, Index(model), MapSizes()
        stages = stage_channels(self._index)
        self._hints = Hints(self._index, stages, stage_ratios(self._index))
        self.stages = set(stages)

    def read(self, layer, x, told, spatial):
        """How the output of a layer is read: text, "-" where it is refused.

        Args:
            layer: its name.
            x: the tensor.
            told: all that the layer took and gave.
            spatial: how many axes of a map are needed; None needs the channels alone.
        """
        evidence = self._hints.of(self._index.modules[layer], "output")
        try:
            return text_of(Forms(_NEEDS[spatial], evidence, self._sizes).of(x, told))
        except ValueError:
            return "-"

    def watch(self):
        """Follow the sizes of maps in the next forward."""
        watch_sizes(self._model, self._sizes)

    def close(self):
        """Take the hooks of `watch` off."""
        for module in self._model.modules():
            for hook in size_hooks_on(module):
                take_off(hook, module)


def text_of(form):
    """One reading as the table has it."""
    grid = "" if form.grid is None else " " + "x".join(map(str, form.grid))
    order = " reordered" if getattr(form, "unrolled", ()) else ""
    return f"{form.layout}{grid}" + (f" +{form.prefix}" if form.prefix else "") + order
