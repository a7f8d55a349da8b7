"""The layer that Grad-CAM looks at: its activations, the gradient there, and the default layer."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..planning.recording import LayerCalls
from ..selectors.index import Index, NoMatchError, Target
from ..selectors.select import match
from ..sites.site import Site
from ..tables import shown
from .once import Once

_NO_FEATURES = re.compile("Norm|Pool|Permute|Transpose|Flatten|Drop|Identity")  # without layers


class LastMap(Once):
    """Keeps the last output of a layer with its graph, from which its channels are read."""

    whole: ClassVar[bool] = False
    channelwise: ClassVar[bool] = True
    spatial: ClassVar[int | None] = 2
    caller: ClassVar[str] = "gradcam"


def features(site: Site, images: int) -> tuple[Tensor, Tensor]:
    """The activations (N, C, h, w) and their gradient that a `LastMap` has kept, at least float32.

    A layer that has no map, is not called, or gets no gradient raises a SiteError.
    """
    calls = site.bound.result()
    if not calls:
        raise site.error("it is never called in this forward")
    value, grad = calls[-1].value.detach(), calls[-1].grad
    if grad is None:
        raise site.error(
            "its output does not reach the scores: it is not used, or cut off by detach() or "
            "no_grad()"
        )
    try:
        view = site.reader.last or site.reader.view(calls[-1].value)
    except ValueError as error:
        raise site.error(error) from None
    wide = torch.promote_types(value.dtype, torch.float32)
    x, grad = view.take(value).to(wide), view.take(grad).to(wide)
    if x.shape[2:] == (1, 1) or len(x) != images:
        raise site.error(
            f"it must give a map of several positions for each of {images} images, got "
            f"{len(x)} of {shown(tuple(x.shape[2:]))}"
        )
    if not (x.isfinite().all() and grad.isfinite().all()):
        raise site.error("its output, or the gradient there, holds NaN or Inf")
    if not grad.any():
        raise site.error(
            "the gradient is 0 at all places of its map: the scores do not depend on it (a head "
            "that reads the class token only, or with weights of 0? saturated units?)"
        )
    return x, grad


def default_layers(names: Index, calls: Mapping[str, LayerCalls], output: Any) -> list[str]:
    """The names of the layers that Grad-CAM may use if none is named, the best first.

    The last feature stage comes first, then the layers that were called last. Where a layer
    returns tokens, the first norm of its last block comes before it: behind that norm, a head may
    read the class token only. Maps with the channels of an output map come last: segmentation
    models return them resized.

    `calls` and `output` come from the same forward.
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
    return list(dict.fromkeys(found))


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
