"""Feature stages, as timm's ``feature_info`` names them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..quoting import listed, quote, shorten
from .index import Index, NoMatchError, Target
from .wrappers import attribute_of, bare_type

_DIGITS = 20
_CONTAINERS = ("stages", "layers", "blocks", "levels")


@dataclass(frozen=True)
class Stage:
    """One entry of ``feature_info``."""

    host: str
    """The module that has it, with a dot behind; nothing for the model itself."""
    local: str
    stride: int | None
    channels: int | None

    @property
    def name(self) -> str:
        """The full name of its module."""
        return self.host + self.local


def stage_target(index: Index, kind: str, text: str) -> Target:
    """The last layer called in a stage, by number (``"stage"``) or reduction (``"stride"``)."""
    try:
        number = int(text) if len(text) < _DIGITS else None
    except ValueError:
        number = None
    if number is None:
        raise NoMatchError(f"{kind}: takes an integer, got {quote(text)}")
    stages = stages_of(index)
    if number < 0:  # timm prunes what no output of features_only needs
        stages = _kept(index, stages)
    stage = _numbered(stages, number) if kind == "stage" else _strided(stages, number)
    return index.modules[[*_with_inner(index, _existing(index, stages, stage))][-1]]


def stage_module(index: Index, number: int) -> str:
    """The name of the module that holds a stage."""
    stages = stages_of(index)
    return _existing(index, stages, _numbered(stages, number))


def stage_channels(index: Index) -> dict[str, int]:
    """The channels of every stage of the model, by the names of the layers that end it."""
    channels: dict[str, int] = {}
    stages = _known_stages(index)
    for stage in stages:
        name = _find(index, stages, stage)
        if name is not None and stage.channels is not None:
            ends = [index.modules[end].name for end in _with_inner(index, name)]
            channels.update(dict.fromkeys(ends, stage.channels))
    return channels


def stage_ratios(index: Index) -> tuple[int, ...]:
    """By what the maps of the stages are smaller than those of the first one."""
    strides = [stage.stride for stage in _known_stages(index) if stage.stride]
    first = min(strides, default=1)
    return tuple(stride // first for stride in strides if stride % first == 0)


def _known_stages(index: Index) -> list[Stage]:
    try:
        return stages_of(index)
    except NoMatchError:
        return []


def _kept(index: Index, stages: list[Stage]) -> list[Stage]:
    """The stages up to the last one that the model has."""
    for end in range(len(stages), 0, -1):
        if _find(index, stages, stages[end - 1]) is not None:
            return stages[:end]
    return stages


def _numbered(stages: list[Stage], number: int) -> Stage:
    if not -len(stages) <= number < len(stages):
        known = shorten(", ".join(f"{i}: {stage.name}" for i, stage in enumerate(stages)))
        raise NoMatchError(f"stage {number} is not among the {len(stages)} stages ({known})")
    return stages[number]


def _strided(stages: list[Stage], stride: int) -> Stage:
    found = [stage for stage in stages if stage.stride == stride]
    if not found:
        known = shorten(", ".join(f"{stage.stride}: {stage.name}" for stage in stages))
        raise NoMatchError(f"no stage has stride {stride} ({known})")
    return found[-1]


def _with_inner(index: Index, name: str) -> Iterator[str]:
    """A stage and what ends it inside plain containers, the last of which is sure to be called.

    Containers can be passed by: checkpointing loops over their children.
    """
    yield name
    module = index.modules[name].module
    while bare_type(module) in (nn.Sequential, nn.ModuleList) and module._modules:
        name = f"{name}.{list(module._modules)[-1]}"
        module = index.modules[name].module
        yield name


def _existing(index: Index, stages: list[Stage], stage: Stage) -> str:
    found = _find(index, stages, stage)
    if found is None:
        host = index.modules[stage.host.rstrip(".")].module
        raise NoMatchError(
            f"feature_info names {quote(stage.name)}, which the model does not have; name a layer "
            f"(it has {_layers(host)})"
        )
    return found


def _find(index: Index, stages: list[Stage], stage: Stage) -> str | None:
    """The module that an entry means, by the first of these rules that finds one.

    1. The module of this name; in timm's ``features_only`` models ``stages.3`` is ``stages_3``.
    2. The only module elsewhere whose name ends so (``blocks.3`` in ``encoder.blocks.3``).
    3. For ``block.3``: child 3 of ``blocks``, or of another container of stages, which has as many
       children as there are such entries.
    """
    if stage.name in index.modules:
        return stage.name
    flat = [name for name in index.modules if _flat(name) == _flat(stage.name)]
    if len(flat) == 1:
        return flat[0]
    inside = [n for n in index.modules if n.startswith(stage.host) and _ends(n, stage.local)]
    if len(inside) == 1:
        return inside[0]
    parent, _, number = stage.local.rpartition(".")
    siblings = [s for s in stages if s.local.rpartition(".")[0] == parent]
    if parent and number.isdigit():
        below = list(index.modules[stage.host.rstrip(".")].module._modules)
        inner = f"{stage.host}{below[0]}." if len(below) == 1 else stage.host  # it wraps another
        for container in (f"{parent}s", *_CONTAINERS):
            target = index.modules.get(inner + container)
            if target is not None and len(list(target.module.children())) == len(siblings):
                return f"{inner}{container}.{number}"
    return None


def _flat(name: str) -> str:
    """A name as timm's ``features_only`` models write it: without dots."""
    return name.replace(".", "_")


def _ends(name: str, local: str) -> bool:
    """Whether a name ends in whole components of another."""
    return f".{name}".endswith((f".{local}", f".{_flat(local)}"))


def _host(index: Index) -> str:
    """The only outermost submodule that has ``feature_info``."""
    targets = index.modules.values()
    hosts = list(dict.fromkeys(t.name for t in targets if _entries(t.module) is not None))
    outer = [
        host
        for host in hosts
        if not any(other == "" or host.startswith(f"{other}.") for other in hosts if other != host)
    ]
    if len(outer) == 1:
        return outer[0]
    if not outer:
        raise NoMatchError(
            "stages come from timm's feature_info, and no module has it; name the layers "
            f"({_layers(index.model)})"
        )
    raise NoMatchError(
        "stages come from timm's feature_info, and several submodules have it: "
        f"{shorten(', '.join(outer))}; name the layers, or root="
    )


def _layers(model: nn.Module) -> str:
    return shorten(listed((name for name, _ in model.named_children()), 12))


def stages_of(index: Index) -> list[Stage]:
    """The stages of the model.

    Raises:
        NoMatchError: where it has no ``feature_info``, or several of its parts do.
    """
    host = _host(index)
    entries = _entries(index.modules[host].module) or []
    prefix = f"{host}." if host else ""
    return [
        Stage(prefix, e["module"] or "(no layer)", e.get("reduction"), e.get("num_chs"))
        for e in entries
        if "module" in e
    ]


def _entries(module: nn.Module) -> list[dict[str, Any]] | None:
    """The entries of ``feature_info``; timm's blocks have a method of that name."""
    info = attribute_of(module, "feature_info")
    info = getattr(info, "info", info)
    return info if isinstance(info, list) else None
