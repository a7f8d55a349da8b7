"""Metrics of all outputs and targets of a data set, or batch by batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.utils.data import Subset

from experiments.config import Run
from experiments.data import Data
from experiments.factories import FactoryError, as_factory_error, call
from experiments.loading import in_order


def accuracy() -> Callable[[Tensor, Tensor], float]:
    """Return the default metric, the share of items whose largest output is right."""
    return lambda outputs, targets: (outputs.argmax(dim=1) == targets).double().mean().item()


class Metric:
    """The metric of a run, which gets batches. A `torchmetrics.Metric` keeps no batches.

    Args:
        run: the run with the metric.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.function: Any = call(run.metric, run.metric_args)
        self.by_batch = hasattr(self.function, "update") and hasattr(self.function, "compute")
        self.outputs: list[Any] = []
        self.targets: list[Any] = []

    def add(self, outputs: Any, targets: Any) -> None:
        """Add the outputs and targets of a batch."""
        self.targets.append(targets)
        if self.by_batch:
            with as_factory_error(f"{self.run.metric!r} failed"):
                self.function.update(outputs, targets)
            self.outputs = [outputs]  # the last batch alone
        else:
            self.outputs.append(outputs)

    def value(self, name: str) -> float:
        """Return the metric of all batches.

        Args:
            name: the name of the data set, for messages.

        Raises:
            FactoryError: if the metric fails, or returns no number.
        """
        with as_factory_error(f"{self.run.metric!r} failed on {name!r}"):
            if self.by_batch:
                value = self.function.compute()
            else:
                value = self.function(torch.cat(self.outputs), torch.cat(self.targets))
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise FactoryError(
                f"{self.run.metric!r} must return a number, got {value!r:.100} on {name!r}"
            ) from None

    def chance(self) -> float | None:
        """Return the metric of always the most frequent class; None without classes."""
        constant = Metric(self.run)
        try:
            with as_factory_error("there is no level of chance"):
                targets = torch.cat(self.targets)
                outputs = self.outputs[0]
                if outputs.ndim != 2 or targets.ndim != 1:
                    return None
                most_frequent = targets.mode().values
                output = one_hot(most_frequent, outputs.shape[1]).float()
            constant.add(output.expand(len(targets), -1), targets)
            value = constant.value("constant outputs")
        except FactoryError:  # targets are no classes, or the metric refuses constant outputs
            return None
        return value if math.isfinite(value) else None


@torch.no_grad()
def try_metric(run: Run, model: nn.Module, data: Data) -> None:
    """Try the metric on some items of the first test, so that it does not fail after the training.

    Raises:
        FactoryError: if the metric fails, or returns no number. A ValueError of the metric is
            allowed, because some metrics refuse few items.
    """
    name, test = next(iter(data.tests.items()))
    total = len(test)  # type: ignore[arg-type]
    every_nth = math.ceil(total / 16)
    some = Subset(test, range(0, total, every_nth))

    metric = Metric(run)
    model.eval()
    try:
        for inputs, targets in in_order(some, run):
            metric.add(model(inputs), targets)
        metric.value(name)
    except FactoryError as error:
        if not isinstance(error.__cause__, ValueError):
            raise
