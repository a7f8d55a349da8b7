"""The layers that Grad-CAM may look at if none is named."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..planning.recording import LayerCalls
from ..selectors.index import Index, NoMatchError
from ..selectors.select import match

_CONTAINERS = nn.Sequential, nn.ModuleList
_NO_FEATURES = re.compile("Norm|Pool|Permute|Transpose|Flatten|Drop|Identity")  # without layers


def default_layers(names: Index, calls: Mapping[str, LayerCalls], output: Any) -> list[str]:
    """The names of the layers that Grad-CAM may use if none is named, the best first.

    The last feature stage comes first, then the layers that were called last. Where a layer
    returns tokens, the first norm of its last block comes before it: behind that norm, a head may
    read the class token only. Maps with the channels of an output map come last: segmentation
    models return them resized.

    `calls` and `output` come from the same forward.
    """
    modules = {name: target.module for name, target in names.modules.items() if name == target.name}
    called = sorted((c.order, name) for name, c in calls.items() if c.calls and name in modules)
    shapes = {name: calls[name].shape for _, name in called if _has_places(calls[name].shape)}
    try:
        stage = [target.name for target in match("stage:-1", names)]
    except NoMatchError:  # the model declares no stages
        stage = []
    found: list[str] = []
    for name in (*stage, *reversed(shapes)):
        module = modules[name]
        has_features = module._modules or not _NO_FEATURES.search(type(module).__name__)
        if name in stage or (name and has_features):
            if len(shapes.get(name, ())) != 4:
                found += _norms_of_last_block(name, shapes, modules)
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


def _norms_of_last_block(
    name: str, shapes: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> list[str]:
    """The norms in the last block inside a layer that return tokens, in the order of their calls.

    A block is a member of a container.
    """
    norms: dict[str, list[str]] = {}
    for norm, shape in shapes.items():
        block = norm.rpartition(".")[0]
        container = modules.get(block.rpartition(".")[0])
        is_norm = len(shape) == 3 and "Norm" in type(modules[norm]).__name__
        if norm.startswith(f"{name}.") and is_norm and isinstance(container, _CONTAINERS):
            norms.setdefault(block, []).append(norm)
    outermost = min((block.count(".") for block in norms), default=0)
    blocks = [each for block, each in norms.items() if block.count(".") == outermost]
    return blocks[-1] if blocks else []
