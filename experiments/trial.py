"""A trial of the conditions of a study before their first run, which finds all faults at once.

Each condition is tried with a few items: its loss, its metric, its data, its model with the spec,
and its optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from experiments.config import Run, run_hash
from experiments.data import Data, load_data
from experiments.factories import call
from experiments.metrics import Metric, try_metric
from experiments.models import make_model
from experiments.train import make_optimizer


def faults_of(conditions: Mapping[str, Run], seed: int, primary: Iterable[str]) -> list[str]:
    """Try all conditions, and return the fault of each. Equal conditions are a fault too.

    Args:
        conditions: name -> run.
        seed: the seed of the trial.
        primary: names of the primary tests, which the data must have.
    """
    trial = _Trial(seed, primary)
    for name, run in conditions.items():
        trial.add(name, run)
    return trial.faults()


class _Trial:
    """The conditions that were tried, and their faults.

    Data are loaded once for all conditions that share them, and a metric is tried once for each
    model and data set.
    """

    def __init__(self, seed: int, primary: Iterable[str]) -> None:
        self.seed = seed
        self.primary = list(primary)
        self.loaded: dict[str, Data | None] = {}
        self.measured: set[str] = set()
        self.missing_tests: set[str] = set()
        self.names: dict[str, str] = {}  # hash of a run -> name of its condition
        self.failed: dict[str, list[str]] = {}  # message -> names of the conditions
        self.other_faults: list[str] = []

    def add(self, name: str, run: Run) -> None:
        """Try a condition, and keep its faults."""
        run = run.model_copy(update={"seed": self.seed})
        with self._keep_fault(name):
            call(run.loss, run.loss_args)
        with self._keep_fault(name):
            Metric(run)

        data = self._load(name, run)
        model = self._make_model(name, run, data)
        with self._keep_fault(name):
            make_optimizer(run, nn.Linear(1, 1) if model is None else model)

        if model is not None and data is not None:
            self._measure(name, run, model, data)
        if data is not None:
            self._find_missing_tests(run, data)
        self._find_equal(name, run)

    def faults(self) -> list[str]:
        """Return all faults, one line each. Conditions that fail alike share a line."""
        lines = []
        for message, names in self.failed.items():
            where = ", ".join(dict.fromkeys(names))
            lines.append(f"conditions.{where}: {message}")
        return lines + self.other_faults

    @contextmanager
    def _keep_fault(self, name: str) -> Iterator[None]:
        """Keep the message of an error, and continue."""
        try:
            yield
        except ValueError as error:
            self.failed.setdefault(str(error), []).append(name)

    def _load(self, name: str, run: Run) -> Data | None:
        """Return the data of a run, or None if they can't be loaded."""
        key = _data_key(run)
        if key not in self.loaded:
            self.loaded[key] = None
            with self._keep_fault(name):
                self.loaded[key] = load_data(run)
        return self.loaded[key]

    def _make_model(self, name: str, run: Run, data: Data | None) -> nn.Module | None:
        """Return the model with its spec attached, or None if it can't be made."""
        if data is None:
            return None
        with self._keep_fault(name):
            model, _ = make_model(run, data)
            return model
        return None

    def _measure(self, name: str, run: Run, model: nn.Module, data: Data) -> None:
        """Try the metric, unless another condition has the same one on the same model and data."""
        settings = (run.loss, run.model, run.model_args, run.metric, run.metric_args)
        key = repr((_data_key(run), *settings))
        if key in self.measured:
            return
        self.measured.add(key)
        with self._keep_fault(name):
            try_metric(run, model, data)

    def _find_missing_tests(self, run: Run, data: Data) -> None:
        """Report a primary test that the data do not have, once."""
        for test in self.primary:
            if test in data.tests or test in self.missing_tests:
                continue
            self.missing_tests.add(test)
            there = ", ".join(data.tests)
            self.other_faults.append(f"primary: {run.data} has no test {test!r}; it has {there}")

    def _find_equal(self, name: str, run: Run) -> None:
        """Report a condition whose run another condition has."""
        first = self.names.setdefault(run_hash(run), name)
        if first != name:
            self.other_faults.append(f"conditions {first!r} and {name!r} are the same")


def _data_key(run: Run) -> str:
    """Return a text that is the same for all conditions with the same data."""
    return repr((run.data, run.data_args))
