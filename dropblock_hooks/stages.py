"""Feature stages, as timm's ``feature_info`` names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .names import Index, NoMatchError, Target
from .wrappers import bare_type


def stage_target(index: Index, kind: str, text: str) -> Target:
    """The last layer called in a stage, by number (``"stage"``) or reduction (``"stride"``)."""
    try:
        number = int(text)
    except ValueError:
        raise NoMatchError(f"{kind}: takes an integer, got {text!r}") from None
    name = stage_module(index, number) if kind == "stage" else _stride_module(index, number)
    module = index.modules[name].module
    while bare_type(module) in (nn.Sequential, nn.ModuleList) and len(module):  # type: ignore[arg-type]
        # such a container can be passed by (gradient checkpointing loops over its children)
        child = list(module._modules)[-1]
        name = f"{name}.{child}"
        module = index.modules[name].module
    return index.modules[name]


def stage_module(index: Index, number: int) -> str:
    """The name of the module that ends a stage."""
    stages = _stages(index)
    if not -len(stages) <= number < len(stages):
        listed = ", ".join(f"{i}: {stage.name}" for i, stage in enumerate(stages))
        raise NoMatchError(f"stage {number} is not among the {len(stages)} stages ({listed})")
    return _existing(stages[number], index)


def _stride_module(index: Index, stride: int) -> str:
    stages = _stages(index)
    found = [stage for stage in stages if stage.stride == stride]
    if not found:
        listed = ", ".join(f"{stage.stride}: {stage.name}" for stage in stages)
        raise NoMatchError(f"no stage has stride {stride} ({listed})")
    return _existing(found[-1], index)


@dataclass(frozen=True)
class _Stage:
    name: str
    flat: str
    stride: int | None


def _existing(stage: _Stage, index: Index) -> str:
    for name in (stage.name, stage.flat):  # features_only renames stages.3 to stages_3
        if name in index.modules:
            return name
    raise NoMatchError(f"feature_info names {stage.name!r}, which the model does not have")


def _stages(index: Index) -> list[_Stage]:
    """The stages of the only submodule that has ``feature_info``."""
    hosts = list(
        dict.fromkeys(t.name for t in index.modules.values() if hasattr(t.module, "feature_info"))
    )
    if "" in hosts:
        hosts = [""]
    if len(hosts) != 1:
        found = f"several submodules have it: {', '.join(hosts)}" if hosts else "no module has it"
        raise NoMatchError(
            f"stages come from timm's feature_info, and {found}; name the layers, or root="
        )
    host = hosts[0] + "." if hosts[0] else ""
    info: Any = index.modules[hosts[0]].module.feature_info
    return [
        _Stage(
            host + entry["module"],
            host + entry["module"].replace(".", "_"),
            entry.get("reduction"),
        )
        for entry in getattr(info, "info", info)
    ]
