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
_AT_MOST = 100_000  # the most targets that are read to count classes


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
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch([index])
        return inputs[0], targets[0]

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return the items with these numbers."""
        inputs = self.inputs[indices]
        if inputs.dtype == torch.uint8:
            inputs = inputs.float().mul(1 / 255)
        return inputs, self.targets[indices]


def load_data(run: Run) -> Data:
    """Return the data of a run.

    Raises:
        FactoryError: if the factory fails, or its result can't be trained on.
    """
    data = _as_data(run.data, call(run.data, run.data_args, seed=run.seed))
    _check_sets(run.data, data)
    _check_tests(run.data, data.tests)

    if data.classes is None:
        data = replace(data, classes=_count_classes(data.train))
    if data.classes is not None and data.classes < 2:
        raise FactoryError(f"{run.data!r} has {data.classes} class: there is nothing to tell apart")
    return data


def _as_data(factory: str, result: Any) -> Data:
    """Convert the result of a factory to a Data; a tuple is (train, tests, validation)."""
    if isinstance(result, Data):
        return result
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise FactoryError(
            f"{factory!r} must return a Data, or a tuple (train, tests, validation), got "
            f"{type(result).__name__}"
        )

    train, tests, *validation = result
    if not isinstance(tests, Mapping):
        tests = {"test": tests}
    return Data(train, tests, *validation)


def _check_sets(factory: str, data: Data) -> None:
    """Refuse a data set without a length, without items by number, or without items."""
    sets = {"train": data.train, **data.tests}
    if data.validation is not None:
        sets["validation"] = data.validation

    for name, dataset in sets.items():
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise FactoryError(f"{factory!r}: {name} needs a length and items by number")
        if len(dataset) == 0:
            raise FactoryError(f"{factory!r}: {name} is empty")


def _check_tests(factory: str, tests: Mapping[str, Any]) -> None:
    """Refuse no tests, and tests that have the name of another column."""
    for name in tests:
        if name in (*RESERVED, "validation"):
            raise FactoryError(f"{factory!r}: a test can't have the name {name!r}")
    if not tests:
        raise FactoryError(f"{factory!r}: tests must hold at least one data set")


def _count_classes(train: Any) -> int | None:
    """Return the largest target plus one, or 1 if all are equal; None if they are no classes."""
    names = getattr(train, "classes", None)
    if names is not None:
        return len(names)

    first = torch.as_tensor(train[0][1])
    if first.ndim or first.is_floating_point() or first.is_complex():
        return None

    targets = getattr(train, "targets", None)
    if targets is None:
        count = min(len(train), _AT_MOST)
        targets = [int(train[index][1]) for index in range(count)]
    numbers = torch.as_tensor(targets)
    if len(numbers.unique()) == 1:
        return 1
    return int(numbers.max()) + 1
