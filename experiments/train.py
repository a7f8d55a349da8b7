"""One training run, readable from top to bottom: `train(run) -> Result`.

Two runs with the same seed share the split, the weights, the order of the batches and the
augmentation, whatever is attached to the model. Each of these has a generator of
its own, and only the masks are drawn from torch's global generator.

Example:
    >>> from experiments.config import Run
    >>> small = {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8]}
    >>> spec = {"layer4.0": {"Dropout2d": {"p": 0.5}}}
    >>> run = Run(spec=spec, model_args=small, data_args={"train_images": 50}, epochs=1)
    >>> train(run).epochs[0]["nominal"]
    0.5
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

from dropblock_hooks import Attachment, Foreign
from experiments import checkpoint
from experiments.config import Run
from experiments.data import Data, load_data
from experiments.factories import FactoryError, call
from experiments.loading import batches, in_order
from experiments.metrics import Metric
from experiments.models import make_model
from experiments.seeds import derive_seed


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        status: finished, or diverged: the loss was no longer finite.
        scores: test -> metric after the last epoch; "validation" too, if there is such a set.
        epochs: for each epoch the training loss, the learning rate, the seconds, and the mean
            nominal and realized rate of the sites.
        chance: metric on the first test of a model that always says the most frequent class.
    """

    status: str
    scores: dict[str, float] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    chance: float | None = None


def train(
    run: Run,
    folder: Path | None = None,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
    workers: int = 0,
    tests: bool = True,
) -> Result:
    """Train a fresh model, or go on at the end of the last epoch, and test it.

    Args:
        run: the fields of the run.
        folder: the folder of the checkpoint after each epoch. None writes no checkpoint.
        on_epoch: called after each epoch with its numbers.
        workers: processes that load items.
        tests: whether the tests are scored. A search scores the validation set alone.

    Raises:
        FactoryError: if a factory fails, or its parts do not fit each other.
        ValueError: if the spec does not fit the model.
    """
    torch.set_num_threads(run.threads)
    device = device_of(run)
    data = load_data(run)
    with seeded(device, derive_seed(run.seed, "masks/0", run.replica)):
        training = _Training(run, data, device, workers)
        if folder is not None:
            training.load(checkpoint.load(folder))

        while training.epoch < run.epochs:
            finite = training.train_epoch()
            if not finite:
                return Result("diverged", epochs=training.epochs)
            if folder is not None:
                checkpoint.save(folder, training.state())
            if on_epoch is not None:
                on_epoch(training.epochs[-1])

        scores = training.scores(tests)
        return Result("finished", scores, training.epochs, training.chance)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's global generators, and put them back at the end."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class _Training:
    """The objects that change in a run, such as the model and the optimizer."""

    def __init__(self, run: Run, data: Data, device: torch.device, workers: int) -> None:
        self.run = run
        self.data = data
        self.device = device
        self.workers = workers
        self.epoch = 0
        self.epochs: list[dict[str, Any]] = []
        self.chance: float | None = None

        scales = run.precision == "16-mixed"
        self.scaler = torch.amp.GradScaler(device.type, enabled=scales)
        self.bare, self.attached = make_model(run, data, self.scaler if scales else None)
        self.bare.to(device)
        self.model = self.bare
        if run.compile:
            torch.compiler.reset()  # so that earlier runs of this process change nothing
            self.model = torch.compile(self.bare, dynamic=False)

        self.optimizer = make_optimizer(run, self.bare)
        steps = math.ceil(len(data.train) / run.batch_size)  # type: ignore[arg-type]
        self.schedule = make_schedule(run, self.optimizer, steps)

        self.loss = call(run.loss, run.loss_args)
        if isinstance(self.loss, nn.Module):
            self.loss.to(device)

    def train_epoch(self) -> bool:
        """Train one epoch; return whether the loss stayed finite."""
        self.model.train()
        if self.attached:
            self.attached.step(self.epoch)

        began = perf_counter()
        lr = 0.0
        losses = []
        for batch in batches(self.data.train, self.run, self.epoch, self.workers):
            lr = self.optimizer.param_groups[0]["lr"]
            losses.append(self._step(batch))  # read at the end, so that no step waits
        mean_loss = sum(torch.stack(losses).cpu().double().tolist()) / len(losses)
        rates = mean_rates(self.attached)
        seconds = perf_counter() - began

        if not math.isfinite(mean_loss):
            return False
        row = {"epoch": self.epoch, "loss": mean_loss, "lr": lr, "seconds": seconds, **rates}
        self.epochs.append(row)
        self.epoch += 1
        return True

    def _step(self, batch: Any) -> Tensor:
        """Train on a batch; return its loss."""
        inputs, targets = moved(batch, self.device)
        loss = self.loss(self._outputs(self.model, inputs), targets)

        self.scaler.scale(loss).backward()
        if self.run.clip_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.bare.parameters(), self.run.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.detach().reshape(())

    def _outputs(self, model: nn.Module, inputs: Any) -> Any:
        precision = self.run.precision
        dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
        with torch.autocast(self.device.type, dtype, enabled=precision != "32-true"):
            outputs = model(inputs)
        return outputs.float() if isinstance(outputs, Tensor) else outputs

    def scores(self, tests: bool) -> dict[str, float]:
        """Return the metric of every test, and of the validation set."""
        sets = dict(self.data.tests) if tests else {}
        if self.data.validation is not None:
            sets["validation"] = self.data.validation
        return {name: self._score(name, dataset) for name, dataset in sets.items()}

    @torch.no_grad()
    def _score(self, name: str, dataset: Any) -> float:
        """Return the metric of a data set. Masks drawn in evaluation have a seed of their own."""
        run = self.run
        cpu = torch.device("cpu")
        metric = Metric(run)
        self.bare.eval()
        with seeded(self.device, derive_seed(run.seed, f"test/{name}/0", run.replica)):
            for batch in in_order(dataset, run, self.workers):
                inputs, targets = moved(batch, self.device)
                outputs = self._outputs(self.bare, inputs)
                metric.add(moved(outputs, cpu), moved(targets, cpu))

        value = metric.value(name)
        if self.chance is None:
            self.chance = metric.chance()
        if not math.isfinite(value):
            raise FactoryError(
                f"{run.metric!r} must return a finite number, got {value} on {name!r}"
            )
        return value

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint at the end of an epoch."""
        cuda = self.device.type == "cuda"
        return {
            "epochs": self.epochs,
            "model": self.bare.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "attached": self.attached.state_dict() if self.attached else None,
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if cuda else None,
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Load a checkpoint, to continue from it."""
        if state is None:
            return
        self.epochs = state["epochs"]
        self.epoch = len(self.epochs)
        self.bare.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        if self.attached:
            self.attached.load_state_dict(state["attached"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], self.device)


def device_of(run: Run) -> torch.device:
    """Return the device of a run; `auto` takes a GPU if the machine has one.

    Raises:
        FactoryError: if there is no such device.
    """
    has_cuda = torch.cuda.is_available()
    if run.accelerator == "auto":
        return torch.device("cuda" if has_cuda else "cpu")

    available = {"cpu": True, "cuda": has_cuda, "mps": torch.backends.mps.is_available()}
    if not available[run.accelerator]:
        raise FactoryError(f"accelerator: there is no {run.accelerator} device here")
    return torch.device(run.accelerator)


def moved(value: Any, device: torch.device) -> Any:
    """Move all tensors of a value, also those in lists, tuples and mappings, to a device."""
    if isinstance(value, Tensor):
        return value.to(device)

    if isinstance(value, MutableMapping):
        mapping = copy.copy(value)
        for key, item in value.items():
            mapping[key] = moved(item, device)
        return mapping

    if isinstance(value, list | tuple):
        items = [moved(item, device) for item in value]
        if hasattr(value, "_fields"):  # a named tuple takes its items one by one
            return type(value)(*items)
        return type(value)(items)
    return value


def make_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer of timm. Biases and norms have no weight decay; `sgd` has Nesterov.

    Raises:
        FactoryError: if timm has no such optimizer, or it does not take `optimizer_args`.
    """
    try:
        return create_optimizer_v2(
            model,
            opt=run.optimizer,
            lr=run.lr,
            weight_decay=run.weight_decay,
            momentum=run.momentum,
            **run.optimizer_args,
        )
    except Exception as error:  # timm raises many kinds
        raise FactoryError(f"optimizer {run.optimizer!r} can't be made: {error}") from error


def make_schedule(run: Run, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """Return the schedule of the learning rate over all steps of the training.

    Args:
        run: the run with the schedule and the epochs.
        optimizer: the optimizer whose learning rate moves.
        steps: number of steps of an epoch.
    """
    total_steps = run.epochs * steps
    if run.schedule == "onecycle":
        return OneCycleLR(optimizer, run.lr, total_steps)
    if run.schedule == "cosine":
        return CosineAnnealingLR(optimizer, total_steps)
    return LambdaLR(optimizer, lambda step: 1.0)


def mean_rates(attached: Attachment | None) -> dict[str, float | None]:
    """Return the mean rate of the sites that drop, and their mean dropped share in this epoch."""
    dropping = [
        site
        for site in attached or ()
        if isinstance(site.regularizer, Foreign) or hasattr(site.regularizer, "p")
    ]
    return {
        "nominal": _mean([site.rate for site in dropping]),
        "realized": _mean([site.realized_rate for site in dropping]),
    }


def _mean(rates: list[float | None]) -> float | None:
    """Return the mean of the rates that are known."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else None
