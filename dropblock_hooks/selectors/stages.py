"""Feature stages, as timm's ``feature_info`` lists them."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ..quoting import listed, quote, shorten
from .index import Index, NoMatchError, Target
from .wrappers import bare_type

_CONTAINERS = ("stages", "layers", "blocks", "levels")


class Stage(NamedTuple):
    """One entry of ``feature_info``."""

    stated: str  # the name that it gives
    name: str | None  # of its module, if the model has it
    stride: int | None  # of the image, between two positions of its map
    channels: int | None


def stage_target(index: Index, kind: str, text: str, whole: bool = False) -> Target:
    """The last layer of a stage, or the `whole`; it is given by ``"stage"`` or by ``"stride"``."""
    if not re.fullmatch(r"-?\d{1,9}", text):
        raise NoMatchError(f"{kind}: takes an integer, got {quote(text)}")
    stages, number = _stages(index), int(text)
    while number < 0 and len(stages) > 1 and stages[-1].name is None:
        stages.pop()  # features_only removes the stages that no output needs
    n = len(stages)
    given = [(i, i - n) if kind == "stage" else (stages[i].stride,) for i in range(n)]
    found = [stages[i] for i in range(n) if number in given[i]]
    if not found:
        known = [f"{i}: {each.stated}, stride {each.stride}" for i, each in enumerate(stages)]
        hint = shorten("; ".join(known))
        raise NoMatchError(f"{kind}:{number} is no stage of the model ({hint})")
    stated, name, *_ = found[-1]
    if name is None:
        raise NoMatchError(f"feature_info names {quote(stated)}, which the model does not have")
    return index.modules[name if whole else [*_ends(index, name)][-1]]


def stage_channels(index: Index) -> dict[str, int]:
    """The channels of every stage, by the names of the layers that end it; of other models none."""
    try:
        stages = _stages(index)
    except NoMatchError:
        return {}
    return {
        index.modules[end].name: stage.channels
        for stage in stages
        if stage.name is not None and stage.channels is not None
        for end in _ends(index, stage.name)
    }


def _stages(index: Index) -> list[Stage]:
    """The stages of a model; NoMatchError for one without ``feature_info``, or with several."""
    host = _host(index)
    entries = [e for e in _entries(index.modules[host].module) or [] if "module" in e]
    names = [e["module"] or "(no layer)" for e in entries]
    prefix = f"{host}." if host else ""
    places = (_find(index, prefix, names, name) for name in names)
    return [
        Stage(prefix + name, place, entry.get("reduction"), entry.get("num_chs"))
        for name, place, entry in zip(names, places, entries, strict=True)
    ]


def _host(index: Index) -> str:
    """The only outermost submodule that has ``feature_info``."""
    outer: list[str] = []
    for name, target in index.modules.items():  # parents come first
        inside = name.startswith(tuple(f"{host}." if host else "" for host in outer))
        if name == target.name and not inside and _entries(target.module) is not None:
            outer.append(name)
    if len(outer) != 1:
        found = f"several submodules have it: {listed(outer, 12)}" if outer else "no module has it"
        layers = listed(index.model._modules, 12)
        cure = f"name the layers ({layers}), or give root="
        raise NoMatchError(f"stages come from timm's feature_info, and {found}; {cure}")
    return outer[0]


def _entries(module: nn.Module) -> list[dict[str, Any]] | None:
    """The entries of ``feature_info``; timm's blocks have a method of that name."""
    info = getattr(module, "feature_info", None)
    info = getattr(info, "info", info)
    return info if isinstance(info, list) else None


def _find(index: Index, prefix: str, names: list[str], local: str) -> str | None:
    """The module of an entry, by the first of these rules that finds one.

    1. The module of this name; in ``features_only`` models ``stages.3`` is ``stages_3``.
    2. The only module of the host whose name ends so (``blocks.3`` in ``encoder.blocks.3``).
    3. For ``block.3``: child 3 of ``blocks``, or of another container of stages, which has as many
       children as there are such entries.
    """
    if prefix + local in index.modules:
        return prefix + local
    spelled = "[._]".join(map(re.escape, re.split("[._]", local)))
    for inside in ("", r".*\."):
        pattern = re.compile(re.escape(prefix) + inside + spelled)
        found = [name for name in index.modules if pattern.fullmatch(name)]
        if len(found) == 1:
            return found[0]
    parent, _, number = local.rpartition(".")
    if not parent or not number.isdigit():
        return None
    children = list(index.modules[prefix[:-1]].module._modules)
    inner = f"{prefix}{children[0]}." if len(children) == 1 else prefix  # it wraps another model
    n = sum(name.rpartition(".")[0] == parent for name in names)
    for container in (f"{parent}s", *_CONTAINERS):
        target = index.modules.get(inner + container)
        if target is not None and len(target.module._modules) == n:
            return f"{inner}{container}.{number}"
    return None


def _ends(index: Index, name: str) -> Iterator[str]:
    """A stage and the last layers inside plain containers; the last of these is always called.

    A container may not be called: with checkpointing, models loop over its children.
    """
    yield name
    module = index.modules[name].module
    while bare_type(module) in (nn.Sequential, nn.ModuleList) and module._modules:
        name = f"{name}.{list(module._modules)[-1]}"
        module = index.modules[name].module
        yield name
