"""The layer that Grad-CAM looks at: its activations, the gradient there, and the default layer."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from ..axes.reader import Reader
from ..axes.view import NAMELESS
from ..checkpointing import NO_TASK, graph_task
from ..planning.recording import LayerCalls
from ..selectors.index import Index, NoMatchError, Target
from ..selectors.select import match
from ..selectors.wrappers import bare_type
from ..sites import indexing
from ..tables import shown

_NO_FEATURES = re.compile("Norm|Pool|Permute|Transpose|Flatten|Drop|Identity")  # without layers


class Features(NamedTuple):
    """The activations (N, C, h, w) of one layer and their gradient, in float32 or wider."""

    features: Tensor
    gradient: Tensor


class FeatureHook:
    """Forward hook of a layer: keeps the output of its last call, for the gradient there.

    Attributes:
        edge: the place of the output in the autograd graph; None if it can't get a gradient.
        gradient: its gradient; None if the scores do not depend on the output.
    """

    def __init__(self, layer: Target, reader: Reader, index: int | str | None) -> None:
        self.layer, self._reader, self._index = layer, reader, index
        self.edge: GradientEdge | None = None
        self.gradient: Tensor | None = None
        self._value = torch.empty(0)
        self._why = "it is never called in this forward"

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if graph_task() != NO_TASK:
            return None  # a checkpoint recomputes the layer
        self.edge = None
        self._why = "its output does not reach the scores: it is not used, or cut off by detach()"
        try:
            x = indexing.get(output, self._index)
        except ValueError as error:
            self._why = f"the output {error}"
            return None
        if not torch.is_grad_enabled():
            return None
        try:
            self._reader.view(x)
        except ValueError as error:
            self._why = str(error)
            return None
        self._value = x.detach().clone()
        # the layers behind may change the copy in place
        copied = (x if x.requires_grad else x.detach().requires_grad_()).clone()
        self.edge = get_gradient_edge(copied)
        return indexing.put(output, self._index, copied)

    def features(self, images: int) -> Features:
        """The last activations and their gradient, or a ValueError that says why not."""
        if self.gradient is None:
            raise self._error(self._why)
        view = self._reader.last or NAMELESS
        wide = torch.promote_types(self._value.dtype, torch.float32)
        x, grad = view.take(self._value).to(wide), view.take(self.gradient).to(wide)
        if x.shape[2:] == (1, 1) or len(x) != images:
            raise self._error(
                f"it must give a map of several positions for each of {images} images, got "
                f"{len(x)} of {shown(tuple(x.shape[2:]))}"
            )
        if not (x.isfinite().all() and grad.isfinite().all()):
            raise self._error("its output, or the gradient there, holds NaN or Inf")
        if not grad.any():
            raise self._error(
                "the gradient is 0 at all places of its map: the scores do not depend on it (a "
                "head that reads the class token only, or with weights of 0? saturated units?)"
            )
        return Features(x, grad)

    def _error(self, cause: str) -> ValueError:
        kind, name = bare_type(self.layer.module).__name__, self.layer.name or "."
        return ValueError(f"gradcam on {kind} '{name}': {cause}")


def default_layers(names: Index, calls: Mapping[str, LayerCalls], output: Any) -> list[Target]:
    """The layers that Grad-CAM may use if none is named, the best first.

    The last feature stage comes first, then the layers that were called last. Where a layer
    returns tokens, the first norm of its last block comes before it: behind that norm, a head may
    read the class token only. Maps with the channels of an output map come last: they are what a
    segmentation model returns, before it is resized.

    `calls` and `output` are those of one forward.
    """
    modules = names.modules
    called = sorted((each.order, name) for name, each in calls.items() if each.calls)
    shapes = {
        name: calls[name].shape
        for _, name in called
        if name == modules[name].name and _has_places(calls[name].shape)
    }
    norms = [name for name, shape in shapes.items() if len(shape) == 3 and _is_norm(modules, name)]
    try:
        stage = [target.name for target in match("stage:-1", names)]
    except NoMatchError:  # the model declares no stages
        stage = []
    found: list[str] = []
    for name in (*stage, *reversed(shapes)):
        module = modules[name].module
        has_features = module._modules or not _NO_FEATURES.search(type(module).__name__)
        if name in stage or (name and has_features):
            if len(shapes.get(name, ())) != 4:
                found += _of_last_block([norm for norm in norms if norm.startswith(f"{name}.")])
            found += [name] if name in shapes else []
    maps = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim == 4]
    returned = {tuple(x.shape[:2]) for x in maps}
    found.sort(key=lambda name: shapes[name][:2] in returned)
    return [modules[name] for name in dict.fromkeys(found)]


def _has_places(shape: Any) -> bool:
    """Whether a tensor of this shape may be a map of several positions, or tokens."""
    if not isinstance(shape, tuple) or len(shape) not in (3, 4):
        return False
    return (1, 1) not in (shape[2:], shape[1:3]) and (len(shape) == 4 or shape[1] > 1)


def _is_norm(modules: Mapping[str, Target], name: str) -> bool:
    """Whether a layer is a norm of a block, which is a member of a container."""
    container = name.rpartition(".")[0].rpartition(".")[0]
    is_norm = "Norm" in type(modules[name].module).__name__
    return is_norm and isinstance(modules[container].module, nn.Sequential | nn.ModuleList)


def _of_last_block(norms: list[str]) -> list[str]:
    """The norms of the last block, of norms in the order of their calls."""
    depth = min((norm.count(".") for norm in norms), default=0)
    blocks = [norm.rpartition(".")[0] for norm in norms if norm.count(".") == depth]
    return [norm for norm in norms if norm.rpartition(".")[0] in blocks[-1:]]
