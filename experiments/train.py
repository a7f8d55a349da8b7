"""One training run: `train(Config(...)) -> Result`, on one device or many, stopped and resumed.

Two runs of one seed share the split, the label noise, the initial weights, the order of the
batches and the augmentation, whatever is attached to the model: each has a generator of its own,
and only the masks are drawn from torch's global one.

    >>> from experiments.config import Config
    >>> small = {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8]}
    >>> spec = {"layer4.0": {"Dropout2d": {"p": 0.5}}}
    >>> result = train(Config(spec, model_args=small, data="fake", epochs=1, train_images=50))
    >>> result.epochs[0].nominal
    {'layer4.0/Dropout2d': 0.5}
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from experiments import checkpoint
from experiments.config import Config, Runtime, resolve
from experiments.data import Data, load_data
from experiments.loaders import train_loader
from experiments.log import Log
from experiments.memory import PeakMemory
from experiments.models import prepare
from experiments.optimization import LearningRate, Targets, make_optimizer
from experiments.processes import gather, make_fabric, own_masks
from experiments.results import Best, Epoch, Result
from experiments.scoring import Kept, Scorer, is_better
from experiments.seeds import derive_seed
from experiments.totals import Totals, site_counts


class Stopped(Exception):
    """The run was asked to stop; its checkpoint is written."""


def train(
    config: Config,
    runtime: Runtime | None = None,
    out: Path | None = None,
    *,
    stop: Callable[[], bool] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> Result:
    """Train a fresh model, and test it.

    Args:
        config: what to do.
        runtime: where and how; the defaults if None.
        out: folder of `metrics.jsonl` and `checkpoint.pt`, made if need be; the run goes on from
            the checkpoint that is there. None keeps nothing.
        stop: asked after every batch; True writes the checkpoint and raises `Stopped`.
        on_epoch: called when an epoch is over.

    Raises:
        ValueError: if the config fits neither model nor data, or `out` holds another run.
        CheckpointDamaged: if the checkpoint can't be read.
        OSError: if `out` can't be written.
        Stopped: when `stop` said so.
    """
    runtime = runtime or Runtime()
    if runtime.loggers and out is None:
        raise ValueError(f"log={runtime.log!r} needs a folder (out), by which a log is continued")
    config = resolve(config)
    torch.set_num_threads(config.threads)
    fabric = make_fabric(config, runtime)
    fabric.launch()
    data = load_data(config, runtime.data_dir)
    with own_masks(config, fabric):
        training = Training(config, runtime, fabric, data, out)
        with training.log:
            status = training.run(stop or (lambda: False), on_epoch or (lambda epoch: None))
            return training.result(status)


def make_average(config: Config, model: nn.Module) -> ModelEmaV3 | None:
    """The average of the weights, if one is asked for; of 16-bit weights it has 32 bits."""
    if config.ema is None:
        return None
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    return ModelEmaV3(model, decay=config.ema, dtype=dtype)


class Training:
    """All that changes in a run, from the first batch to the last.

    Args:
        config: a resolved config.
        runtime: where and how.
        fabric: launched.
        data: of the config.
        out: folder of metrics and checkpoint; None for none.
    """

    def __init__(
        self, config: Config, runtime: Runtime, fabric: Fabric, data: Data, out: Path | None
    ) -> None:
        self.config, self.runtime, self.fabric = config, runtime, fabric
        self.data, self.out = data, out
        self._began, self._saved = perf_counter(), monotonic()
        self._memory = PeakMemory(fabric.device)
        rank, processes = fabric.global_rank, fabric.world_size
        self.loader = train_loader(data, config, runtime, rank, processes)
        self.targets = Targets(config, data.classes, len(data.train), rank)
        scaler = getattr(fabric.strategy.precision, "scaler", None)
        self.bare, self.attached = prepare(config, data, scaler)
        optimizer = make_optimizer(config, self.bare)
        self.rate = LearningRate(config, optimizer, len(self.loader))
        self.bare.to(fabric.device)
        self.model, self.optimizer = fabric.setup(self._maybe_compiled(), optimizer)
        self.average = make_average(config, self.bare)
        self.epoch = self.batch = 0
        self.totals = Totals()
        self.epochs: list[Epoch] = []
        self.kept: Kept | None = None
        self.scorer = Scorer(config, runtime, fabric)
        self.seconds, self.memory = 0.0, 0
        if out is not None:
            checkpoint.restore(self, out / "checkpoint.pt")
        first = out if fabric.is_global_zero else None
        self.log = Log(first, runtime.loggers, config, self.epochs)

    def modules(self) -> dict[str, Any]:
        """What a checkpoint restores in place."""
        average = {} if self.average is None else {"average": self.average.module}
        return {"model": self.model, "optimizer": self.optimizer, **average}

    def state_dict(self) -> dict[str, Any]:
        """All else that a checkpoint holds; each process has to ask."""
        device = self.fabric.device
        own = {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(device).cpu() if device.type == "cuda" else None,
            "targets": self.targets.state_dict(),
            "attached": self.attached.state_dict() if self.attached else None,
            "totals": asdict(self.totals),
        }
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "best": None if self.kept is None else {**vars(self.kept)},
            "rate": self.rate.state_dict(),
            "precision": self.fabric.strategy.precision.state_dict(),
            "seconds": self.seconds,
            "memory": self.memory,
            "processes": gather(self.fabric, own),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, be it of another number of processes."""
        fabric, processes = self.fabric, state["processes"]
        self.epoch, self.batch = state["epoch"], state["batch"]
        self.epochs = [Epoch(**epoch) for epoch in state["epochs"]]
        best = state.get("best")  # older ones have none
        self.kept = None if best is None else Kept(**best)
        self.rate.load_state_dict(state["rate"])
        fabric.strategy.precision.load_state_dict(state["precision"])
        self.seconds, self.memory = state["seconds"], state["memory"]
        same = len(processes) == fabric.world_size
        own = processes[fabric.global_rank if same else 0]
        self.totals = Totals(**own["totals"])
        if self.attached:
            self.attached.load_state_dict(own["attached"])
        if not same:  # other processes can't draw the same masks: they begin anew from here
            place = f"masks/{fabric.global_rank}/{self.epoch}/{self.batch}"
            torch.manual_seed(derive_seed(self.config.seed, place, self.config.replica))
            return
        self.targets.load_state_dict(own["targets"])
        torch.set_rng_state(own["torch"])
        if own["cuda"] is not None:
            torch.cuda.set_rng_state(own["cuda"], fabric.device)

    def _maybe_compiled(self) -> nn.Module:
        """The model, compiled if that is asked for, to code that only its sizes decide."""
        if not self.config.compile:
            return self.bare
        torch.compiler.reset()  # what was compiled in this process before would leave its traces
        return torch.compile(self.bare, dynamic=False)

    def run(
        self, stop: Callable[[], bool], on_epoch: Callable[[Epoch], None]
    ) -> Literal["finished", "diverged"]:
        """Train to the end, or until the loss is no longer finite."""
        while self.epoch < self.config.epochs:
            if self.batch == 0:
                if self.attached:
                    self.attached.step(self.epoch)
                self.totals = Totals(site_counts(self.attached))
            self._train_epoch(stop)
            lr, mixed = self.rate.last, self.targets.mixes
            epoch = self.totals.epoch(self.fabric, self.attached, self.epoch, lr, mixed)
            if not math.isfinite(epoch.loss):
                return "diverged"
            epoch = self._scored(epoch)
            self.epochs.append(epoch)
            self.epoch, self.batch = self.epoch + 1, 0
            self.log.epoch(epoch, self.attached)
            if self.fabric.is_global_zero:
                on_epoch(epoch)
            self._pause(stop)
        return "finished"

    def _train_epoch(self, stop: Callable[[], bool]) -> None:
        self.model.train()
        self.loader.begin(self.epoch, self.batch)
        start = perf_counter()
        for images, labels in self.loader:
            self._step(*self.fabric.to_device((images, labels)))
            self.batch += 1
            now = perf_counter()
            self.totals.seconds += now - start
            start = now
            if self.batch < len(self.loader):
                self._pause(stop)

    def _step(self, images: Tensor, labels: Tensor) -> None:
        images, targets = self.targets.mix(images, labels)
        scores = self.model(images)
        loss = self.targets.loss(scores.float(), targets)
        self.fabric.backward(loss)
        limit = self.config.clip_grad_norm or math.inf
        norm = self.fabric.clip_gradients(
            self.model, self.optimizer, max_norm=limit, error_if_nonfinite=False
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rate.step(done := self.epoch * len(self.loader) + self.batch + 1)
        if self.average is not None:
            self.average.update(self.bare, done)
        right = (scores.argmax(dim=1) == labels).sum()
        self.totals.add(len(labels), loss, right, norm, norm.clamp(max=limit))

    def result(self, status: Literal["finished", "diverged"]) -> Result:
        """Test the model, or its average, and close the run."""
        scores: dict[str, float] = {}
        losses: dict[str, float] = {}
        if status == "finished":
            if self.average is not None:
                convert = self.fabric.strategy.precision.convert_module
                self.average.module = convert(self.average.module)
            tested = self._tested_model
            for name, images in self.data.tests.items():
                scores[name], losses[name] = self.scorer.score(tested, images, name)
        if not math.isfinite(losses.get("clean", 0.0)):  # the last step was one too far
            status, scores, losses = "diverged", {}, {}
        self.pass_time()
        if self.out is not None and status == "finished":
            checkpoint.save(self, self.out / "checkpoint.pt")
        best = self._best(scores) if status == "finished" else None
        self.pass_time()
        self.log.test(self.config.epochs, scores, best)
        loss = losses.get("clean")
        return Result(status, scores, loss, self.epochs, self.seconds, self.memory, best)

    @property
    def _tested_model(self) -> nn.Module:
        """What scores are those of: the average, if there is one."""
        whole = self.model if self.scorer.is_sharded else self.bare
        return whole if self.average is None else self.average.module

    def _scored(self, epoch: Epoch) -> Epoch:
        """The epoch with its scores in evaluation; of the best one so far, the weights are kept."""
        images = self.data.validation
        if images is None and not self.config.test_epochs:
            return epoch
        model = self.scorer.copied(self._tested_model)
        if self.config.test_epochs:
            test, _ = self.scorer.score(model, self.data.tests["clean"], "clean")
            epoch = replace(epoch, test=test)
        if images is None:
            return epoch
        accuracy, loss = self.scorer.score(model, images, "validation")
        if is_better(accuracy, loss, self.kept):
            self.kept = Kept(epoch.epoch, accuracy, self.scorer.weights(model))
        known = loss if math.isfinite(loss) else None
        return replace(epoch, validation=accuracy, validation_loss=known)

    def _best(self, last: dict[str, float]) -> Best | None:
        """The best epoch, tested; a sharded model has its weights then, and no longer its own.

        Args:
            last: scores of the last epoch.
        """
        kept = self.kept
        if kept is None:
            return None
        scores = last
        if kept.epoch < self.config.epochs - 1:
            model = self.scorer.copied(self._tested_model)
            self.scorer.load(model, kept.weights)
            tests = self.data.tests.items()
            scores = {name: self.scorer.score(model, images, name)[0] for name, images in tests}
        return Best(kept.epoch, kept.validation, scores)

    def _pause(self, stop: Callable[[], bool]) -> None:
        """Write a checkpoint if it is time for one; leave if any process is asked to."""
        due, asked = monotonic() - self._saved >= self.runtime.checkpoint_seconds, stop()
        if self.fabric.world_size > 1:
            both = torch.tensor([due, asked], device=self.fabric.device).int()
            due, asked = map(bool, self.fabric.all_reduce(both, reduce_op="sum").tolist())
        if self.out is not None and (due or asked):
            self.pass_time()
            checkpoint.save(self, self.out / "checkpoint.pt")
            self._saved = monotonic()
        if asked:
            raise Stopped(f"stopped in epoch {self.epoch}, after {self.batch} batches of it")

    def pass_time(self) -> None:
        """Bring seconds and memory up to date."""
        now = perf_counter()
        self.seconds += now - self._began
        self._began = now
        self.memory = max(self.memory, self._memory.read())
