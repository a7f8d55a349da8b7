"""Which layers of a model Grad-CAM can look at: what one forward shows, the best ones first."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..selectors.index import Index, NoMatchError
from ..selectors.select import match

_NO_FEATURES = re.compile("Norm|Pool|Permute|Transpose|Flatten|Drop|Identity")
_STAGES = 8


class Called(NamedTuple):
    """A layer in its last call: its type, and the shape of what it gave, or () of no tensor."""

    module: nn.Module
    shape: tuple[int, ...]

    @property
    def is_map(self) -> bool:
        """Whether it gives four axes, and not single points in one of the two orders."""
        s = self.shape
        return len(s) == 4 and s[2:] != (1, 1) and s[1:3] != (1, 1)

    @property
    def is_tokens(self) -> bool:
        """Whether it gives three axes."""
        return len(self.shape) == 3 and self.shape[1] > 1

    @property
    def is_norm(self) -> bool:
        """Whether it is a norm of tokens or maps, by the name of its class."""
        return "Norm" in type(self.module).__name__ and (self.is_map or self.is_tokens)


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

    The last feature stage comes first, then the ones before it; for models that tell of no stages,
    the last layers called that give maps or tokens and lie in no part that gives something else.
    Of tokens it is the first norm in the last block: behind it, the head may read no other token
    than the class token.
    """
    order: dict[str, None] = {}
    for name in (*_stages(index, calls), *_trunk(calls)):
        called = calls[name]
        if not called.is_map:
            block = _last_block(index, calls, name)
            order.update(dict.fromkeys(n for n in _inside(calls, block) if calls[n].is_norm))
        if called.is_map or called.is_tokens:
            order[name] = None
    return list(order)


def _stages(index: Index, calls: Mapping[str, Called]) -> Iterator[str]:
    for number in range(1, _STAGES + 1):
        try:
            name = match(f"stage:-{number}", index)[0].name
        except NoMatchError:
            return
        if name in calls:
            yield name


def _trunk(calls: dict[str, Called]) -> list[str]:
    """Layers with features, the last one first; before all others those around which all have."""
    names = [name for name in reversed(calls) if name and _has_features(calls[name])]
    return sorted(names, key=lambda name: not all(map(_spatial, _around(calls, name))))


def _has_features(called: Called) -> bool:
    named_so = _NO_FEATURES.search(type(called.module).__name__)
    return _spatial(called) and not (named_so and not called.module._modules)


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
        and any(calls[n].is_norm for n in _inside(calls, inner))
    ]
    if not blocks:
        return name
    outermost = min(inner.count(".") for inner in blocks)
    return _last_block(index, calls, [b for b in blocks if b.count(".") == outermost][-1])


def _parent(index: Index, name: str) -> nn.Module:
    return index.modules[name.rpartition(".")[0]].module
