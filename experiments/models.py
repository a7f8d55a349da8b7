"""The model of a config, and what is attached to it."""

from __future__ import annotations

import copy
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

from dropblock_hooks import Attachment, attach
from experiments.config import Config
from experiments.data import Data
from experiments.loaders import share_sizes
from experiments.seeds import derive_seed


class ThreeChannels(nn.Module):
    """A model of colored images that takes gray ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.expand(-1, 3, -1, -1))


def prepare(
    config: Config, data: Data, grad_scaler: Any = None
) -> tuple[nn.Module, Attachment | None]:
    """The initialized model, and what the spec attaches to it; torch's generator stays as it is.

    Raises:
        ValueError: if the model does not take `model_args` or the images, or the spec does not
            fit the model.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the GPUs' generators too, which draw the masks
        torch.default_generator.manual_seed(derive_seed(config.seed, "weights", config.replica))
        try:
            model = _build(config, data)
        except Exception as error:  # whatever a constructor raises
            raise ValueError(f"model_args do not fit {config.model}: {error!r}") from error
        _try(model, config, data)
    if not config.spec:
        return model, None
    root = "model" if isinstance(model, ThreeChannels) else ""
    return model, attach(model, config.spec, root=root, grad_scaler=grad_scaler)


def _build(config: Config, data: Data) -> nn.Module:
    source, _, name = config.model.rpartition(":")
    if source == "torchvision":
        model = torchvision.models.get_model(name, num_classes=data.classes, **config.model_args)
        return ThreeChannels(model) if data.channels == 1 else model
    return timm.create_model(
        name, in_chans=data.channels, num_classes=data.classes, **config.model_args
    )


@torch.no_grad()
def _try(model: nn.Module, config: Config, data: Data) -> None:
    """Two images, or one if a batch has no more, through a copy: what does not fit is told here."""
    side, images = data.image_size, len(data.train)
    count = min(2, *share_sizes(config, images))
    try:
        scores = copy.deepcopy(model)(torch.zeros(count, data.channels, side, side))
    except Exception as error:  # whatever a model raises
        alone = f" that is alone in a batch ({config.batch_size} of {images} images)"
        where = f"a {side}x{side} image{alone if count == 1 else ''}"
        raise ValueError(f"{config.model} fails on {where}: {error!r}") from error
    if not isinstance(scores, Tensor) or scores.shape != (count, data.classes):
        raise ValueError(f"{config.model} gives no scores alone while it trains")
