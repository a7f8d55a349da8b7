"""Factories `package.module:name`, which make a model, a data set, a loss or a metric of yours."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

SHORT = {
    "digits": "experiments.data.digits:digits",
    "canvas": "experiments.data.canvas:canvas",
    "cifar10": "experiments.data.vision:cifar10",
    "cifar100": "experiments.data.vision:cifar100",
    "imagefolder": "experiments.data.vision:imagefolder",
    "accuracy": "experiments.metrics:accuracy",
}


class FactoryError(ValueError):
    """A factory that can't be found, or that failed; the message names its file and line."""


def load(reference: str) -> Callable[..., Any]:
    """Return the object that a reference names.

    Example:
        >>> load("torch.nn:Linear")
        <class 'torch.nn.modules.linear.Linear'>

    Raises:
        FactoryError: if there is no such module or name, or the import fails.
    """
    module, colon, name = SHORT.get(reference, reference).partition(":")
    if not colon or not name:
        known = ", ".join(SHORT)
        raise FactoryError(
            f"{reference!r} is unknown: write package.module:name, or one of {known}"
        )

    imported = _import(reference, module)
    factory = getattr(imported, name, None)
    if not callable(factory):
        public = [key for key in vars(imported) if not key.startswith("_")]
        names = [key for key in public if callable(getattr(imported, key))]
        raise FactoryError(
            f"{reference!r}: {module} has no function or class {name!r}, it has {names[:9]}"
        )
    return factory  # type: ignore[no-any-return]


def _import(reference: str, module: str) -> ModuleType:
    """Return the module of a reference."""
    with as_factory_error(f"{reference!r} can't be imported"):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and f"{module}.".startswith(f"{error.name}."):
                raise FactoryError(
                    f"{reference!r}: there is no module {error.name!r}: put it beside the study, "
                    "or install it"
                ) from error
            raise


def call(reference: str, arguments: Mapping[str, Any], **offered: Any) -> Any:
    """Call a factory with the arguments of a study and the offered ones that it has names for.

    Args:
        reference: the reference of the factory.
        arguments: arguments of a study. They replace offered arguments of the same name.
        offered: arguments that a factory gets if it has a parameter of this name.

    Raises:
        FactoryError: if it can't be found, or raises an error.
    """
    factory = load(reference)
    parameters: Mapping[str, Any] = {}
    with suppress(TypeError, ValueError):  # a class written in C has no signature
        parameters = inspect.signature(factory).parameters

    taken = {name: value for name, value in offered.items() if name in parameters}
    combined = {**taken, **arguments}
    with as_factory_error(f"{reference!r} failed"):
        return factory(**combined)


@contextmanager
def as_factory_error(what: str) -> Iterator[None]:
    """Turn an error of the user's code into a FactoryError that names its file and line.

    Args:
        what: the beginning of the message.

    Raises:
        FactoryError: if the code in the ``with`` block fails.
    """
    try:
        yield
    except FactoryError:
        raise
    except SyntaxError as error:
        where = f"({error.filename}:{error.lineno})"
        raise FactoryError(f"{what}: {error.msg} {where}") from error
    except Exception as error:  # the user's code may raise any error
        where = _place_of(error)
        raise FactoryError(f"{what}: {type(error).__name__}: {error} ({where})") from error


def _place_of(error: Exception) -> str:
    """Return the file and line of the user's code that failed last."""
    frames = traceback.extract_tb(error.__traceback__)
    others = ("site-packages", "importlib", f"{Path(__file__).parent}{os.sep}")
    of_user = [frame for frame in frames if not any(part in frame.filename for part in others)]
    last = (of_user or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def digest(reference: str) -> str:
    """Return the SHA-256 of the file of a factory; for an installed package, the reference."""
    if ":" not in reference or reference in SHORT:
        return reference
    try:
        path = inspect.getsourcefile(load(reference))
        if path is None or "site-packages" in path:
            return reference
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (TypeError, OSError, FactoryError):
        return reference
