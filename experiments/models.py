"""The model of a run, with its spec attached."""

from __future__ import annotations

import copy
import difflib
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import default_collate

from dropblock_hooks import Attachment, attach
from experiments.config import Run
from experiments.data import Data
from experiments.factories import FactoryError, call, told
from experiments.loading import Seeded
from experiments.seeds import derive_seed


def make_model(
    run: Run, data: Data, grad_scaler: Any = None
) -> tuple[nn.Module, Attachment | None]:
    """The initialized model, and its attachment. Torch's generator is not changed.

    Raises:
        FactoryError: if the model can't be made, or does not take the data or the loss.
        ValueError: if the spec does not fit the model.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the GPUs, which draw the masks
        torch.default_generator.manual_seed(derive_seed(run.seed, "weights", run.replica))
        model = _build(run, data)
        _try(model, run, data)
    if not run.spec:
        return model, None
    return model, attach(model, run.spec, epochs=run.epochs, grad_scaler=grad_scaler)


def _build(run: Run, data: Data) -> nn.Module:
    channels = _channels(data)
    source, colon, name = run.model.partition(":")
    if colon and source != "torchvision":
        made = call(run.model, run.model_args, num_classes=data.classes, in_chans=channels)
        if not isinstance(made, nn.Module):
            raise FactoryError(f"{run.model!r} must return a Module, got {type(made).__name__}")
        return made
    if not colon and not timm.is_model(run.model):
        close = difflib.get_close_matches(run.model, timm.list_models(), 3)
        hint = f" (closest: {', '.join(close)})" if close else ""
        raise FactoryError(
            f"{run.model!r} is no model of timm{hint}: write torchvision:NAME for one of "
            "torchvision, or package.module:factory for your own"
        )
    args = {"num_classes": data.classes, **run.model_args}
    with told(f"model_args do not fit {run.model}"):
        if colon:
            return torchvision.models.get_model(name, **args)
        return timm.create_model(run.model, in_chans=channels, **args)


def _channels(data: Data) -> int | None:
    with told("the first item of the training set can't be read"):
        first = data.train[0][0]
    return first.shape[0] if isinstance(first, Tensor) and first.ndim == 3 else None


@torch.no_grad()
def _try(model: nn.Module, run: Run, data: Data) -> None:
    """Run a copy on two items, or on one if a batch has no more, to find parts that do not fit."""
    items = len(data.train)  # type: ignore[arg-type]
    count = min(2, run.batch_size, items % run.batch_size or run.batch_size)
    first = Seeded(data.train, run.seed, 0)
    with told("the first items of the training set make no batch"):
        inputs, targets = default_collate([first[index] for index in range(min(count, items))])
    alone = f" alone in a batch ({items} items in batches of {run.batch_size})" if count < 2 else ""
    shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else type(inputs).__name__
    with told(f"{run.model} fails on an item of shape {shape}{alone}"):
        outputs = copy.deepcopy(model)(inputs)
    criterion = call(run.loss, run.loss_args)
    with told(f"{run.loss} fails on the outputs of {run.model}"):
        loss = criterion(outputs, targets)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise FactoryError(f"{run.loss} must return one number as a tensor, got {loss!r:.100}")
