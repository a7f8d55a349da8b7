"""The layer that Grad-CAM looks at, in one forward: what it gives, and the gradient of a score."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..axes.facts import ModelFacts
from ..axes.grids import Grids
from ..axes.options import AxisOptions
from ..axes.reader import Reader
from ..axes.view import NAMELESS, View
from ..checkpointing import NO_TASK, graph_task
from ..quoting import quote
from ..selectors.index import Index, Target
from ..sites import indexing
from ..tables import shown
from .candidates import only_tensor


class UnfitLayer(ValueError):
    """Grad-CAM can't look at this layer; another one may do."""


class Features(NamedTuple):
    """A map of features (N, C, h, w) of one layer, and the gradient there; in float32 or wider."""

    features: Tensor
    gradient: Tensor


class FeatureHook:
    """Forward hook: the graph begins anew behind the layer, at what the layer gives.

    So nothing before it needs a gradient. What is handed on is a copy, which the layers behind may
    change in place. Of a layer that is called several times, the last call counts.
    """

    def __init__(self, name: str, reader: Reader, index: int | str | None) -> None:
        self.name, self.reader, self.index = name, reader, index
        self.start: Tensor | None = None
        self.form: View = NAMELESS

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        index, x = self._picked(output)
        with torch.enable_grad():
            start = x.detach().clone().requires_grad_()
            handed_on = start.clone()
        if graph_task() == NO_TASK:  # a checkpoint's recomputation needs the same graph, no more
            try:
                self.form = self.reader.view(x)
            except ValueError as error:
                raise self.unfit(f"its output has no map: {error}") from None
            self.start = start
        return indexing.put(output, index, handed_on)

    def _picked(self, output: Any) -> tuple[int | str | None, Tensor]:
        """The tensor to look at, and where in the output it is."""
        index = self.index
        try:
            x = only_tensor(output) if index is None else None
            if x is not None and not isinstance(output, Tensor):
                pairs = output.items() if isinstance(output, Mapping) else enumerate(output)
                index = next(key for key, value in pairs if value is x)
            return index, indexing.get(output, index)
        except ValueError as error:
            raise self.unfit(f"its output {error}") from None

    def unfit(self, why: str) -> UnfitLayer:
        """The error that says why this layer can't be used."""
        return UnfitLayer(f"layer {quote(self.name or '.')}: {why}")


class Explained:
    """A model and an input, to be explained at one layer or another.

    Args:
        index: of the model.
        call: runs the model on the input.
        scores_of: makes one score for each image of the output.
        options: how the axes are to be read, as far as the user says so.
        element: which element, of a layer that returns several tensors.
    """

    def __init__(
        self,
        index: Index,
        call: Callable[[], Any],
        scores_of: Callable[[Any], Tensor],
        options: AxisOptions,
        element: int | str | None,
    ) -> None:
        self.index, self.call, self.scores_of = index, call, scores_of
        self.options, self.element = options, element
        self._facts = ModelFacts(index)

    def at(self, layer: Target) -> Features:
        """The features of a layer, and the gradient of the sum of the scores there.

        Raises:
            UnfitLayer: where it has no map, is not called, or has no gradient.
        """
        name, module = layer.name, layer.module
        facts = self._facts.of(layer, "output")
        reader = Reader(self.options, facts, Grids(), spatial=2, index=self.element)
        hook = FeatureHook(name, reader, self.element)
        if isinstance(module, torch.jit.ScriptModule):
            raise hook.unfit("it is a ScriptModule, which takes no hooks")
        with _watched(self.index.model, reader):
            handle = module.register_forward_hook(hook)
            try:
                output = self.call()
            finally:
                handle.remove()
        if hook.start is None:
            raise hook.unfit("it is never called")
        scores = self.scores_of(output)
        seen = self._seen(hook, scores)
        n, size = len(seen.features), tuple(seen.features.shape[2:])
        if size == (1, 1):
            raise hook.unfit("its map is 1x1, which tells nothing of places")
        if n != len(scores):
            raise hook.unfit(f"its maps are {n}, of {len(scores)} images: parts of them")
        if not all(bool(each.isfinite().all()) for each in seen):
            raise hook.unfit("its output, or the gradient there, holds NaN or Inf")
        if not bool(seen.gradient.any()):
            raise hook.unfit(
                f"the gradient is 0 at all places of its {shown(size)} map: the scores do not "
                "depend on it (a head with weights of 0? dead or saturated units behind it?)"
            )
        return seen

    def _seen(self, hook: FeatureHook, scores: Tensor) -> Features:
        """What was captured, with its gradient."""
        start, form = hook.start, hook.form
        assert start is not None
        gradient = None
        if scores.requires_grad:
            (gradient,) = torch.autograd.grad(scores.sum(), start, allow_unused=True)
        if gradient is None:
            raise hook.unfit(
                "what it gives does not reach the scores: it is not used, or cut off by detach() "
                "or no_grad()"
            )
        features, there = form.take(start.detach()), form.take(gradient)
        if form.prefix and bool(gradient.any()) and not bool(there.any()):
            raise hook.unfit(
                f"the gradient is 0 at all its tokens but the first {form.prefix}: the layers "
                "behind read no token of the map"
            )
        wide = torch.promote_types(start.dtype, torch.float32)
        return Features(features.to(wide), there.to(wide))


@contextmanager
def _watched(model: nn.Module, reader: Reader) -> Iterator[None]:
    """With hooks on the model that show the sizes of its maps, if they may be needed."""
    try:
        if reader.needs_grids:
            reader.grids.watch(model)
        yield
    finally:
        reader.grids.unwatch(model)
