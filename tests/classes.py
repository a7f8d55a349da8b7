"""The package's own regularizers and observers, apart from those that tests register."""

import inspect
from dataclasses import MISSING, fields

import dropblock_hooks
from dropblock_hooks import Foreign, Observer, OnGradients, Regularizer, Schedule

ABSTRACT = (Regularizer, Observer, OnGradients, Schedule)
NEEDED = {  # the arguments without which a class can not be made
    "AdaptiveClipGrad": {"clip_factor": 0.01},
    "ActivityL1": {"weight": 0.1},
    "ActivityL2": {"weight": 0.1},
    "ClampActivation": {"min": -1.0},
    "ClampGrad": {"min": -1.0},
    "ClipGradNorm": {"max_norm": 1.0},
    "DropPath": {"p": 0.1},
    "GaussianDropout": {"p": 0.1},
    "GaussianNoise": {"std": 0.1},
    "GradNoise": {"std": 0.1},
    "L2SP": {"weight": 0.1},
    "NEFTune": {"alpha": 1.0},
    "Retune": {"p": 0.1},
    "ScaleGrad": {"scale": 0.1},
    "SkipUpdate": {"max_norm": 1.0},
    "StochasticDepth": {"p": 0.1},
    "ZLoss": {"weight": 0.1},
}


def make(cls, *rates, **options):
    """Make an object of a class, with the arguments of `NEEDED` that are not given.

    Args:
        cls: the class.
        rates: the values of its first fields.
        options: the values of other fields.
    """
    taken = [field for field in fields(cls) if field.init]
    positional = [field.name for field in taken if not field.kw_only]
    first = dict(zip(positional, rates, strict=False))
    arguments = {**NEEDED.get(cls.__name__, {}), **first, **options}
    required = {f.name for f in taken if f.default is MISSING and f.default_factory is MISSING}
    missing = sorted(required - arguments.keys())
    assert not missing, f"add {missing} of {cls.__name__} to NEEDED in tests/classes.py"
    return cls(**arguments)


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
