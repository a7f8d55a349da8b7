"""Works for a GPU: training steps of a ResNet-50, eager and compiled, and bounds of its gradients.

The steps use bfloat16 by autocast, channels_last, and SGD, as a training on a GPU does.
DropBlock is at the places of the paper (`presets.drop_block_resnet`). torchvision's function is in
plain hooks at the same places with the same rates. timm's option has fewer places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
import torch.nn.functional as F  # noqa: N812
import torchvision
from timm.utils.agc import adaptive_clip_grad
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    AdaptiveClipGrad,
    ClipGradNorm,
    GradientStats,
    attach,
    presets,
    watch,
)
from experiments.overhead.layers import floor, on_output
from experiments.overhead.timing import Made, Work

RATE = 0.1
BLOCK = 7
MAX_NORM = 1.0
CLIP_FACTOR = 0.01
BATCHES = (256, 128, 32)
COMPILED_BATCH = 64
CLIP_BATCH = 32
MODES = ("default", "reduce-overhead")
COMPILED_WAYS = ("bare", "x * 1.1", "attached", "watched", "torchvision")


@dataclass(frozen=True)
class Case:
    """A model of timm, and its batch of images.

    Attributes:
        batch: the number of images in a batch.
        model: the name of a ResNet of timm.
        edge: the edge of an image, in pixels.
    """

    batch: int
    model: str = "resnet50"
    edge: int = 224

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the batch."""
        return self.batch, 3, self.edge, self.edge


class TrainingStep:
    """Runs a training step in each call.

    Args:
        model: a classifier of images.
        case: the size of the batch.
        device: the device of the model.

    Attributes:
        optimizer: SGD.
        clip: a function that is called between the backward and the step of the optimizer.
    """

    def __init__(self, model: nn.Module, case: Case, device: torch.device) -> None:
        self.model = model
        images = torch.randn(case.shape, device=device)
        self.images = images.to(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 1000, (case.batch,), device=device)
        parameters = model.parameters()
        self.optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, foreach=True)
        self.clip: Callable[[], Any] | None = None

    def __call__(self) -> None:
        """Forward, cross entropy, backward, and a step of the optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.images.device.type, torch.bfloat16):
            loss = F.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        if self.clip is not None:
            self.clip()
        self.optimizer.step()


def _bare(model: nn.Module) -> None:
    pass


def _drop_block(model: nn.Module) -> None:
    attach(model, presets.drop_block_resnet(model, p=RATE, block_size=BLOCK))


def _statistics(model: nn.Module, **options: Any) -> None:
    attach(model, {"type:Conv2d": [ActivationStats(**options), GradientStats(**options)]})


def _scale(model: nn.Module) -> None:
    for name in _places(model):
        model.get_submodule(name).register_forward_hook(partial(on_output, floor))


def _torchvision(model: nn.Module) -> None:
    for name, rate in _places(model).items():
        drop = partial(torchvision.ops.drop_block2d, p=rate, block_size=BLOCK)
        model.get_submodule(name).register_forward_hook(partial(on_output, drop))


def _places(model: nn.Module) -> dict[str, float]:
    """Return the layers of DropBlock in the paper, with their rates."""
    attached = attach(model, presets.drop_block_resnet(model, p=RATE, block_size=BLOCK))
    places = {site.name: float(site.rate or 0) for site in attached}
    attached.remove()
    return places


WAYS: dict[str, Callable[[nn.Module], object]] = {
    "bare": _bare,
    "x * 1.1": _scale,
    "attached": _drop_block,
    "torchvision": _torchvision,
    "timm": _bare,  # has an option of the model instead
    "watched": watch,
    "statistics": _statistics,
    "statistics of each call": partial(_statistics, every=1),
}
"""Functions that put a regularizer on a model, by name."""


def training(way: str, case: Case, device: torch.device) -> TrainingStep:
    """Return a training step of a model with the regularizer of a way on it."""
    options = {"drop_block_rate": RATE} if way == "timm" else {}
    model = timm.create_model(case.model, **options).to(device).train()
    model = model.to(memory_format=torch.channels_last)
    WAYS[way](model)
    return TrainingStep(model, case, device)


def steps() -> Iterator[Work]:
    """Yield works: training steps in eager mode, for batches of three sizes."""
    for batch in BATCHES:
        yield eager(Case(batch))


def eager(case: Case) -> Work:
    """Return a work: training steps in eager mode, bare, and with each way of `WAYS`."""

    def make(device: torch.device) -> Made:
        return Made({way: training(way, case, device) for way in WAYS})

    against = [(way, "bare") for way in WAYS]
    name = f"{case.model}, training step"
    return Work(name, make, against, case.shape, least_seconds=0.2, most_seconds=30)


def compiled() -> Iterator[Work]:
    """Yield works: compiled training steps, in both modes of torch.compile that are in use."""
    for mode in MODES:
        yield compiled_steps(Case(COMPILED_BATCH), mode, {"mode": mode})


def compiled_steps(case: Case, label: str, options: dict[str, Any]) -> Work:
    """Return a work: compiled training steps, each way in a process of its own.

    Args:
        case: the model and its batch.
        label: the name of the options.
        options: the options of torch.compile.
    """
    apart = {way: partial(_compiled_step, way, case, options) for way in COMPILED_WAYS}
    return Work(
        f"{case.model}, compiled training step, {label}",
        against=[(way, "bare") for way in COMPILED_WAYS],
        shape=case.shape,
        apart=apart,
        at_once=len(apart),
        least_seconds=0.1,
        most_seconds=15,
    )


def _compiled_step(
    way: str, case: Case, options: dict[str, Any], device: torch.device
) -> TrainingStep:
    step = training(way, case, device)
    step.model.compile(**options)
    return step


def _clip_torch(step: TrainingStep) -> None:
    parameters = list(step.model.parameters())
    step.clip = partial(torch.nn.utils.clip_grad_norm_, parameters, MAX_NORM)


def _clip_timm(step: TrainingStep) -> None:
    parameters = list(step.model.parameters())
    step.clip = partial(adaptive_clip_grad, parameters, CLIP_FACTOR)


def _on_parameters(item: Any, step: TrainingStep) -> None:
    attach(step.model, {"param:**": item}, optimizer=step.optimizer)


CLIPS: dict[str, Callable[[TrainingStep], None]] = {
    "each parameter": partial(_on_parameters, ClipGradNorm(MAX_NORM)),
    "each, accumulated": partial(_on_parameters, ClipGradNorm(MAX_NORM, when="accumulated")),
    "group": partial(_on_parameters, ClipGradNorm(MAX_NORM, group=True)),
    "adaptive": partial(_on_parameters, AdaptiveClipGrad(CLIP_FACTOR)),
    "adaptive, accumulated": partial(
        _on_parameters, AdaptiveClipGrad(CLIP_FACTOR, when="accumulated")
    ),
    "clip_grad_norm_": _clip_torch,
    "timm": _clip_timm,
}
"""Bounds of the gradients of all parameters."""


def clip() -> Iterator[Work]:
    """Yield works: bounds of gradients, a step without bounds, and the bounds of torch and timm."""
    yield clipped(Case(CLIP_BATCH))


def clipped(case: Case) -> Work:
    """Return a work: training steps with each bound of `CLIPS`."""

    def make(device: torch.device) -> Made:
        made = {"bare": training("bare", case, device)}
        for name, install in CLIPS.items():
            made[name] = training("bare", case, device)
            install(made[name])
        return Made(made)

    against = [(name, "bare") for name in CLIPS]
    against += [(name, "clip_grad_norm_") for name in ("each, accumulated", "group")]
    against += [("adaptive, accumulated", "timm")]
    name = f"{case.model}, training step with clipping"
    return Work(name, make, against, case.shape, least_seconds=0.2, most_seconds=25)
