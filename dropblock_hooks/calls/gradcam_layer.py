"""The layer that Grad-CAM looks at: its activations, the gradient there, and the default layer."""

import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..attachment.resolve import Placement
from ..axes.facts import ModelFacts
from ..axes.view import NAMELESS
from ..checkpointing import NO_TASK, graph_task
from ..selectors.index import Index, NoMatchError, Target
from ..selectors.select import match
from ..spec.spec import Entry
from ..tables import shown
from .once import EdgeHook, Once, call_once
from .scores import Scores

_NO_FEATURES = re.compile("Norm|Pool|Permute|Transpose|Flatten|Drop|Identity")
_MAP, _TOKENS, _POINT = "map", "tokens", "point"


class Features(NamedTuple):
    """The activations (N, C, h, w) of one layer and their gradient, in float32 or wider."""

    features: Tensor
    gradient: Tensor


class MapOnce(Once):
    """Keeps one tensor of a layer that holds maps, or tokens of maps."""

    spatial: ClassVar[int | None] = 2
    whole: ClassVar[bool] = False

    @property
    def label(self) -> str:
        return "gradcam"


class _MapHook(EdgeHook):
    """Reads the axes, and gives a copy to the layers behind, which they may change in place."""

    def watched(self, x: Tensor, at: int, ticket: Any) -> Tensor:
        if graph_task() == NO_TASK:
            self.site.form_of(x)
        return super().watched(x.clone(), at, ticket)


def features_of(
    names: Index, maps: MapOnce, run: Callable[[], Any], scores: Scores, layer: Target
) -> Features:
    """The activations of a layer in its last call, and the gradient of the summed scores there.

    `run` returns the output of the model, and `maps` says how that of the layer is read.

    Raises:
        SiteError: if the layer has no map, is not called, or gets no gradient.
    """
    facts = ModelFacts(names).of(layer, "output")
    placement = Placement(Entry(layer.name, (maps,)), (0, 0), layer, maps, facts)
    (site,) = call_once(
        names.model, [placement], run, lambda output: scores(output).sum(), _MapHook
    )
    records = site.bound.result()
    if not records:
        raise site.error("it is never called in this forward")
    value, gradient = records[-1].value, records[-1].grad
    if gradient is None:
        raise site.error(
            "its output does not reach the scores: it is not used, or cut off by detach() or "
            "no_grad()"
        )
    view = site.reader.last or NAMELESS
    wide = torch.promote_types(value.dtype, torch.float32)
    x, grad = view.take(value).to(wide), view.take(gradient).to(wide)
    size = tuple(x.shape[2:])
    if size == (1, 1):
        raise site.error("its map is 1x1, which has no positions to compare")
    if len(x) != scores.images:
        raise site.error(f"its maps are {len(x)}, of {scores.images} images: parts of them")
    if not (x.isfinite().all() and grad.isfinite().all()):
        raise site.error("its output, or the gradient there, holds NaN or Inf")
    if not grad.any():
        raise site.error(
            f"the gradient is 0 at all its tokens but the first {view.prefix}: the layers behind "
            "read no token of the map"
            if gradient.any()
            else f"the gradient is 0 at all places of its {shown(size)} map: the scores do not "
            "depend on it (a head with weights of 0? dead or saturated units behind it?)"
        )
    return Features(x, grad)


def default_layers(names: Index, run: Callable[[], Any]) -> list[str]:
    """The layers that Grad-CAM may use if none is named, the best first; `run` is one forward.

    The last feature stage comes first, then the layers that were called last. Where a layer
    returns tokens, the first norm of its last block comes before it: behind that norm, a head may
    read the class token only.
    """
    modules, kinds = names.modules, _kinds(names, run)
    try:
        stage = [target.name for target in match("stage:-1", names)]
    except NoMatchError:  # the model declares no stages
        stage = []
    trunk = [name for name in reversed(kinds) if name and _has_features(modules[name].module)]
    norms = [name for name, kind in kinds.items() if kind == _TOKENS and _is_norm(modules, name)]
    found: list[str] = []
    for name in (*stage, *trunk):
        if kinds.get(name) != _MAP:
            found += _of_last_block([norm for norm in norms if norm.startswith(f"{name}.")])
        if kinds.get(name) in (_MAP, _TOKENS):
            found.append(name)
    return list(dict.fromkeys(found))


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


def _kinds(names: Index, run: Callable[[], Any]) -> dict[str, str]:
    """What the layers return, by name, in the order in which their last calls end."""
    kinds: dict[str, str] = {}
    handles = []

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            kinds.pop(name, None)
            kinds[name] = _kind(tuple(getattr(output, "shape", ())))

        return hook

    try:
        for name, target in names.modules.items():
            if name == target.name:
                handles.append(target.module.register_forward_hook(hook_of(name)))
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return kinds


def _kind(shape: tuple[int, ...]) -> str:
    """What a tensor of this shape holds: a map, a map of one position, or tokens."""
    if len(shape) == 4:
        return _POINT if (1, 1) in (shape[2:], shape[1:3]) else _MAP
    return _TOKENS if len(shape) == 3 and shape[1] > 1 else ""


def _has_features(module: nn.Module) -> bool:
    """Whether a layer is more than a norm, a pooling or a reshape."""
    return bool(module._modules) or not _NO_FEATURES.search(type(module).__name__)
