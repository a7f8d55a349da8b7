"""Works on whole models: bare, attached and watched, and a user's own case."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
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


def model_work(name: str, training: bool = True, compiled: bool = False) -> Work:
    """A training step, or a forward in evaluation, of a model: bare, attached and watched."""
    ways = WAYS[:2] if compiled else WAYS

    def make(device: torch.device) -> Made:
        bare = timm.create_model(name).to(device).train(training)
        made = {way: copy.deepcopy(bare) for way in ways}
        attach(made["attached"], SPECS[name])
        for way, model in made.items():
            if compiled:
                model.compile()
            if way == "watched":
                watch(model)
        return _steps(made, torch.randn(SIZE, device=device))

    kind = f"{'compiled ' * compiled}{'training step' if training else 'evaluation'}"
    return Work(f"{name}, {kind}", make, [(way, "bare") for way in ways[1:]], SIZE)


def _steps(made: Mapping[str, nn.Module], x: Tensor) -> Made:
    """A training step of each model, or a forward if it is in evaluation mode."""
    torch.compiler.reset()
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # or sites are skipped (limits.md)
    return Made(
        {
            way: partial(train_step if model.training else evaluate, model, x)
            for way, model in made.items()
        }
    )


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
    yield from (model_work(name, compiled=True) for name in COMPILED)


def own_case(model: str, spec: Any, size: tuple[int, ...], backend: str) -> Work:
    """A training step of a user's own model: bare, attached and compiled.

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
        offered = {"num_classes": 10, "in_chans": size[1]}
        bare = call(model, {}, **offered) if ":" in model else timm.create_model(model)
        made = {"bare": bare.to(device).train(), "attached": copy.deepcopy(bare)}
        attach(made["attached"], spec)
        for way in ("bare", "attached"):
            made[f"compiled {way}"] = copy.deepcopy(made[way])
            made[f"compiled {way}"].compile(backend=backend)
        return _steps(made, torch.randn(size, device=device))

    pairs = [(way, "bare") for way in ("bare", "attached", "compiled bare")]
    return Work(f"{model}, training step", make, [*pairs, ("compiled attached", "compiled bare")])
