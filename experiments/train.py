"""One training run: `train(Config(...)) -> Result`.

Two runs of one seed share the split, the label noise, the initial weights and the order of the
batches, whatever is attached to the model: each has a generator of its own, and only the masks
are drawn from torch's global one.

    >>> from experiments.train import Config, train
    >>> spec = {"layer4.0": {"Dropout2d": {"p": 0.5}}}
    >>> train(Config(epochs=1, train_images=50, spec=spec)).nominal
    {'layer4.0/Dropout2d': [0.5]}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from dropblock_hooks import Attachment, Spec, attach
from experiments.data import CLASSES, Split, derive_seed, digits_split, own_generator


@dataclass(frozen=True)
class Config:
    """What one training run does; equal configs give equal results on one machine.

    Args:
        spec: what to attach, as plain data: selector -> regularizer(s); None for nothing.
        model: name of a timm model.
        model_args: further arguments of `timm.create_model`.
        train_images: how many digits are trained on; all others are the test set.
        label_noise: share of the training labels that are wrong, in [0, 1].
        epochs: passes over the training set; the learning rate's one cycle lasts as long.
        batch_size: images per step.
        max_lr: peak of the OneCycle learning rate; SGD's Nesterov momentum moves against it.
        weight_decay: L2 penalty of SGD.
        seed: decides split, label noise, initial weights, batch order and masks.
        threads: torch's threads; results differ in the last digits between numbers of them.
    """

    spec: dict[str, Any] | None = None
    model: str = "resnet18"
    model_args: dict[str, Any] = field(
        default_factory=lambda: {
            "layers": [1, 1, 1, 1],
            "channels": [32, 64, 128, 128],
            "output_stride": 8,
        }
    )
    train_images: int = 500
    label_noise: float = 0.4
    epochs: int = 40
    batch_size: int = 50
    max_lr: float = 0.1
    weight_decay: float = 5e-4
    seed: int = 0
    threads: int = 2

    def __post_init__(self) -> None:
        for name in ("train_images", "epochs", "batch_size", "threads"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _require(0 <= self.label_noise <= 1, "label_noise", "in [0, 1]", self.label_noise)
        _require(0 < self.max_lr < math.inf, "max_lr", "positive", self.max_lr)
        _require(0 <= self.weight_decay < math.inf, "weight_decay", "0 or more", self.weight_decay)
        _require(timm.is_model(self.model), "model", "one that timm knows", repr(self.model))
        if self.spec is not None:
            Spec(self.spec)


@dataclass(frozen=True)
class Result:
    """What came of one run.

    Args:
        accuracy: share of the test images that are classified right, after the last epoch.
        seconds: duration of training and test.
        loss: mean training loss of each epoch.
        nominal: site -> the rate that was asked for in each epoch; None where the regularizer
            has no rate.
        realized: site -> the share that was dropped in each epoch; None where the regularizer
            has no such share.
    """

    accuracy: float
    seconds: float
    loss: list[float]
    nominal: dict[str, list[float | None]]
    realized: dict[str, list[float | None]]


def train(config: Config, on_epoch: Callable[[int], None] | None = None) -> Result:
    """Train a fresh model on noisy digits, and test it on clean ones.

    Args:
        config: what to do.
        on_epoch: called with each epoch's number (from 0) when the epoch is over.

    Raises:
        ValueError: if the config does not fit the model or the data, before any training.
        FloatingPointError: if the training loss is no longer finite.
    """
    torch.set_num_threads(config.threads)
    split, model, attached = prepare(config)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=config.max_lr,
        momentum=0.95,  # OneCycleLR takes it down to .85 and back
        nesterov=True,
        weight_decay=config.weight_decay,
    )
    steps = config.epochs * math.ceil(config.train_images / config.batch_size)
    scheduler = OneCycleLR(optimizer, config.max_lr, total_steps=steps)
    order = own_generator(config.seed, "order")
    losses: list[float] = []
    sites = attached.sites if attached else ()
    nominal: dict[str, list[float | None]] = {site.key: [] for site in sites}
    realized: dict[str, list[float | None]] = {site.key: [] for site in sites}
    start = perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "masks"))
        for epoch in range(config.epochs):
            if attached:
                attached.step(epoch)
            batches = torch.randperm(config.train_images, generator=order).split(config.batch_size)
            losses.append(train_epoch(model, split, batches, optimizer, scheduler))
            for site in sites:
                nominal[site.key].append(site.rate)
                realized[site.key].append(site.realized_rate)
            if on_epoch is not None:
                on_epoch(epoch)
    accuracy = evaluate(model, split)
    return Result(accuracy, perf_counter() - start, losses, nominal, realized)


def prepare(config: Config) -> tuple[Split, nn.Module, Attachment | None]:
    """The data, the initialized model, and what is attached to it, if anything.

    Raises:
        ValueError: if the model does not take `model_args`, the spec does not fit the model, or
            `train_images` does not fit the data.
    """
    split = digits_split(config.train_images, config.label_noise, config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "weights"))
        try:
            model = timm.create_model(
                config.model, in_chans=1, num_classes=CLASSES, **config.model_args
            )
        except TypeError as error:
            raise ValueError(f"model_args do not fit {config.model}: {error}") from error
    return split, model, attach(model, config.spec) if config.spec else None


def train_epoch(
    model: nn.Module,
    split: Split,
    batches: Iterable[Tensor],
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
) -> float:
    """One pass over the batches (indices of training images); the mean loss."""
    model.train()
    losses = []
    for batch in batches:
        loss = nn.functional.cross_entropy(
            model(split.train_images[batch]), split.train_labels[batch]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    mean = sum(losses) / len(losses)
    if not math.isfinite(mean):
        raise FloatingPointError(f"the training loss is {mean}: try a smaller max_lr")
    return mean


@torch.inference_mode()
def evaluate(model: nn.Module, split: Split) -> float:
    """Share of the test images that the model, in evaluation mode, classifies right."""
    model.eval()
    scores = torch.cat([model(images) for images in split.test_images.split(250)])
    return (scores.argmax(dim=1) == split.test_labels).float().mean().item()


def _require(valid: bool, name: str, rule: str, value: object) -> None:
    if not valid:
        raise ValueError(f"{name} must be {rule}, got {value}")
