"""Scores in evaluation mode, which leave no trace in a training; and the weights of the best epoch.

What is scored in the middle of a training is a copy, with copies of all that is attached: modes,
running statistics of norms, and what regularizers have counted stay as they were.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from experiments.config import Config, Runtime
from experiments.datasets.images import Images
from experiments.loaders import scoring_loader
from experiments.processes import gather, share_buffers
from experiments.seeds import derive_seed


@dataclass(frozen=True)
class Scorer:
    """How a run scores: on which processes, in which precision.

    Args:
        config: a resolved config.
        runtime: of the run.
        fabric: of its processes.
    """

    config: Config
    runtime: Runtime
    fabric: Fabric

    @property
    def is_sharded(self) -> bool:
        """Whether no process has all weights, so that all of them see each image."""
        return self.config.strategy == "fsdp"

    def copied(self, model: nn.Module) -> nn.Module:
        """A copy to score, in the precision of the training; what is sharded is not copied."""
        if self.is_sharded:
            return model
        copied: nn.Module = self.fabric.strategy.precision.convert_module(copy.deepcopy(model))
        return copied

    @torch.no_grad()
    def score(self, model: nn.Module, images: Images, name: str) -> tuple[float, float]:
        """Share of the images that is classified right, and the mean loss; all processes call it.

        What is active in evaluation too draws from seeds of its own, the same in a resumed run;
        random states are put back. Not through DistributedDataParallel, whose forward would wait
        for the other processes.

        Args:
            model: whole, or sharded; it is left in evaluation mode.
            images: with their labels.
            name: of the split, which decides the seeds.
        """
        fabric, sharded = self.fabric, self.is_sharded
        share_buffers(fabric, model)
        part = (0, 1) if sharded else (fabric.global_rank, fabric.world_size)
        precision = fabric.strategy.precision
        sums = torch.zeros(3, dtype=torch.float64)
        model.eval()
        with self._own_masks(f"test/{name}/{part[0]}"):
            for batch in scoring_loader(images, self.config, self.runtime, *part):
                pictures, labels = fabric.to_device(batch)
                with precision.forward_context():
                    scores = model(precision.convert_input(pictures)).float()
                loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
                right = (scores.argmax(dim=1) == labels).sum()
                sums += torch.tensor([right.item(), loss.item(), len(labels)], dtype=torch.float64)
        everywhere = zip(*gather(fabric, sums.tolist()), strict=True)
        right, loss, count = (sum(values) for values in everywhere)
        return right / count, loss / count

    @contextmanager
    def _own_masks(self, purpose: str) -> Iterator[None]:
        device = self.fabric.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(derive_seed(self.config.seed, purpose, self.config.replica))
            yield

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """A copy of all weights and buffers, in every process; all of them call it."""
        with self._whole(model) as whole:
            return {name: value.cpu().clone() for name, value in whole.state_dict().items()}

    def load(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Take over what `weights` gave; all processes call it."""
        with self._whole(model) as whole:
            whole.load_state_dict(weights)

    @contextmanager
    def _whole(self, model: nn.Module) -> Iterator[nn.Module]:
        """The module whose state is that of the whole model, within the context."""
        if not self.is_sharded:
            yield model
            return
        from torch.distributed.fsdp import FullStateDictConfig, StateDictType
        from torch.distributed.fsdp import FullyShardedDataParallel as Sharded

        options = FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
        [root] = Sharded.fsdp_modules(model, root_only=True)  # Fabric's wrapper knows no shards
        with Sharded.state_dict_type(root, StateDictType.FULL_STATE_DICT, options):
            yield root


@dataclass(frozen=True)
class Kept:
    """The best epoch so far: its number, its accuracy on the validation images, its weights."""

    epoch: int
    validation: float
    weights: dict[str, Tensor]


def is_better(validation: float, loss: float, kept: Kept | None) -> bool:
    """Whether an epoch is better than the best one so far; not if it is as good.

    Example:
        >>> kept = Kept(3, 0.5, {})
        >>> is_better(0.5, 1.0, kept), is_better(0.6, 1.0, kept), is_better(0.1, 1.0, None)
        (False, True, True)
        >>> is_better(0.6, float("nan"), kept)  # weights that are no numbers
        False
    """
    return math.isfinite(loss) and (kept is None or validation > kept.validation)
