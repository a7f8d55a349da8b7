"""Reads the feature stages that timm's ``feature_info`` lists.

``select`` asks `stage_target` for the layer of a ``stage:`` selector. `ModelFacts` and `gradcam`
ask `stage_channels`, for the channels of each stage and for the name of the last layer.
"""

import re
from typing import Any, NamedTuple

from torch import nn

from .._torch import children_of
from ..quoting import listed, quote, shorten
from .index import Index, NoMatchError, Target
from .wrappers import bare_type

_CONTAINERS = ("stages", "layers", "blocks", "levels")


class Stage(NamedTuple):
    """An entry of ``feature_info``.

    Attributes:
        stated: the name in the entry.
        ends: the name of the stage and, if it is a plain container, of its last child, and so on
            inward; empty if the model does not have the stage. See `_ends`.
        stride: pixels of the image between two positions of the map.
        channels: the number of channels of the map.
    """

    stated: str
    ends: list[str]
    stride: int | None
    channels: int | None


def stage_target(index: Index, by: str, text: str, whole: bool = False) -> Target:
    """Return the target of a ``stage:`` or ``stride:`` selector.

    Args:
        index: the names of the model.
        by: ``"stage"``, or ``"stride"`` for the last stage with this stride.
        text: the number behind the colon.
        whole: True returns the stage itself, and False its last layer. The whole is needed to
            exclude a stage, and to select layers inside it by names or types.

    Raises:
        NoMatchError: if there is no such stage.
    """
    if not re.fullmatch(r"-?\d{1,9}", text):
        raise NoMatchError(f"{by}: takes an integer, got {quote(text)}")
    number = int(text)

    stages = _stages(index)
    if by == "stride":
        matches = [stage for stage in stages if stage.stride == number]
    elif -len(stages) <= number < len(stages):
        matches = [stages[number]]
    else:
        matches = []

    if not matches:
        known = [f"{i}: {stage.stated}, stride {stage.stride}" for i, stage in enumerate(stages)]
        hint = shorten("; ".join(known))
        raise NoMatchError(f"{by}:{number} is no stage of the model ({hint})")

    last = matches[-1]  # several stages may have the stride
    if not last.ends:
        name = quote(last.stated)
        raise NoMatchError(f"feature_info names {name}, which the model does not have")
    return index.modules[last.ends[0 if whole else -1]]


def stage_channels(index: Index) -> dict[str, int | None]:
    """Return the channels of each stage, by each name in `Stage.ends`."""
    try:
        stages = _stages(index)
    except NoMatchError:
        return {}

    channels: dict[str, int | None] = {}
    for stage in stages:
        for end in stage.ends:
            channels[index.modules[end].name] = stage.channels
    return channels


def _stages(index: Index) -> list[Stage]:
    """Return the stages of a model; NoMatchError if no module or several modules list stages."""
    prefix = _prefix_of_host(index)
    host = index.modules[prefix[:-1]].module
    entries = [entry for entry in _entries(host) or [] if "module" in entry]
    names = [entry["module"] or "(no layer)" for entry in entries]  # `_find` finds no such layer

    stages = []
    for name, entry in zip(names, entries, strict=True):
        module_name = _find(index, prefix, names, name)
        stage = Stage(
            stated=prefix + name,
            ends=_ends(index, module_name),
            stride=entry.get("reduction"),
            channels=entry.get("num_chs"),
        )
        stages.append(stage)
    return stages


def _prefix_of_host(index: Index) -> str:
    """Return the prefix of names in the outermost module with ``feature_info``.

    Raises:
        NoMatchError: if no module, or several modules, have ``feature_info``.
    """
    prefixes: list[str] = []
    for name, target in index.modules.items():  # parents come first
        is_alias = name != target.name
        is_inside = name.startswith(tuple(prefixes))
        if is_alias or is_inside:
            continue
        if _entries(target.module) is not None:
            prefix = f"{name}." if name else ""
            prefixes.append(prefix)

    if len(prefixes) != 1:
        hosts = listed((prefix[:-1] for prefix in prefixes), 12)
        problem = f"several submodules have it: {hosts}" if prefixes else "no module has it"
        cure = f"name the layers ({listed(children_of(index.model), 12)}), or give root="
        raise NoMatchError(f"stages come from timm's feature_info, and {problem}; {cure}")
    return prefixes[0]


def _entries(module: nn.Module) -> list[dict[str, Any]] | None:
    """Return the entries of ``feature_info``; None if there are none.

    In blocks of EfficientNet, ``feature_info`` is a method.
    """
    info = getattr(module, "feature_info", None)
    info = getattr(info, "info", info)  # of timm's class FeatureInfo, or the list itself
    return info if isinstance(info, list) else None


def _find(index: Index, prefix: str, names: list[str], local: str) -> str | None:
    """Return the module of an entry, by the first rule that finds a module.

    1. The module with this name.
    2. The only module of the host with this end of its name (``blocks.3`` in ``encoder.blocks.3``).
       An underscore counts as a dot, because in ``features_only`` models ``stages.3`` is
       ``stages_3``.
    3. For ``block.3``, child 3 of ``blocks`` or of another container of stages. The numbers of
       these entries must be those of the children, because entries may also count from 1.
    """
    if prefix + local in index.modules:
        return prefix + local

    spelled = "[._]".join(map(re.escape, re.split("[._]", local)))
    pattern = re.compile(re.escape(prefix) + r"(.*\.)?" + spelled)
    matches = [name for name in index.modules if pattern.fullmatch(name)]
    if len(matches) == 1:
        return matches[0]

    parent, _, number = local.rpartition(".")
    if not parent or not number.isdigit():
        return None
    start = f"{parent}."
    numbers = {name.removeprefix(start) for name in names if name.startswith(start)}
    container = _container_of(index, prefix, parent, numbers)
    return None if container is None else f"{container}.{number}"


def _container_of(index: Index, prefix: str, parent: str, numbers: set[str]) -> str | None:
    """Return the container of the stages whose entries have this parent, with these children."""
    children = list(children_of(index.modules[prefix[:-1]].module))
    if len(children) == 1:  # the host wraps another model
        prefix = f"{prefix}{children[0]}."

    for container in (f"{parent}s", *_CONTAINERS):
        target = index.modules.get(prefix + container)
        if target is not None and children_of(target.module).keys() == numbers:
            return prefix + container
    return None


def _ends(index: Index, name: str | None) -> list[str]:
    """Return a stage and, while it is a plain container, its last layer and the last one in that.

    A model may loop over a container, and then a hook on the container would never run.
    """
    if name is None:
        return []

    ends = [name]
    while True:
        module = index.modules[ends[-1]].module
        children = list(children_of(module))
        if bare_type(module) not in (nn.Sequential, nn.ModuleList) or not children:
            return ends
        ends.append(f"{ends[-1]}.{children[-1]}")
