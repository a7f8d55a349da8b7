"""Regularizers from the Trainer of Lightning: one callback, which attaches, steps and removes."""

import math
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ..attach import attach
from ..attachment.attachment import Attachment
from ..attachment.epoch_checks import tell_faults
from ..attachment.resolve import checked_epochs
from ..checks import as_count, check_option
from ..schedules import length_of
from ..spec.spec import Draft
from ..warn import warn

_PACKAGES: list[Any] = [
    import_module(name)
    for name in ("lightning.pytorch", "pytorch_lightning")
    if find_spec(name.partition(".")[0])
]
if not _PACKAGES:
    raise ImportError("the callback is for Lightning, which is not here: pip install lightning")
_MAKES_LAYERS = ("setup", "configure_model", "configure_sharded_model")
_Callback: Any = type("_Callback", tuple(each.Callback for each in _PACKAGES), {})


class Regularize(_Callback):  # type: ignore[misc]  # its base is made above
    """A callback that puts regularizers on a LightningModule for the time of ``trainer.fit``.

    The trainer gives the length of the training, the time, the GradScaler and the optimizers. After
    each epoch the callback warns of what `Attachment.verify` finds. Its state is in the trainer's
    checkpoints. A Trainer takes one callback for each unit and root.

    Example:
        >>> callback = Regularize({"model.layer4.*": DropBlock2d(p=LinearSchedule(0.0, 0.1))})
        >>> callback.attached is None  # before fit
        True

    Args:
        spec: what `attach` takes; the names are those of the LightningModule.
        unit: of the schedules: "epoch", or "step" for steps of the optimizer.
        log_every_n_steps: how often ``log_dict`` gets the rates and shares within an epoch, beside
            each epoch's end.
        root: name of the submodule where names begin, for example ``"model"``.
        epochs: how long the training is, in `unit`, instead of what the trainer says.
        fractions: whether the time moves within an epoch, by ``1 / num_training_batches`` a batch.
        rng_state: whether checkpoints of one process hold torch's random state, so that a resumed
            run draws the same masks.
        strict: False takes what fits from a checkpoint of another spec.

    Attributes:
        attached: the `Attachment`, also after fit; None before.

    Raises:
        ValueError, TypeError: for a bad argument. A fault of the spec is told when fit begins.
    """

    def __init__(
        self,
        spec: Any,
        unit: str = "epoch",
        log_every_n_steps: int | None = None,
        *,
        root: str = "",
        epochs: int | None = None,
        fractions: bool = True,
        rng_state: bool = True,
        strict: bool = True,
    ) -> None:
        check_option("unit", unit, ("epoch", "step"))
        if log_every_n_steps is not None:
            as_count("log_every_n_steps", log_every_n_steps)
        self.spec, self.unit, self.root, self.strict = spec, unit, root, strict
        self.log_every_n_steps, self.epochs = log_every_n_steps, checked_epochs(epochs)
        self.fractions, self.rng_state = fractions, rng_state
        self.attached: Attachment | None = None
        self._fitting = self._within_epoch = self._trained = False
        self._loaded: Mapping[str, Any] | None = None
        self._counts: Mapping[str, Any] | None = None
        self._random_on: torch.device | None = None

    @property
    def state_key(self) -> str:
        """The name of the state in a checkpoint. Each of several callbacks needs its own."""
        return f"{type(self).__qualname__}{ {'unit': self.unit, 'root': self.root}!r}"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Attach, if the model has its layers already."""
        if stage != "fit":
            return
        self.attached = self._loaded = None
        self._fitting, self._within_epoch, self._trained = True, False, False
        alone = self.rng_state and trainer.world_size == 1
        self._random_on = trainer.strategy.root_device if alone else None
        self._attach(trainer, pl_module, "setup")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, if the model is made or sharded after `setup`."""
        self._attach(trainer, pl_module, "on_fit_start")
        self._restore_random()

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Save the counts."""
        self._counts = None if self.attached is None else self.attached.state_dict()

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the counts, because the sanity check is not part of an epoch."""
        if self.attached is not None and self._counts is not None:
            self.attached.load_state_dict(self._counts)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, if the length of the training depends on the data loader."""
        self._attach(trainer, pl_module, "on_train_start")
        if any(site.regularizer.accumulates for site in self._on()):
            self._on().optimizer = trainer.optimizers
        if trainer.ckpt_path is not None and self._loaded is None:
            warn(
                f"the checkpoint has no state of {self.state_key}: the counts of its sites begin "
                "anew, and the masks are not those that would have come"
            )
        if self._loaded is not None and self._loaded["within_epoch"]:
            self._restore_random()  # the loader has drawn its order once more

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Move the schedules."""
        self._step(trainer, 0)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the schedules."""
        self._within_epoch = self._trained = True
        self._step(trainer, batch_idx)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, every `log_every_n_steps` steps."""
        self._within_epoch = not trainer.is_last_batch
        every = self.log_every_n_steps
        if every is not None and trainer.global_step % every == 0:
            self._log(trainer, pl_module, on_step=True)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """A checkpoint that is saved now continues within the epoch."""
        self._within_epoch = self._fitting and not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log, and warn of new problems."""
        self._log(trainer, pl_module, on_step=False)
        trained, self._within_epoch, self._trained = self._trained, False, False
        if trained:  # else it was resumed at its end
            tell_faults(self._on())

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove the hooks."""
        self._fitting = False
        if self.attached is not None:
            self.attached.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the hooks."""
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoint; it calls this on all ranks and keeps that of the first."""
        if self.attached is None:
            return {}
        state: dict[str, Any] = {
            "attached": self.attached.state_dict(),
            "within_epoch": self._within_epoch,
        }
        if self._random_on is not None:
            state["random"] = {"cpu": torch.get_rng_state()}
            if self._random_on.type == "cuda":
                state["random"]["cuda"] = torch.cuda.get_rng_state(self._random_on)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From Lightning's checkpoint, when it fits; the state waits until there are sites."""
        if self._fitting:  # else a model is evaluated, and the report remains that of its training
            self._loaded = state_dict
            self._take_over()
            self._restore_random()

    def _on(self) -> Attachment:
        assert self.attached is not None
        return self.attached

    def _attach(self, trainer: Any, module: Any, hook: str) -> None:
        """Attach, if this is the first hook in which all is there that it takes."""
        if self.attached is not None or self._first_hook(trainer, module) != hook:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is None and module.automatic_optimization:
            scaler = False  # a module that optimizes by itself may have one of its own
        epochs = self._length(trainer, hook)
        self.attached = attach(module, self.spec, root=self.root, epochs=epochs, grad_scaler=scaler)
        self._take_over()

    def _first_hook(self, trainer: Any, module: Any) -> str:
        if self.unit == "step" and trainer.max_epochs != -1 and self._needs_length():
            return "on_train_start"  # a loader made before would miss its state in the checkpoint
        made = any(
            getattr(type(module), name, None)
            not in [getattr(p.LightningModule, name, None) for p in _PACKAGES]
            for name in _MAKES_LAYERS
        )
        late = made or trainer.strategy.restore_checkpoint_after_setup  # it shards the model
        return "on_fit_start" if late else "setup"

    def _needs_length(self) -> bool:
        """Whether a schedule follows the length of the training."""
        return self.epochs is None and any(
            length_of(rate) is None
            for entry in Draft.of(self.spec).entries
            for regularizer in entry.regularizers or ()
            for rate in regularizer.rates.values()
        )

    def _length(self, trainer: Any, hook: str) -> int | None:
        """How long the training is, in the unit of the schedules, if that is known."""
        if self.epochs is not None:
            return self.epochs
        length = trainer.max_epochs
        if self.unit == "step":
            known = length == -1 or hook == "on_train_start"
            length = trainer.estimated_stepping_batches if known else -1
        return int(length) if 0 < length < math.inf else None

    def _step(self, trainer: Any, batch_idx: int) -> None:
        n = trainer.num_training_batches
        share = batch_idx / n if self.fractions and batch_idx < n < math.inf else 0.0
        step = self.unit == "step"
        self._on().step(trainer.global_step if step else trainer.current_epoch + share)

    def _log(self, trainer: Any, module: Any, on_step: bool) -> None:
        if not trainer.barebones:  # it forbids to log
            module.log_dict(
                self._on().scalars(),
                on_step=on_step,
                on_epoch=not on_step,
                batch_size=1,
                sync_dist=True,  # says that it is known; the numbers remain those of the first rank
                rank_zero_only=True,
            )

    def _take_over(self) -> None:
        if self.attached is not None and self._loaded is not None:
            self.attached.load_state_dict(self._loaded["attached"], strict=self.strict)

    def _restore_random(self) -> None:
        """Torch's random state as the checkpoint has it, on one process."""
        random = {} if self._loaded is None else self._loaded.get("random", {})
        if self._random_on is not None and random:
            torch.set_rng_state(random["cpu"])
            if self._random_on.type == "cuda" and "cuda" in random:
                torch.cuda.set_rng_state(random["cuda"], self._random_on)
