"""Feature stages, as timm's ``feature_info`` lists them."""

import re
from typing import Any, NamedTuple

from torch import nn

from .._torch import children_of
from ..quoting import listed, quote, shorten
from .index import Index, NoMatchError, Target
from .wrappers import bare_type

_CONTAINERS = ("stages", "layers", "blocks", "levels")


class Stage(NamedTuple):  # one entry of ``feature_info``
    stated: str  # the name that it gives
    ends: list[str]  # the stage and the last layers in it; none if the model does not have it
    stride: int | None  # of the image, between two positions of its map
    channels: int | None


def stage_target(index: Index, kind: str, text: str, whole: bool = False) -> Target:
    """The last layer of a stage, or the `whole`; it is given by ``"stage"`` or by ``"stride"``."""
    if not re.fullmatch(r"-?\d{1,9}", text):
        raise NoMatchError(f"{kind}: takes an integer, got {quote(text)}")
    stages, number = _stages(index), int(text)
    found = [each for each in stages if each.stride == number]
    if kind == "stage":
        found = stages[number:][:1] if -len(stages) <= number < len(stages) else []
    if not found:
        known = [f"{i}: {each.stated}, stride {each.stride}" for i, each in enumerate(stages)]
        hint = shorten("; ".join(known))
        raise NoMatchError(f"{kind}:{number} is no stage of the model ({hint})")
    stated, ends, *_ = found[-1]
    if not ends:
        raise NoMatchError(f"feature_info names {quote(stated)}, which the model does not have")
    return index.modules[ends[0 if whole else -1]]


def stage_channels(index: Index) -> dict[str, int | None]:
    """The channels of every stage, by the names of the layers that end it; of other models none."""
    try:
        stages = _stages(index)
    except NoMatchError:
        return {}
    return {index.modules[end].name: each.channels for each in stages for end in each.ends}


def _stages(index: Index) -> list[Stage]:
    """The stages of a model; NoMatchError for one without ``feature_info``, or with several."""
    hosts: list[str] = []  # the outermost modules that have it, as names in them begin
    for name, target in index.modules.items():  # parents come first
        inside = name.startswith(tuple(hosts))
        if name == target.name and not inside and _entries(target.module) is not None:
            hosts.append(f"{name}." if name else "")
    if len(hosts) != 1:
        several = listed((host[:-1] for host in hosts), 12)
        found = f"several submodules have it: {several}" if hosts else "no module has it"
        cure = f"name the layers ({listed(children_of(index.model), 12)}), or give root="
        raise NoMatchError(f"stages come from timm's feature_info, and {found}; {cure}")
    (host,) = hosts
    entries = [e for e in _entries(index.modules[host[:-1]].module) or [] if "module" in e]
    names = [e["module"] or "(no layer)" for e in entries]
    ends = (_ends(index, _find(index, host, names, name)) for name in names)
    return [
        Stage(host + name, found, entry.get("reduction"), entry.get("num_chs"))
        for name, found, entry in zip(names, ends, entries, strict=True)
    ]


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
    pattern = re.compile(re.escape(prefix) + r"(.*\.)?" + spelled)
    found = [name for name in index.modules if pattern.fullmatch(name)]
    if len(found) == 1:
        return found[0]
    parent, _, number = local.rpartition(".")
    children = list(children_of(index.modules[prefix[:-1]].module))
    inner = f"{prefix}{children[0]}." if len(children) == 1 else prefix  # it wraps another model
    n = sum(name.rpartition(".")[0] == parent for name in names)
    for container in (f"{parent}s", *_CONTAINERS) if parent and number.isdigit() else ():
        target = index.modules.get(inner + container)
        if target is not None and len(children_of(target.module)) == n:
            return f"{inner}{container}.{number}"
    return None


def _ends(index: Index, name: str | None) -> list[str]:
    """A stage and the last layers in plain containers, whose children models may loop over."""
    found = [] if name is None else [name]
    while found:
        module = index.modules[found[-1]].module
        if bare_type(module) not in (nn.Sequential, nn.ModuleList) or not children_of(module):
            break
        found.append(f"{found[-1]}.{list(children_of(module))[-1]}")
    return found
