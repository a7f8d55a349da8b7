"""The package's own regularizers and observers, apart from those that tests register."""

import inspect

import dropblock_hooks
from dropblock_hooks import Foreign, Observer, OnGradients, Regularizer, Schedule

ABSTRACT = (Regularizer, Observer, OnGradients, Schedule)


def own_classes(base):
    """The package's classes with this base that spec files name, by name."""
    found = {name: getattr(dropblock_hooks, name) for name in dropblock_hooks.__all__}
    return {n: c for n, c in found.items() if is_description(c) and issubclass(c, base)}


def is_description(cls):
    return (
        inspect.isclass(cls)
        and issubclass(cls, ABSTRACT)
        and cls not in ABSTRACT
        and cls is not Foreign
    )


def own_regularizers():
    return {n: c for n, c in own_classes(Regularizer).items() if not issubclass(c, Observer)}
