"""The forwards of Grad-CAM: activations and gradients of one layer, and the default layer."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..axes.facts import ModelFacts
from ..axes.grids import Grids
from ..axes.options import AxisOptions
from ..axes.reader import Reader
from ..axes.view import NAMELESS, View
from ..checkpointing import NO_TASK, graph_task
from ..planning.dry_run import arguments_of
from ..quoting import quote
from ..selectors.index import Index, NoMatchError, Target
from ..selectors.select import match
from ..sites import indexing
from ..tables import shown

_NO_FEATURES = re.compile("Norm|Pool|Permute|Transpose|Flatten|Drop|Identity")
MAP, TOKENS, POINT = "map", "tokens", "point"


class UnfitLayer(ValueError):
    """Grad-CAM cannot use this layer."""


class Features(NamedTuple):
    """The activations (N, C, h, w) of one layer and their gradient, in float32 or wider."""

    features: Tensor
    gradient: Tensor


class Forwards:
    """Runs a model on the same images, as often as needed.

    Args:
        names: of the model.
        x: the argument of the model. Tensors are copied.
        scores: computes the scores of the images from the output.
        options: how the user says that axes are to be read.
        element: which element of a layer's output with several tensors.
    """

    def __init__(
        self,
        names: Index,
        x: Any,
        scores: Callable[[Any], Tensor],
        options: AxisOptions,
        element: int | str | None,
    ) -> None:
        self.names, self._scores = names, scores
        self._options, self._element = options, element
        args, kwargs = arguments_of(x)
        self._args = [_copied(value) for value in args]
        self._kwargs = {key: _copied(value) for key, value in kwargs.items()}
        self._facts = ModelFacts(names)

    def run(self) -> Any:
        """The output of one forward."""
        return self.names.model(*self._args, **self._kwargs)

    def features(self, layer: Target) -> Features:
        """The activations of a layer, and the gradient of the summed scores there.

        Raises:
            UnfitLayer: if the layer has no map, is not called, or gets no gradient.
        """
        facts, grids = self._facts.of(layer, "output"), Grids()
        reader = Reader(self._options, facts, grids, spatial=2, index=self._element)
        root = _Root(layer, reader, self._element)
        handle = layer.module.register_forward_hook(root)
        try:
            if reader.needs_grids:
                grids.watch(self.names.model)
            scores = self._scores(self.run())
        finally:
            handle.remove()
            grids.unwatch(self.names.model)
        return root.features(scores)


class _Root:
    """Forward hook that makes the output of a layer the root of the autograd graph.

    No layer before it needs a gradient. The layers behind it get a copy, which they may change in
    place. If the layer is called several times, the last call counts.
    """

    def __init__(self, layer: Target, reader: Reader, element: int | str | None) -> None:
        self.layer, self.reader, self.element = layer, reader, element
        self.root: Tensor | None = None
        self.view: View = NAMELESS

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        try:
            x = indexing.get(output, self.element)
        except ValueError as error:
            raise self.unfit(f"its output {error}") from None
        with torch.enable_grad():
            root = x.detach().clone().requires_grad_()
            copied = root.clone()
        if graph_task() == NO_TASK:  # a recomputation needs the same graph and nothing else
            try:
                self.view = self.reader.view(x)
            except ValueError as error:
                raise self.unfit(f"its output has no map: {error}") from None
            self.root = root
        return indexing.put(output, self.element, copied)

    def unfit(self, why: str) -> UnfitLayer:
        """The error that says why this layer cannot be used."""
        return UnfitLayer(f"layer {quote(self.layer.name or '.')}: {why}")

    def features(self, scores: Tensor) -> Features:
        """The activations, and the gradient of the summed scores."""
        if self.root is None:
            raise self.unfit("it is never called in this forward")
        gradient = None
        if scores.requires_grad:
            (gradient,) = torch.autograd.grad(scores.sum(), self.root, allow_unused=True)
        if gradient is None:
            raise self.unfit(
                "its output does not reach the scores: it is not used, or cut off by detach() or "
                "no_grad()"
            )
        wide = torch.promote_types(self.root.dtype, torch.float32)
        x, grad = (self.view.take(each).to(wide) for each in (self.root.detach(), gradient))
        size = tuple(x.shape[2:])
        if size == (1, 1):
            raise self.unfit("its map is 1x1, which has no positions to compare")
        if len(x) != len(scores):
            raise self.unfit(f"its maps are {len(x)}, of {len(scores)} images: parts of them")
        if not (x.isfinite().all() and grad.isfinite().all()):
            raise self.unfit("its output, or the gradient there, holds NaN or Inf")
        if not grad.any():
            raise self.unfit(
                f"the gradient is 0 at all its tokens but the first {self.view.prefix}: the "
                "layers behind read no token of the map"
                if gradient.any()
                else f"the gradient is 0 at all places of its {shown(size)} map: the scores do "
                "not depend on it (a head with weights of 0? dead or saturated units behind it?)"
            )
        return Features(x, grad)


def default_layers(forwards: Forwards) -> Iterator[str]:
    """The layers that Grad-CAM may use if none is named, the best first.

    The last feature stage comes first, then the layers that were called last. Where a layer
    returns tokens, the first norm of its last block comes before it: behind that norm, a head may
    read the class token only.
    """
    modules = forwards.names.modules
    kinds = _kinds(forwards)
    try:
        stage = [target.name for target in match("stage:-1", forwards.names)]
    except NoMatchError:  # the model declares no stages
        stage = []
    trunk = [name for name in reversed(kinds) if name and _has_features(modules[name].module)]
    trunk.sort(key=lambda name: any(kinds.get(parent) == POINT for parent in _parents(name)))
    norms = [name for name, kind in kinds.items() if kind == TOKENS and _is_norm(modules, name)]
    found: list[str] = []
    for name in (*stage, *trunk):
        if kinds.get(name) != MAP:
            found += _of_last_block([norm for norm in norms if norm.startswith(f"{name}.")])
        if kinds.get(name) in (MAP, TOKENS):
            found.append(name)
    return iter(dict.fromkeys(found))


def _is_norm(modules: dict[str, Target], name: str) -> bool:
    """Whether a layer is a norm of a block, which is a member of a container."""
    container = name.rpartition(".")[0].rpartition(".")[0]
    is_norm = "Norm" in type(modules[name].module).__name__
    return is_norm and isinstance(modules[container].module, nn.Sequential | nn.ModuleList)


def _of_last_block(norms: list[str]) -> list[str]:
    """The norms of the last block, of norms in the order of their calls."""
    depth = min((norm.count(".") for norm in norms), default=0)
    blocks = [norm.rpartition(".")[0] for norm in norms if norm.count(".") == depth]
    return [norm for norm in norms if norm.rpartition(".")[0] in blocks[-1:]]


def _kinds(forwards: Forwards) -> dict[str, str]:
    """What the layers return, by name, in the order in which their last calls end."""
    kinds: dict[str, str] = {}
    handles = []

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            kinds.pop(name, None)
            kinds[name] = _kind(tuple(getattr(output, "shape", ())))

        return hook

    try:
        for name, target in forwards.names.modules.items():
            if name == target.name:
                handles.append(target.module.register_forward_hook(hook_of(name)))
        with torch.no_grad():
            forwards.run()
    finally:
        for handle in handles:
            handle.remove()
    return kinds


def _kind(shape: tuple[int, ...]) -> str:
    """What a tensor of this shape holds: a map, a map of one position, or tokens."""
    if len(shape) == 4:
        return POINT if (1, 1) in (shape[2:], shape[1:3]) else MAP
    return TOKENS if len(shape) == 3 and shape[1] > 1 else ""


def _has_features(module: nn.Module) -> bool:
    """Whether a layer is more than a norm, a pooling or a reshape."""
    return bool(module._modules) or not _NO_FEATURES.search(type(module).__name__)


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _copied(value: Any) -> Any:
    """A copy of a tensor of which a graph is kept: it tells how axes are ordered."""
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    return copied.requires_grad_().clone() if copied.is_floating_point() else copied
