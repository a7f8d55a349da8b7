"""The processes that train together: made, given seeds of their own, and what all of them have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
from torch import nn

from experiments.config import Config, Runtime
from experiments.seeds import derive_seed


def make_fabric(config: Config, runtime: Runtime) -> Fabric:
    """Lightning Fabric as the config has it, on the GPU that it is given."""
    one = runtime.gpu is not None and config.processes == 1
    sharded = config.strategy == "fsdp"
    return Fabric(
        accelerator=config.accelerator,
        devices=[runtime.gpu] if one else config.devices,
        num_nodes=config.num_nodes,
        strategy=FSDPStrategy(state_dict_type="full") if sharded else config.strategy,
        precision=config.precision,
    )


@contextmanager
def own_masks(config: Config, fabric: Fabric) -> Iterator[None]:
    """Seed torch's global generators with this process's masks, and put them back in the end."""
    devices = [fabric.device] if fabric.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive_seed(config.seed, f"masks/{fabric.global_rank}", config.replica))
        yield


def gather(fabric: Fabric, own: Any) -> list[Any]:
    """What each process gives, in the order of their ranks."""
    if fabric.world_size == 1:
        return [own]
    found: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(found, own)
    return found


def share_buffers(fabric: Fabric, model: nn.Module) -> None:
    """Give all processes the first one's buffers: those are in the checkpoint."""
    if fabric.world_size > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)
