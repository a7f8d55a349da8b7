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
_LARGE_BLOCKS = DropBlock2d(RATE, block_size=5)
_SMALL_BLOCKS = DropBlock2d(RATE, block_size=3)
SPECS: dict[str, dict[str, Regularizer]] = {
    "resnet50": {
        "layer3.*.bn2": _LARGE_BLOCKS,
        "layer4.*.bn2": _SMALL_BLOCKS,
    },
    "mobilenetv3_large_100": {
        "blocks.[45].*": _LARGE_BLOCKS,
    },
    "convnext_tiny": {
        "stages.[23].blocks.*": _LARGE_BLOCKS,
    },
    "vit_tiny_patch16_224": {
        "blocks.*.mlp": DropPath(RATE),
    },
}
COMPILED = ("resnet50", "vit_tiny_patch16_224")


def model_work(name: str, training: bool = True) -> Work:
    """Return a work: a step, or a forward in evaluation, of a model bare, attached, watched."""

    def make(device: torch.device) -> Made:
        bare = timm.create_model(name)
        bare.to(device)
        bare.train(training)

        models = _bare_and_attached(bare, SPECS[name])
        models["watched"] = copy.deepcopy(bare)
        watch(models["watched"])
        x = torch.randn(SIZE, device=device)
        return _steps(models, x)

    kind = "training step" if training else "evaluation"
    return Work(
        name=f"{name}, {kind}",
        make=make,
        against=[
            ("attached", "bare"),
            ("watched", "bare"),
        ],
        shape=SIZE,
    )


def compiled_work(name: str) -> Work:
    """Return a work: a compiled training step of a model, bare and attached."""
    recipe = partial(
        _compiled_step,
        model=name,
        size=SIZE,
        backend="inductor",
    )
    return Work(
        name=f"{name}, compiled training step",
        against=[("attached", "bare")],
        shape=SIZE,
        apart={
            "bare": partial(recipe, spec=None),
            "attached": partial(recipe, spec=SPECS[name]),
        },
    )


def _compiled_step(
    device: torch.device,
    model: str,
    spec: Any,
    size: tuple[int, ...],
    backend: str,
) -> Callable[[], None]:
    """Return a compiled training step. The process of the variant calls this function."""
    module = _make_model(model, size)
    module.to(device)
    module.train()

    if spec is not None:
        attach(module, spec)
    module.compile(backend=backend)
    x = torch.randn(size, device=device)
    return partial(train_step, module, x)


def _make_model(model: str, size: tuple[int, ...]) -> nn.Module:
    """Make a model of timm, or the model of a user's factory."""
    if ":" not in model:
        of_timm: nn.Module = timm.create_model(model)
        return of_timm

    in_chans = size[1]
    of_user: nn.Module = call(
        model,
        {},
        num_classes=10,
        in_chans=in_chans,
    )
    return of_user


def _bare_and_attached(bare: nn.Module, spec: Any) -> dict[str, nn.Module]:
    """Return a model, and a copy with the regularizers of a spec."""
    attached = copy.deepcopy(bare)
    attach(attached, spec)
    return {
        "bare": bare,
        "attached": attached,
    }


def _steps(models: Mapping[str, nn.Module], x: Tensor) -> Made:
    """Return a training step of each model, or a forward of a model in evaluation mode."""
    steps = {}
    for way, model in models.items():
        step = train_step if model.training else evaluate
        steps[way] = partial(step, model, x)
    return Made(steps)


def train_step(model: nn.Module, x: Tensor) -> None:
    """Run the forward, the cross entropy and the backward; clear gradients first."""
    model.zero_grad()
    output = model(x)
    scores = _scores(output)
    targets = torch.zeros(len(x), dtype=torch.long, device=x.device)
    loss = F.cross_entropy(scores, targets)
    loss.backward()


def _scores(output: Any) -> Tensor:
    """Return the scores in an output, which may be an output object of Transformers."""
    scores = getattr(output, "logits", output)
    if not isinstance(scores, Tensor) or scores.ndim != 2:
        raise ValueError("the model must return scores (N, classes)")
    return scores


def evaluate(model: nn.Module, x: Tensor) -> None:
    """Run a forward without gradients."""
    with torch.no_grad():
        model(x)


def models() -> Iterator[Work]:
    """Yield works: training and evaluation of four timm models; two of them compiled."""
    for name in SPECS:
        yield model_work(name, training=True)
        yield model_work(name, training=False)
    for name in COMPILED:
        yield compiled_work(name)


def own_case(model: str, spec: Any, size: tuple[int, ...], backend: str) -> Work:
    """Return a work: a training step of a user's model, bare and attached, eager and compiled.

    Args:
        model: a timm model, or `package.module:factory`, which gets `num_classes` and `in_chans` if
            it has such parameters.
        spec: the spec to attach.
        size: the size of a batch, (N, C, H, W).
        backend: the backend of torch.compile.

    Raises:
        FactoryError: if there is no such model.
    """
    if ":" not in model and not timm.is_model(model):
        raise FactoryError(f"{model!r} is no model of timm: or give package.module:factory")

    def make(device: torch.device) -> Made:
        bare = _make_model(model, size)
        bare.to(device)
        bare.train()

        x = torch.randn(size, device=device)
        return _steps(_bare_and_attached(bare, spec), x)

    recipe = partial(
        _compiled_step,
        model=model,
        size=size,
        backend=backend,
    )
    return Work(
        name=f"{model}, training step",
        make=make,
        against=[
            ("bare", "bare"),
            ("attached", "bare"),
            ("compiled bare", "bare"),
            ("compiled attached", "compiled bare"),
        ],
        apart={
            "compiled bare": partial(recipe, spec=None),
            "compiled attached": partial(recipe, spec=spec),
        },
    )
