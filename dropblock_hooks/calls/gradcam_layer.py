"""The layer that Grad-CAM looks at: its activations, the gradient there, and the default layer."""

import re
from collections.abc import Callable, Iterator, Mapping
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
from ..selectors.index import Index, NoMatchError, Target
from ..selectors.select import match
from ..sites import indexing
from ..tables import shown

_NO_FEATURES = re.compile("Norm|Pool|Permute|Transpose|Flatten|Drop|Identity")


class UnfitLayer(ValueError):
    """Grad-CAM cannot use this layer."""


class Features(NamedTuple):
    """The activations (N, C, h, w) of one layer and their gradient, in float32 or wider."""

    features: Tensor
    gradient: Tensor


class LayerHook:
    """Forward hook that starts the autograd graph at the output of one layer.

    No layer before it needs a gradient. The layers behind it get a copy, which they may change in
    place. If the layer is called several times, the last call counts.

    Args:
        layer: the layer.
        facts: of the model.
        options: how the user says that the axes are read.
        element: which element of an output with several tensors.
    """

    def __init__(
        self, layer: Target, facts: ModelFacts, options: AxisOptions, element: int | str | None
    ) -> None:
        self.layer, self.element = layer, element
        self.reader = Reader(options, facts.of(layer, "output"), Grids(), spatial=2, index=element)
        self.start: Tensor | None = None
        self.form: View = NAMELESS

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        try:
            x = indexing.get(output, self.element)
        except ValueError as error:
            raise self.unfit(f"its output {error}") from None
        with torch.enable_grad():
            start = x.detach().clone().requires_grad_()
            copied = start.clone()
        if graph_task() == NO_TASK:  # a recomputation needs the same graph and nothing else
            try:
                self.form = self.reader.view(x)
            except ValueError as error:
                raise self.unfit(f"its output has no map: {error}") from None
            self.start = start
        return indexing.put(output, self.element, copied)

    def unfit(self, why: str) -> UnfitLayer:
        """The error that says why this layer cannot be used."""
        return UnfitLayer(f"layer {quote(self.layer.name or '.')}: {why}")

    def run(self, model: nn.Module, scores_of: Callable[[], Tensor]) -> Features:
        """Run the model once, and return the activations and the gradient of the summed scores.

        Raises:
            UnfitLayer: if the layer has no map, is not called, or gets no gradient.
        """
        if isinstance(self.layer.module, torch.jit.ScriptModule):
            raise self.unfit("it is a ScriptModule, which takes no hooks")
        handle = self.layer.module.register_forward_hook(self)
        try:
            if self.reader.needs_grids:
                self.reader.grids.watch(model)
            scores = scores_of()
        finally:
            handle.remove()
            self.reader.grids.unwatch(model)
        if self.start is None:
            raise self.unfit("it is never called in this forward")
        gradient = None
        if scores.requires_grad:
            (gradient,) = torch.autograd.grad(scores.sum(), self.start, allow_unused=True)
        if gradient is None:
            raise self.unfit(
                "its output does not reach the scores: it is not used, or cut off by detach() or "
                "no_grad()"
            )
        wide = torch.promote_types(self.start.dtype, torch.float32)
        x, grad = (self.form.take(each).to(wide) for each in (self.start.detach(), gradient))
        size = tuple(x.shape[2:])
        if size == (1, 1):
            raise self.unfit("its map is 1x1, which has no positions to compare")
        if len(x) != len(scores):
            raise self.unfit(f"its maps are {len(x)}, of {len(scores)} images: parts of them")
        if not (x.isfinite().all() and grad.isfinite().all()):
            raise self.unfit("its output, or the gradient there, holds NaN or Inf")
        if not grad.any():
            raise self.unfit(
                f"the gradient is 0 at all its tokens but the first {self.form.prefix}: the "
                "layers behind read no token of the map"
                if gradient.any()
                else f"the gradient is 0 at all places of its {shown(size)} map: the scores do "
                "not depend on it (a head with weights of 0? dead or saturated units behind it?)"
            )
        return Features(x, grad)


class _Called(NamedTuple):
    """A layer in its last call, and the shape of its output; () if that is no tensor."""

    module: nn.Module
    shape: tuple[int, ...]

    @property
    def is_point(self) -> bool:
        return len(self.shape) == 4 and (1, 1) in (self.shape[2:], self.shape[1:3])

    @property
    def is_map(self) -> bool:
        return len(self.shape) == 4 and not self.is_point

    @property
    def is_tokens(self) -> bool:
        return len(self.shape) == 3 and self.shape[1] > 1

    @property
    def is_spatial(self) -> bool:
        return self.is_map or self.is_tokens

    @property
    def is_norm(self) -> bool:
        return "Norm" in type(self.module).__name__ and self.is_spatial

    @property
    def has_features(self) -> bool:
        """Whether the output is spatial, and made by more than a norm, a pooling or a reshape."""
        simple = _NO_FEATURES.search(type(self.module).__name__) and not self.module._modules
        return self.is_spatial and not simple


def default_layers(index: Index, run: Callable[[], Any]) -> Iterator[str]:
    """The layers that Grad-CAM may use if none is named, the best first; `run` is one forward.

    The last feature stage comes first, then the layers that were called last. Where a layer
    returns tokens, the first norm of its last block comes before it: behind that norm, a head may
    read the class token only.
    """
    calls = _record(index, run)
    try:
        stage = [target.name for target in match("stage:-1", index) if target.name in calls]
    except NoMatchError:  # the model declares no stages
        stage = []
    trunk = [name for name in reversed(calls) if name and calls[name].has_features]
    trunk.sort(key=lambda name: any(calls[n].is_point for n in _parents(name) if n in calls))
    seen: set[str] = set()
    for name in [*stage, *trunk]:
        called, block, norms = calls[name], name, []
        if not called.is_map:
            block = _last_block(index, calls, name)
            inside = [n for n in calls if _is_inside(n, block)]
            norms = [n for n in inside if calls[n].is_norm and calls[n].is_tokens]
        own = [norm for norm in norms if norm.rpartition(".")[0] == block]
        for found in [*own, *([name] if called.is_spatial else []), *norms]:
            if found not in seen:
                seen.add(found)
                yield found


def _record(index: Index, run: Callable[[], Any]) -> dict[str, _Called]:
    """The layers that one forward without gradients calls, in the order in which they end."""
    calls: dict[str, _Called] = {}
    handles = []

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            calls.pop(name, None)
            calls[name] = _Called(module, tuple(getattr(output, "shape", ())))

        return hook

    try:
        for name, target in index.modules.items():
            if name == target.name and not isinstance(target.module, torch.jit.ScriptModule):
                handles.append(target.module.register_forward_hook(hook_of(name)))
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _is_inside(name: str, block: str) -> bool:
    return not block or name.startswith(f"{block}.")


def _last_block(index: Index, calls: Mapping[str, _Called], name: str) -> str:
    """The last block of a layer; the layer itself if it has none.

    A block is a member of a container and holds a norm.
    """
    norms = [n for n in calls if calls[n].is_norm]
    blocks = [
        inner
        for inner in calls
        if _is_inside(inner, name)
        and isinstance(
            index.modules[inner.rpartition(".")[0]].module, nn.Sequential | nn.ModuleList
        )
        and any(_is_inside(n, inner) for n in norms)
    ]
    if not blocks:
        return name
    outermost = min(inner.count(".") for inner in blocks)
    return _last_block(index, calls, [b for b in blocks if b.count(".") == outermost][-1])
