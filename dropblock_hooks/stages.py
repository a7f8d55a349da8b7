"""Feature stages, as timm's ``feature_info`` names them."""

from __future__ import annotations

from typing import Any

from torch import nn

from .names import Index, NoMatchError, Target


def stage_target(index: Index, kind: str, text: str) -> Target:
    """The last layer called in a stage, by number (``"stage"``) or reduction (``"stride"``)."""
    try:
        number = int(text)
    except ValueError:
        raise NoMatchError(f"{kind}: takes an integer, got {text!r}") from None
    name = stage_module(index, number) if kind == "stage" else _stride_module(index, number)
    module = index.modules[name].module
    while type(module) in (nn.Sequential, nn.ModuleList) and len(module):  # type: ignore[arg-type]
        # such a container can be passed by (gradient checkpointing loops over its children)
        child = list(module._modules)[-1]
        name = f"{name}.{child}"
        module = index.modules[name].module
    return index.modules[name]


def stage_module(index: Index, number: int) -> str:
    """The name of the module that ends a stage."""
    stages = _stages(index)
    if not -len(stages) <= number < len(stages):
        listed = ", ".join(f"{i}: {name}" for i, (name, _) in enumerate(stages))
        raise NoMatchError(f"stage {number} is not among the {len(stages)} stages ({listed})")
    return stages[number][0]


def _stride_module(index: Index, stride: int) -> str:
    stages = _stages(index)
    names = [name for name, reduction in stages if reduction == stride]
    if not names:
        listed = ", ".join(f"{reduction}: {name}" for name, reduction in stages)
        raise NoMatchError(f"no stage has stride {stride} ({listed})")
    return names[-1]


def _stages(index: Index) -> list[tuple[str, int | None]]:
    """Name and reduction of each stage of the only submodule that has ``feature_info``."""
    hosts = [t.name for t in index.modules.values() if hasattr(t.module, "feature_info")]
    hosts = list(dict.fromkeys(hosts))
    if "" in hosts:
        hosts = [""]
    if len(hosts) != 1:
        found = f"several submodules have it: {', '.join(hosts)}" if hosts else "no module has it"
        raise NoMatchError(
            f"stages come from timm's feature_info, and {found}; name the layers, or root="
        )
    host = hosts[0]
    info: Any = index.modules[host].module.feature_info
    stages = []
    for entry in getattr(info, "info", info):
        name = ".".join(filter(None, [host, entry["module"]]))
        flat = ".".join(filter(None, [host, entry["module"].replace(".", "_")]))
        known = next((n for n in (name, flat) if n in index.modules), None)
        if known is None:
            raise NoMatchError(f"feature_info names {name!r}, which the model does not have")
        stages.append((known, entry.get("reduction")))
    return stages
