"""The model that a command is about: of timm or torchvision, or made by a function of the user's.

Nothing is downloaded; a model is made on the meta device where that works, and takes no memory.
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
from ..planning.plan import own_input
from ..quoting import described, quote, shown
from .result import CommandError, count

_LIBRARIES = ("timm", "torchvision")


def add_model(command: argparse.ArgumentParser) -> None:
    """The arguments of a command that is about a model."""
    command.add_argument(
        "model", metavar="MODEL", help="resnet50, torchvision:resnet50 or package.module:factory"
    )
    command.add_argument(
        "--input-size",
        nargs="+",
        type=count,
        metavar="N",
        help="shape of one sample, behind all else: 3 224 224",
    )


def model_of(name: str) -> nn.Module:
    """The model that a name means, without pretrained weights."""
    make = _maker(name)
    try:
        with torch.device("meta"):
            model = make()
    except Exception:  # it may read numbers, which there are none of on meta
        try:
            model = make()
        except Exception as error:
            raise CommandError(f"making {name} raised {described(error)}") from error
    if not isinstance(model, nn.Module):
        raise CommandError(f"{name} must make a torch.nn.Module, got {shown(model)}")
    return model


def input_size(model: nn.Module, options: argparse.Namespace) -> tuple[int, ...]:
    """The shape of one sample: as was said, else as the model tells."""
    own = own_input(model)
    return tuple(options.input_size or ((3, 224, 224) if own is None else own.shape[1:]))


def samples(model: nn.Module, options: argparse.Namespace, n: int = 2) -> Tensor:
    """So many empty samples, where the model is."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    size = input_size(model, options)
    return torch.zeros(n, *size, dtype=like.dtype, device=like.device)


def _maker(name: str) -> Callable[[], Any]:
    """What makes the model."""
    place, colon, what = name.partition(":")
    if not colon:
        return _named(name, _LIBRARIES)
    return _named(what, (place,)) if place in _LIBRARIES else _factory(place, what)


def _named(name: str, libraries: tuple[str, ...]) -> Callable[[], Any]:
    """A model of the first library that knows the name."""
    try:
        import timm
        import torchvision
    except ImportError as error:
        raise CommandError(
            f"models come from timm: pip install 'dropblock-hooks[timm]' ({described(error)})"
        ) from error
    if "timm" in libraries and timm.is_model(name):
        return functools.partial(timm.create_model, name, pretrained=False)
    names = torchvision.models.list_models()
    if "torchvision" in libraries and name in names:
        builder = torchvision.models.get_model_builder(name)
        takes = inspect.signature(builder).parameters
        nothing = {key: None for key in ("weights", "weights_backbone") if key in takes}
        return functools.partial(builder, **nothing)
    known = {"timm": timm.list_models, "torchvision": lambda: names}
    hint = closest(name, [each for library in libraries for each in known[library]()])
    if not hint and "." in name:
        hint = ": a factory of yours is package.module:factory, with a colon"
    raise CommandError(f"unknown model {quote(name)}{hint}")


def _factory(place: str, path: str) -> Callable[[], Any]:
    """A function or class in a module of the user's."""
    found: Any = import_module(place)
    for part in path.split("."):
        if not hasattr(found, part):
            raise CommandError(f"{place} has no {quote(path)}{closest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise CommandError(f"{place}:{path} must be a function or a class, got {shown(found)}")
    make: Callable[[], Any] = found
    return make


def import_module(name: str) -> Any:
    """A module of the user's, also of the folder in which the command was called."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:  # the module is somebody's code
        raise CommandError(f"can't import {quote(name)}: {described(error)}") from error
