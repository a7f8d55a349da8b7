"""Data sets of a seed: digits, canvas, CIFAR, image folders, or your own.

A factory of data is called with `seed=` and the study's `data_args`. It returns a `Data`, or a
tuple of training set, tests and validation set. Everything that it draws must follow from the seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from experiments.config import Run
from experiments.factories import FactoryError, call

RESERVED = (
    "condition", "seed", "status", "chance",
    "train_loss", "nominal", "realized", "seconds", "error",
)  # fmt: skip
"""Columns of runs.csv that no test can have as its name."""
_AT_MOST = 100_000


@dataclass(frozen=True)
class Data:
    """Data sets of a seed; items are pairs of an input and a target.

    Attributes:
        train: the training set.
        tests: name -> test set.
        validation: the set that a search scores.
        classes: number of classes. None counts them, where the targets of `train` are integers.
    """

    train: Dataset[Any]
    tests: Mapping[str, Dataset[Any]]
    validation: Dataset[Any] | None = None
    classes: int | None = None


class Tensors(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets in memory. Bytes become floats in [0, 1].

    The method `batch` gives many items at once. A data set of your own that has it must not draw
    random numbers in it.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.batch([index])[0][0], self.targets[index]

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """The items with these numbers."""
        inputs = self.inputs[indices]
        if inputs.dtype == torch.uint8:
            inputs = inputs.float().mul(1 / 255)
        return inputs, self.targets[indices]


def load_data(run: Run) -> Data:
    """The data of a run.

    Raises:
        FactoryError: if the factory fails, or its result can't be trained on.
    """
    made = call(run.data, run.data_args, seed=run.seed)
    if isinstance(made, tuple) and 2 <= len(made) <= 3:
        tests = made[1] if isinstance(made[1], Mapping) else {"test": made[1]}
        made = Data(made[0], tests, *made[2:])
    if not isinstance(made, Data):
        raise FactoryError(
            f"{run.data!r} must return a Data, or a tuple (train, tests, validation), got "
            f"{type(made).__name__}"
        )
    sets = {"train": made.train, **made.tests, "validation": made.validation}
    for name, one in sets.items():
        if one is not None and not (hasattr(one, "__len__") and hasattr(one, "__getitem__")):
            raise FactoryError(f"{run.data!r}: {name} needs a length and items by number")
        if one is not None and not len(one):  # type: ignore[arg-type]
            raise FactoryError(f"{run.data!r}: {name} is empty")
    if taken := [name for name in made.tests if name in (*RESERVED, "validation")]:
        raise FactoryError(f"{run.data!r}: a test can't have the name {taken[0]!r}")
    if not made.tests:
        raise FactoryError(f"{run.data!r}: tests must hold at least one data set")
    if made.classes is None:
        made = replace(made, classes=_count_classes(made.train))
    if made.classes is not None and made.classes < 2:
        raise FactoryError(f"{run.data!r} has {made.classes} class: there is nothing to tell apart")
    return made


def _count_classes(train: Any) -> int | None:
    """The largest target plus one, and 1 where all are equal; None where targets are no classes."""
    names = getattr(train, "classes", None)
    if names is not None:
        return len(names)
    first = torch.as_tensor(train[0][1])
    if first.ndim or first.is_floating_point() or first.is_complex():
        return None
    targets = getattr(train, "targets", None)
    if targets is None:
        targets = [int(train[index][1]) for index in range(min(len(train), _AT_MOST))]
    found = torch.as_tensor(targets)
    return 1 if len(found.unique()) == 1 else int(found.max()) + 1
