"""Build the model that a command is about: one of timm or torchvision, or the user's own.

Nothing is downloaded. A model is built on the meta device where that works, and takes no memory.
"""

import argparse
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import closest
from ..planning.dry_run import own_input
from ..quoting import described, quote, shown
from .result import CommandError


def add_model(command: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that is about a model."""
    command.add_argument(
        "model", metavar="MODEL", help="resnet50, torchvision:resnet50 or package.module:factory"
    )
    command.add_argument(
        "--input-size",
        nargs="+",
        type=count,
        metavar="N",
        help="shape of one sample; put it last: 3 224 224",
    )


def model_of(name: str) -> nn.Module:
    """Build the model with this name, without pretrained weights."""
    make = _factory(name)
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


def input_size(model: nn.Module, options: argparse.Namespace) -> tuple[int, ...]:
    """The shape of one sample: as given, else from the model, else 3×224×224."""
    own = own_input(model)
    return tuple(options.input_size or ((3, 224, 224) if own is None else own.shape[1:]))


def samples(model: nn.Module, options: argparse.Namespace, n: int = 2) -> Tensor:
    """A batch of zeros on the device of the model."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    size = input_size(model, options)
    return torch.zeros(n, *size, dtype=like.dtype, device=like.device)


def _factory(name: str) -> Callable[[], Any]:
    """The function that makes the model."""
    place, colon, what = name.partition(":")
    if not colon:
        return _library_model(name, ("timm", "torchvision"))
    if place in ("timm", "torchvision"):
        return _library_model(what, (place,))
    found: Any = import_module(place)
    for part in what.split("."):
        if not hasattr(found, part):
            raise CommandError(f"{place} has no {quote(what)}{closest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise CommandError(f"{name} must be a function or a class, got {shown(found)}")
    make: Callable[[], Any] = found
    return make


def _library_model(name: str, libraries: tuple[str, ...]) -> Callable[[], Any]:
    """A model of the first of these libraries that knows the name."""
    try:
        import timm
        import torchvision
    except ImportError as error:
        raise CommandError(
            f"models come from timm: pip install 'dropblock-hooks[timm]' ({described(error)})"
        ) from error
    known = {"timm": timm.list_models(), "torchvision": torchvision.models.list_models()}
    if "timm" in libraries and timm.is_model(name):
        return functools.partial(timm.create_model, name, pretrained=False)
    if "torchvision" in libraries and name in known["torchvision"]:
        builder = torchvision.models.get_model_builder(name)
        takes = inspect.signature(builder).parameters
        weights = {key: None for key in ("weights", "weights_backbone") if key in takes}
        return functools.partial(builder, **weights)
    hint = closest(name, [each for library in libraries for each in known[library]])
    if not hint and "." in name:
        hint = ": your own model is written package.module:factory, with a colon"
    raise CommandError(f"unknown model {quote(name)}{hint}")


def import_module(name: str) -> Any:
    """Import a module of the user's, also from the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise CommandError(f"can't import {quote(name)}: {described(error)}") from error


def count(text: str) -> int:
    """The type of an option that takes an integer above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)
