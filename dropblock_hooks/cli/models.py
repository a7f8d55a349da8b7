"""Build a model of timm, of torchvision or of the user from its name.

No weights are downloaded. If possible, a model is built on the meta device and takes no memory.
"""

import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import closest
from ..planning.dry_run import empty_input, own_input
from ..quoting import described, quote, shown


class CommandError(Exception):
    """An error that is printed in one line, without a traceback."""


def model_of(name: str) -> nn.Module:
    """Build the model with this name, without pretrained weights."""
    place, _, what = name.rpartition(":")
    in_library = place in ("", "timm", "torchvision")
    make = _library_model(what, place) if in_library else imported(name)
    try:
        with torch.device("meta"):
            model = make()
    except Exception:  # a constructor that reads numbers fails on the meta device
        try:
            model = make()
        except Exception as error:
            raise CommandError(f"making {name} raised {described(error)}") from error
    if not isinstance(model, nn.Module):
        raise CommandError(f"{name} must make a torch.nn.Module, got {shown(model)}")
    return model


def samples(model: nn.Module, input_size: list[int] | None) -> Tensor:
    """Two samples of zeros on the device of the model.

    The default size comes from the configuration of the model; else it is 3×224×224.
    """
    own = None if input_size else own_input(model)
    return empty_input(model, input_size or (3, 224, 224)) if own is None else own


def _library_model(name: str, library: str) -> Callable[[], Any]:
    """A model of timm or torchvision; without a library, of the first that knows the name."""
    try:
        import timm
        from torchvision import models
    except ImportError as error:
        raise CommandError(
            f"models come from timm: pip install 'dropblock-hooks[timm]' ({described(error)})"
        ) from error
    if library != "torchvision" and timm.is_model(name):
        return lambda: timm.create_model(name, pretrained=False)
    if library != "timm" and name in models.list_models():
        takes = inspect.signature(models.get_model_builder(name)).parameters
        weights = {key: None for key in ("weights", "weights_backbone") if key in takes}
        return lambda: models.get_model(name, **weights)
    hint = closest(name, [*timm.list_models(), *models.list_models()])
    raise CommandError(f"unknown model {quote(name)}{hint}; yours is package.module:factory")


def imported(name: str) -> Any:
    """Import a module of the user or one of its members, also from the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:  # the user's module may raise anything
        raise CommandError(f"can't import {quote(name)}: {described(error)}") from error
