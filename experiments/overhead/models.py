"""Works on whole models: bare, attached, edited by hand, with timm's own option; compiled."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
import torch.nn.functional as F  # noqa: N812
from timm.layers.drop import DropBlock2d as TimmDropBlock2d
from torch import Tensor, nn

from dropblock_hooks import DropBlock2d, DropPath, Regularizer, attach, functional
from experiments.memory import saved_bytes
from experiments.overhead import CPU, Against, Work
from experiments.peers import nominal
from experiments.yaml_text import read_yaml

RATE = 0.1
# resnet50 as its own option has it: behind the second norm of the blocks of the last two stages
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
OWN_OPTION = ("resnet50",)
REFERENCES = {
    "bare": ("bare",),
    "attached": ("bare", "hand-edited", "own option"),
    "hand-edited": ("bare",),
    "own option": ("bare",),
}


@dataclass(frozen=True)
class Images:
    """What models are fed with."""

    batch_size: int = 8
    image_size: int = 224
    device: torch.device = CPU

    def batch(self) -> Tensor:
        """Noise of that shape."""
        size = (self.batch_size, 3, self.image_size, self.image_size)
        return torch.randn(size, device=self.device)


class Called(nn.Module):
    """A regularizer as one writes it into a model: in training, calls a function."""

    def __init__(self, regularizer: Regularizer) -> None:
        super().__init__()
        if isinstance(regularizer, DropBlock2d):
            block_size = regularizer.block_size
            self.function = partial(functional.drop_block2d, p=RATE, block_size=block_size)
        else:
            self.function = partial(functional.drop_path, p=RATE)

    def forward(self, x: Tensor) -> Tensor:
        """The function of x; x in evaluation."""
        return self.function(x) if self.training else x


def variants(name: str, images: Images) -> dict[str, nn.Module]:
    """A model, with the same weights and the same regularizers, in all ways."""
    bare = _create(name, images)
    models = {"bare": bare, "attached": copy.deepcopy(bare), "hand-edited": copy.deepcopy(bare)}
    sites = attach(models["attached"], SPECS[name]).sites
    for site in sites:
        layer = bare.get_submodule(site.name)
        edited = nn.Sequential(copy.deepcopy(layer), Called(site.regularizer))
        models["hand-edited"].set_submodule(site.name, edited)
    if name in OWN_OPTION:
        own = _create(name, images, drop_block_rate=RATE)
        own.load_state_dict(bare.state_dict())
        _ask_for_rate(own, images)
        models["own option"] = own
    return models


def _create(name: str, images: Images, **options: Any) -> nn.Module:
    if not timm.is_model(name):
        raise ValueError(f"{name!r} is no model of timm")
    model = timm.create_model(name, **options)
    if hasattr(model, "set_input_size"):  # those with positions, which fit one size
        model.set_input_size(img_size=images.image_size)
    return model.to(images.device)


def _ask_for_rate(model: nn.Module, images: Images) -> None:
    """Make timm's own layers drop `RATE`, on the maps that they see."""

    def ask(module: TimmDropBlock2d, args: tuple[Tensor, ...]) -> None:
        height, width = args[0].shape[-2:]
        module.gamma_scale = 1.0
        module.drop_prob = nominal("timm shared", (height, width), module.block_size, RATE)

    layers = [module for module in model.modules() if isinstance(module, TimmDropBlock2d)]
    handles = [layer.register_forward_pre_hook(ask) for layer in layers]
    with torch.no_grad():
        model.eval()(images.batch())
    for handle in handles:
        handle.remove()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Forward, cross entropy, backward, an update."""
    F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long, device=x.device)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def evaluate(model: nn.Module, x: Tensor) -> None:
    """A forward without gradients."""
    with torch.no_grad():
        model(x)


def model_works(
    name: str, models: Mapping[str, nn.Module], images: Images, kind: str = ""
) -> Iterator[Work]:
    """Training and evaluation, one after the other: both with the same models."""
    yield training_work(name, models, images, kind)
    yield evaluation_work(name, models, images, kind)


def training_work(
    name: str, models: Mapping[str, nn.Module], images: Images, kind: str = ""
) -> Work:
    """A training step; puts the models into that mode."""
    x = images.batch()
    steps = {
        key: partial(train_step, model.train(), torch.optim.SGD(model.parameters(), lr=0.0), x)
        for key, model in models.items()
    }
    known = [x, *(p for model in models.values() for p in model.parameters())]
    return Work(
        name=f"{name}, {kind}training step",
        steps=steps,
        against=_against(models),
        shape="x".join(map(str, x.shape)),
        known=known,
        nbytes=0 if kind else saved_bytes(steps["bare"], known),
        device=images.device,
    )


def evaluation_work(
    name: str, models: Mapping[str, nn.Module], images: Images, kind: str = ""
) -> Work:
    """A forward without gradients; puts the models into that mode."""
    x = images.batch()
    return Work(
        name=f"{name}, {kind}evaluation",
        steps={key: partial(evaluate, model.eval(), x) for key, model in models.items()},
        against=_against(models),
        shape="x".join(map(str, x.shape)),
        device=images.device,
    )


def _against(models: Mapping[str, nn.Module]) -> list[Against]:
    return [
        Against(variant, reference)
        for variant, references in REFERENCES.items()
        for reference in references
        if {variant, reference} <= set(models)
    ]


def models(images: Images) -> Iterator[Work]:
    """All models of `SPECS`, eager."""
    for name in SPECS:
        yield from model_works(name, variants(name, images), images)


def compiled(images: Images) -> Iterator[Work]:
    """The models of `COMPILED`, with torch.compile."""
    for name in COMPILED:
        yield from model_works(name, compiled_variants(name, images), images, "compiled ")


def compiled_variants(name: str, images: Images) -> dict[str, nn.Module]:
    """Those of ours, to be compiled by their first call."""
    torch.compiler.reset()
    found = variants(name, images)
    found.pop("own option", None)
    for model in found.values():
        model.compile()
    return found


def own_model(name: str, spec: str, images: Images) -> Iterator[Work]:
    """A timm model with and without a spec: a file, or YAML as it stands.

    Raises:
        ValueError: for a model that timm does not have, and a spec that does not fit it.
    """
    bare = _create(name, images)
    model = copy.deepcopy(bare)
    attach(model, spec if os.path.isfile(spec) else _plain(spec))  # a long text is no file's name
    return model_works(name, {"bare": bare, "attached": model}, images)


def _plain(spec: str) -> Any:
    """What the YAML says; a text that is none may be the name of a file that is not there."""
    try:
        return read_yaml(spec)
    except ValueError as error:
        raise ValueError(f"--spec: {error}") from error
