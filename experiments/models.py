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
from experiments.factories import FactoryError, as_factory_error, call
from experiments.loading import Seeded
from experiments.seeds import derive_seed


def make_model(
    run: Run, data: Data, grad_scaler: Any = None
) -> tuple[nn.Module, Attachment | None]:
    """Return the initialized model, and its attachment. Torch's generator is not changed.

    Raises:
        FactoryError: if the model can't be made, or does not take the data or the loss.
        ValueError: if the spec does not fit the model.
    """
    with torch.random.fork_rng(devices=[]):
        seed = derive_seed(run.seed, "weights", run.replica)
        # torch.manual_seed would also seed the GPUs, which draw the masks
        torch.default_generator.manual_seed(seed)
        model = _build(run, data)
        _try(model, run, data)
    if not run.spec:
        return model, None
    return model, attach(model, run.spec, epochs=run.epochs, grad_scaler=grad_scaler)


def _build(run: Run, data: Data) -> nn.Module:
    """Return a model of timm, of torchvision or of your own factory."""
    channels = _channels(data)
    source, colon, name = run.model.partition(":")
    if not colon:
        return _build_timm(run, data, channels)

    if source == "torchvision":
        args = {"num_classes": data.classes, **run.model_args}
        with as_factory_error(f"model_args do not fit {run.model}"):
            return torchvision.models.get_model(name, **args)

    model = call(run.model, run.model_args, num_classes=data.classes, in_chans=channels)
    if not isinstance(model, nn.Module):
        raise FactoryError(f"{run.model!r} must return a Module, got {type(model).__name__}")
    return model


def _build_timm(run: Run, data: Data, channels: int | None) -> nn.Module:
    """Return a model of timm; a name that timm does not know is refused with similar ones."""
    if not timm.is_model(run.model):
        similar = difflib.get_close_matches(run.model, timm.list_models(), 3)
        hint = f" (closest: {', '.join(similar)})" if similar else ""
        raise FactoryError(
            f"{run.model!r} is no model of timm{hint}: write torchvision:NAME for one of "
            "torchvision, or package.module:factory for your own"
        )

    args = {"num_classes": data.classes, **run.model_args}
    with as_factory_error(f"model_args do not fit {run.model}"):
        return timm.create_model(run.model, in_chans=channels, **args)


def _channels(data: Data) -> int | None:
    """Return the number of channels of the first image; None where inputs are no images."""
    with as_factory_error("the first item of the training set can't be read"):
        first = data.train[0][0]
    if isinstance(first, Tensor) and first.ndim == 3:
        return first.shape[0]
    return None


@torch.no_grad()
def _try(model: nn.Module, run: Run, data: Data) -> None:
    """Run a copy on two items, or on one if a batch has no more, to find parts that do not fit."""
    total = len(data.train)  # type: ignore[arg-type]
    smallest_batch = total % run.batch_size or run.batch_size
    count = min(2, smallest_batch)
    first_items = Seeded(data.train, run.seed, epoch=0)
    with as_factory_error("the first items of the training set make no batch"):
        inputs, targets = default_collate([first_items[index] for index in range(count)])

    where = f"on an item of shape {_shape_of(inputs)}"
    if count == 1:
        where += f" alone in a batch ({total} items in batches of {run.batch_size})"
    with as_factory_error(f"{run.model} fails {where}"):
        outputs = copy.deepcopy(model)(inputs)

    criterion = call(run.loss, run.loss_args)
    with as_factory_error(f"{run.loss} fails on the outputs of {run.model}"):
        loss = criterion(outputs, targets)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise FactoryError(f"{run.loss} must return one number as a tensor, got {loss!r:.100}")


def _shape_of(inputs: Any) -> tuple[int, ...] | str:
    """Return the shape of an item of a batch; the type of inputs that are no tensor."""
    if isinstance(inputs, Tensor):
        return tuple(inputs.shape[1:])
    return type(inputs).__name__
