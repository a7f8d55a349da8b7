"""Which layers of a model Grad-CAM can look at: what one forward shows, the best ones first."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..selectors.index import Index, NoMatchError
from ..selectors.select import match

_NO_FEATURES = re.compile("Norm|Pool|Permute|Transpose|Flatten|Drop|Identity")


class Called(NamedTuple):
    """A layer in its last call: its type, and the shape of what it gave, or () of no tensor."""

    module: nn.Module
    shape: tuple[int, ...]

    @property
    def is_map(self) -> bool:
        """Whether it gives four axes, and more than one place, in either order."""
        return len(self.shape) == 4 and not self.is_point

    @property
    def is_point(self) -> bool:
        """Whether it gives maps of one place."""
        return len(self.shape) == 4 and (1, 1) in (self.shape[2:], self.shape[1:3])

    @property
    def is_tokens(self) -> bool:
        """Whether it gives three axes."""
        return len(self.shape) == 3 and self.shape[1] > 1


def calls_of(index: Index, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Called]:
    """One forward without gradients: the layers that it calls, in the order in which they end."""
    calls: dict[str, Called] = {}
    handles = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            calls.pop(name, None)
            calls[name] = Called(module, tuple(getattr(only_tensor(output), "shape", ())))

        return hook

    try:
        for target in {target.name: target for target in index.modules.values()}.values():
            if not isinstance(target.module, torch.jit.ScriptModule):  # which takes no hooks
                handles.append(target.module.register_forward_hook(note(target.name)))
        with torch.no_grad():
            index.model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def only_tensor(output: Any) -> Tensor | None:
    """The tensor itself, or the only floating-point one of a tuple, list or mapping."""
    if isinstance(output, Tensor):
        return output
    values = list(output.values()) if isinstance(output, Mapping) else output
    if not isinstance(values, tuple | list):
        return None
    found = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    return found[0] if len(found) == 1 else None


def candidates(index: Index, calls: dict[str, Called]) -> list[str]:
    """Names of layers, the best one first.

    The last feature stage comes first, then the layers called last that give maps or tokens. Of
    tokens it is the first norm in the last block: behind it, the head may read no other token than
    the class token.
    """
    order: dict[str, None] = {}
    for name in (*_last_stage(index, calls), *_trunk(calls)):
        called, block, norms = calls[name], name, []
        if not called.is_map:
            block = _last_block(index, calls, name)
            norms = [n for n in _inside(calls, block) if _is_norm(calls[n]) and calls[n].is_tokens]
        own = [norm for norm in norms if norm.rpartition(".")[0] == block]
        itself = [name] if _spatial(called) else []
        order.update(dict.fromkeys([*own, *itself, *norms]))
    return list(order)


def _last_stage(index: Index, calls: Mapping[str, Called]) -> list[str]:
    try:
        names = [target.name for target in match("stage:-1", index)]
    except NoMatchError:  # the model tells of no stages
        return []
    return [name for name in names if name in calls]


def _trunk(calls: dict[str, Called]) -> list[str]:
    """Layers with features, the last one first; at the end those in a part that ends in points."""
    names = [name for name in reversed(calls) if name and _has_features(calls[name])]
    return sorted(names, key=lambda name: any(c.is_point for c in _around(calls, name)))


def _has_features(called: Called) -> bool:
    named_so = _NO_FEATURES.search(type(called.module).__name__)
    return _spatial(called) and not (named_so and not called.module._modules)


def _is_norm(called: Called) -> bool:
    return "Norm" in type(called.module).__name__ and _spatial(called)


def _spatial(called: Called) -> bool:
    return called.is_map or called.is_tokens


def _around(calls: Mapping[str, Called], name: str) -> Iterator[Called]:
    """The layers that a layer lies in, but for the model itself, as far as they are called."""
    while name := name.rpartition(".")[0]:
        if name in calls:
            yield calls[name]


def _inside(calls: Mapping[str, Called], name: str) -> list[str]:
    return [inner for inner in calls if not name or inner.startswith(f"{name}.")]


def _last_block(index: Index, calls: Mapping[str, Called], name: str) -> str:
    """The last one of the blocks that a layer is made of; the layer itself where it has none.

    Blocks are members of a container, with a norm in them.
    """
    blocks = [
        inner
        for inner in _inside(calls, name)
        if isinstance(_parent(index, inner), nn.Sequential | nn.ModuleList)
        and any(_is_norm(calls[n]) for n in _inside(calls, inner))
    ]
    if not blocks:
        return name
    outermost = min(inner.count(".") for inner in blocks)
    return _last_block(index, calls, [b for b in blocks if b.count(".") == outermost][-1])


def _parent(index: Index, name: str) -> nn.Module:
    return index.modules[name.rpartition(".")[0]].module
