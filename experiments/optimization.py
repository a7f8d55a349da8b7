"""Optimizer, learning rate, loss and mixup of a config; timm's, but for the one-cycle schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from experiments.config import Config
from experiments.loaders import share_sizes
from experiments.seeds import derive_seed


def make_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """The optimizer of all parameters; biases and norms have no weight decay.

    Raises:
        ValueError: if it does not take `optimizer_args`.
    """
    try:
        return create_optimizer_v2(
            model,
            opt=config.optimizer,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            **config.optimizer_args,
        )
    except (TypeError, AssertionError) as error:
        raise ValueError(f"optimizer_args do not fit {config.optimizer}: {error}") from error


class LearningRate:
    """The learning rate, step by step.

    Args:
        config: says the schedule.
        optimizer: whose rate is moved.
        batches: steps per epoch.

    Raises:
        ValueError: if the schedule does not take `lr_schedule_args`, or not this optimizer.
    """

    def __init__(self, config: Config, optimizer: Optimizer, batches: int) -> None:
        self._optimizer = optimizer
        self.last = self._now  # of the step that was made last
        self._schedule: OneCycleLR | Scheduler
        try:
            if config.lr_schedule == "onecycle":
                self._schedule = OneCycleLR(
                    optimizer, config.lr, config.epochs * batches, **config.lr_schedule_args
                )
            else:
                self._schedule, _ = create_scheduler_v2(
                    optimizer,
                    sched=config.lr_schedule,
                    num_epochs=config.epochs,
                    warmup_epochs=config.warmup_epochs,
                    step_on_epochs=False,
                    updates_per_epoch=batches,
                    **config.lr_schedule_args,
                )
        except (TypeError, ValueError, AssertionError) as error:
            name = config.lr_schedule
            raise ValueError(f"lr_schedule {name} can't be made: {error}") from error

    @property
    def _now(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self, done: int) -> None:
        """Move on after `done` steps in all."""
        self.last = self._now
        if isinstance(self._schedule, Scheduler):
            self._schedule.step_update(done)
        else:
            self._schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last"]
        self._schedule.load_state_dict(state["schedule"])


class Targets:
    """What the loss is taken of: labels, smoothed or mixed.

    Args:
        config: says label smoothing and mixup.
        classes: of the data.
        images: how many are trained on.
        rank: of this process; each mixes in its own way.

    Raises:
        ValueError: for mixup with a batch of an odd number of images.
    """

    def __init__(self, config: Config, classes: int, images: int, rank: int = 0) -> None:
        self.mixes = config.mixup > 0
        if self.mixes:
            _check_pairs(config, images)
        self.loss: Callable[[Tensor, Tensor], Tensor]
        if self.mixes:
            self._mixup = Mixup(
                config.mixup, label_smoothing=config.label_smoothing, num_classes=classes
            )
            self.loss = SoftTargetCrossEntropy()
        elif config.label_smoothing:
            self.loss = LabelSmoothingCrossEntropy(config.label_smoothing)
        else:
            self.loss = nn.functional.cross_entropy
        seed = derive_seed(config.seed, f"mixup/{rank}", config.replica)
        self._random = np.random.RandomState(seed % 2**32).get_state(legacy=False)

    def mix(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images and targets of a batch.

        timm's mixup draws from NumPy's global generator; its state is lent, and put back.
        """
        if not self.mixes:
            return images, labels
        others = np.random.get_state(legacy=False)
        np.random.set_state(self._random)
        try:
            return self._mixup(images, labels)
        finally:
            self._random = np.random.get_state(legacy=False)
            np.random.set_state(others)

    def state_dict(self) -> dict[str, Any]:
        state = self._random["state"]
        key = torch.from_numpy(state["key"].astype(np.int64))
        return {**self._random, "state": {"key": key, "pos": int(state["pos"])}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        key = state["state"]["key"].numpy().astype(np.uint32)
        self._random = {**state, "state": {"key": key, "pos": state["state"]["pos"]}}


def _check_pairs(config: Config, images: int) -> None:
    """Timm's mixup mixes a batch with itself, backwards, and takes an even number of images."""
    for count in share_sizes(config, images):
        if count % 2:
            raise ValueError(
                f"mixup takes batches of an even number of images, got one of {count}: choose "
                f"batch_size {config.batch_size} and train_images {images} so that all are even"
            )
