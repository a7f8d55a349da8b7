"""Works on whole models: bare, attached and watched, and a user's own case."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import timm
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dropblock_hooks import DropBlock2d, DropPath, Regularizer, attach, watch
from experiments.factories import FactoryError, call
from experiments.overhead.timing import Made, Work

RATE = 0.1
SIZE = (8, 3, 224, 224)
SPECS: dict[str, dict[str, Regularizer]] = {
    "resnet50": {
        "layer3.*.bn2": DropBlock2d(RATE, block_size=5),
        "layer4.*.bn2": DropBlock2d(RATE, block_size=3),
    },
    "mobilenetv3_large_100": {"blocks.[45].*": DropBlock2d(RATE, block_size=5)},
    "convnext_tiny": {"stages.[23].blocks.*": DropBlock2d(RATE, block_size=5)},
    "vit_tiny_patch16_224": {"blocks.*.mlp": DropPath(RATE)},
}
COMPILED = ("resnet50", "vit_tiny_patch16_224")
WAYS = ("bare", "attached", "watched")


def model_work(name: str, training: bool = True) -> Work:
    """A training step, or a forward in evaluation, of a model: bare, attached and watched."""

    def make(device: torch.device) -> Made:
        bare = timm.create_model(name).to(device).train(training)
        made = {way: copy.deepcopy(bare) for way in WAYS}
        attach(made["attached"], SPECS[name])
        watch(made["watched"])
        x = torch.randn(SIZE, device=device)
        return _steps(made, x)

    kind = "training step" if training else "evaluation"
    against = [(way, "bare") for way in WAYS if way != "bare"]
    return Work(f"{name}, {kind}", make, against, SIZE)


def compiled_work(name: str) -> Work:
    """Return a compiled training step of a model, bare and attached."""
    apart = {
        "bare": partial(_compiled_step, name, None, SIZE, "inductor"),
        "attached": partial(_compiled_step, name, SPECS[name], SIZE, "inductor"),
    }
    against = [("attached", "bare")]
    return Work(f"{name}, compiled training step", against=against, shape=SIZE, apart=apart)


def _compiled_step(
    model: str, spec: Any, size: tuple[int, ...], backend: str, device: torch.device
) -> Callable[[], None]:
    """Return a compiled training step. Its own process calls this function."""
    made = _model(model, size).to(device).train()
    if spec is not None:
        attach(made, spec)
    made.compile(backend=backend)
    x = torch.randn(size, device=device)
    return partial(train_step, made, x)


def _model(model: str, size: tuple[int, ...]) -> nn.Module:
    """Return a model of timm, or that of a user's factory."""
    if ":" not in model:
        made: nn.Module = timm.create_model(model)
        return made
    offered = {"num_classes": 10, "in_chans": size[1]}
    return call(model, {}, **offered)


def _steps(made: Mapping[str, nn.Module], x: Tensor) -> Made:
    """Return a training step of each model, or a forward if it is in evaluation mode."""
    steps = {}
    for way, model in made.items():
        step = train_step if model.training else evaluate
        steps[way] = partial(step, model, x)
    return Made(steps)


def train_step(model: nn.Module, x: Tensor) -> None:
    """Forward, cross entropy and backward; gradients are cleared first."""
    model.zero_grad()
    F.cross_entropy(
        _scores(model(x)), torch.zeros(len(x), dtype=torch.long, device=x.device)
    ).backward()


def _scores(output: Any) -> Tensor:
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor) or found.ndim != 2:
        raise ValueError("the model must return scores (N, classes)")
    return found


def evaluate(model: nn.Module, x: Tensor) -> None:
    """A forward without gradients."""
    with torch.no_grad():
        model(x)


def models() -> Iterator[Work]:
    """Training and evaluation of four timm models; two of them compiled."""
    for name in SPECS:
        yield from (model_work(name, training) for training in (True, False))
    yield from (compiled_work(name) for name in COMPILED)


def own_case(model: str, spec: Any, size: tuple[int, ...], backend: str) -> Work:
    """Return a training step of a user's own model: bare and attached, and both compiled.

    Args:
        model: a timm model, or `package.module:factory`, which gets `num_classes` and `in_chans` if
            it has such parameters.
        spec: to attach.
        size: of a batch, (N, C, H, W).
        backend: of torch.compile.

    Raises:
        FactoryError: if there is no such model.
    """
    if ":" not in model and not timm.is_model(model):
        raise FactoryError(f"{model!r} is no model of timm: or give package.module:factory")

    def make(device: torch.device) -> Made:
        bare = _model(model, size).to(device).train()
        attached = copy.deepcopy(bare)
        attach(attached, spec)
        x = torch.randn(size, device=device)
        return _steps({"bare": bare, "attached": attached}, x)

    apart = {
        "compiled bare": partial(_compiled_step, model, None, size, backend),
        "compiled attached": partial(_compiled_step, model, spec, size, backend),
    }
    against = [(way, "bare") for way in ("bare", "attached", "compiled bare")]
    against.append(("compiled attached", "compiled bare"))
    return Work(f"{model}, training step", make, against, apart=apart)
