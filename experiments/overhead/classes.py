"""Works of one class each: the same layer, or the same update, with it and without it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn

from dropblock_hooks import (
    L2SP,
    ActivityL1,
    ActivityL2,
    AdaGC,
    ClampActivation,
    ClipGradNorm,
    FreezeNorm,
    NEFTune,
    SkipUpdate,
    ZClip,
    ZLoss,
    attach,
    watch,
)
from experiments.overhead.layers import SHAPES, Function, attached, floor, steps_of
from experiments.overhead.layers import observers as observers_of_tensors
from experiments.overhead.layers import others as other_dropouts
from experiments.overhead.memory import Step
from experiments.overhead.models import train_step
from experiments.overhead.timing import Made, Work

ON_ACTIVATIONS: Mapping[str, Any] = {
    "ActivityL1": ActivityL1(0.1),
    "ActivityL2": ActivityL2(0.1),
    "ClampActivation": ClampActivation(-1.0, 1.0),
    "ClampActivation, cap": ClampActivation(cap=3.0),
}
ON_UPDATES: Mapping[str, Any] = {
    "AdaGC": AdaGC(),
    "ZClip": ZClip(),
    "SkipUpdate": SkipUpdate(z=6.0),
    "ClipGradNorm": ClipGradNorm(1.0, group=True),
    "L2SP": L2SP(0.1, when="accumulated"),
}
LOGITS = (4096, 1000)
TOKENS = (32, 512)  # samples, tokens
EMBEDDINGS = (20_000, 768)
UPDATED = "resnet50"
TRAINED = "resnet18"
IMAGES = (8, 3, 96, 96)


def others() -> Iterator[Work]:
    """Dropouts and noise, and the classes that have no peer."""
    yield from other_dropouts()
    for shape in SHAPES:
        yield on_activations(shape)
        yield frozen_norm(shape)
    yield z_loss(LOGITS)
    yield embedding(TOKENS, EMBEDDINGS)
    yield updates(UPDATED)
    yield pulled(TRAINED, IMAGES)


def observers() -> Iterator[Work]:
    """Observers of one tensor, and `watch` on a model."""
    yield from observers_of_tensors()
    yield watched(TRAINED, IMAGES)


def on_activations(shape: tuple[int, ...]) -> Work:
    """Penalties and clamps on the output of the floor."""

    def make(device: torch.device) -> Made:
        functions: dict[str, Function] = {"floor": floor}
        for name, item in ON_ACTIVATIONS.items():
            functions[name] = behind_floor(item)
        functions["torch.clamp"] = lambda x: floor(x).clamp(-1.0, 1.0)
        return steps_of(functions, torch.randn(shape, device=device))

    against = [(name, "floor") for name in ON_ACTIVATIONS]
    against.append(("ClampActivation", "torch.clamp"))
    return Work("penalties and clamps", make, against, shape)


def behind_floor(item: Any) -> Function:
    """The floor, and a layer that does nothing with a regularizer on it."""
    layer = attached(item)
    return lambda x: layer(floor(x))


def z_loss(shape: tuple[int, int]) -> Work:
    """The z-loss on logits of so many rows and classes."""

    def make(device: torch.device) -> Made:
        functions: dict[str, Function] = {
            "floor": floor,
            "ZLoss": behind_floor(ZLoss(1e-4)),
            "log_softmax": lambda x: floor(x).log_softmax(-1),
        }
        return steps_of(functions, torch.randn(shape, device=device))

    against = [("ZLoss", "floor"), ("ZLoss", "log_softmax")]
    return Work("ZLoss", make, against, shape)


def frozen_norm(shape: tuple[int, ...]) -> Work:
    """A BatchNorm in training mode, in evaluation mode, and in training mode with FreezeNorm."""

    def make(device: torch.device) -> Made:
        bare = nn.BatchNorm2d(shape[1]).to(device)
        frozen = copy.deepcopy(bare)
        attach(frozen, {".": FreezeNorm()})
        functions: dict[str, Function] = {
            "bare": bare,
            "eval()": copy.deepcopy(bare).eval(),
            "FreezeNorm": frozen,
        }
        return steps_of(functions, torch.randn(shape, device=device))

    against = [("FreezeNorm", "bare"), ("FreezeNorm", "eval()")]
    return Work("FreezeNorm", make, against, shape)


def embedding(tokens: tuple[int, int], size: tuple[int, int]) -> Work:
    """An embedding of tokens, with NEFTune and without."""

    def make(device: torch.device) -> Made:
        ids = torch.randint(size[0], tokens, device=device)
        bare = nn.Embedding(*size).to(device)
        noisy = copy.deepcopy(bare)
        attach(noisy, {".": NEFTune(5.0)})
        gradient = torch.randn(*tokens, size[1], device=device)
        steps: dict[str, Step] = {
            "bare": partial(_through, bare, ids, gradient),
            "NEFTune": partial(_through, noisy, ids, gradient),
        }
        return Made(steps)

    return Work("NEFTune", make, [("NEFTune", "bare")], (*tokens, size[1]))


def _through(layer: nn.Embedding, ids: Tensor, gradient: Tensor) -> None:
    torch.autograd.grad(layer(ids), layer.weight, gradient)


def updates(name: str) -> Work:
    """Updates of all parameters of a model by SGD: bare, clipped, pulled, or left out."""

    def make(device: torch.device) -> Made:
        model = timm.create_model(name).to(device)
        steps: dict[str, Step] = {"bare": Update(model)}
        for label, item in ON_UPDATES.items():
            steps[label] = Update(model, item)
        steps["clip_grad_norm_"] = Update(model, max_norm=1.0)
        return Made(steps)

    against = [(label, "bare") for label in (*ON_UPDATES, "clip_grad_norm_")]
    against += [(label, "clip_grad_norm_") for label in ON_UPDATES]
    return Work(f"{name}, update by SGD", make, against)


class Update:
    """An update of a copy of a model, whose gradients are the same each time.

    Args:
        model: the model, which stays as it is.
        item: a regularizer of all gradients.
        max_norm: a bound for torch's function.
    """

    def __init__(self, model: nn.Module, item: Any = None, max_norm: float | None = None) -> None:
        self.model = copy.deepcopy(model)  # hooks end with their model, so it is kept
        self.parameters = list(self.model.parameters())
        self.gradients = [torch.randn_like(parameter) for parameter in self.parameters]
        self.optimizer = torch.optim.SGD(self.parameters, 1e-6, momentum=0.9)
        self.max_norm = max_norm
        if item is not None:
            attach(self.model, {"param:**": item}, optimizer=self.optimizer)

    def __call__(self) -> None:
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        self.optimizer.step()


def pulled(name: str, shape: tuple[int, ...]) -> Work:
    """Training steps of a model whose parameters are pulled to their first values."""

    def make(device: torch.device) -> Made:
        bare = timm.create_model(name).to(device).train()
        regularized = copy.deepcopy(bare)
        attach(regularized, {"param:**": L2SP(0.1)})
        models = {"bare": bare, "L2SP": regularized}
        x = torch.randn(shape, device=device)
        return Made({way: partial(train_step, model, x) for way, model in models.items()})

    return Work(f"{name}, training step", make, [("L2SP", "bare")], shape)


def watched(name: str, shape: tuple[int, ...]) -> Work:
    """Training steps of a model under `watch`, which measures some of them, or each."""

    def make(device: torch.device) -> Made:
        bare = timm.create_model(name).to(device).train()
        some = copy.deepcopy(bare)
        watch(some)
        each = copy.deepcopy(bare)
        watch(each, every=1)
        with_rows = copy.deepcopy(bare)
        watch(with_rows, keep=3)
        models = {
            "bare": bare,
            "watch": some,
            "watch, every=1": each,
            "watch, keep=3": with_rows,
        }
        x = torch.randn(shape, device=device)
        return Made({way: partial(train_step, model, x) for way, model in models.items()})

    against = [("watch", "bare"), ("watch, every=1", "bare"), ("watch, keep=3", "bare")]
    return Work(f"{name}, training step under watch", make, against, shape)
