"""``Regularize``: a callback of Lightning's Trainer."""

from collections.abc import Mapping
from typing import Any

import torch

from .. import messages
from ..checks import as_count
from ..warn import warn
from .driver import TrainerDriver

try:
    from lightning.pytorch import Callback
except ImportError:  # under the older name
    from pytorch_lightning import Callback


class Regularize(Callback, TrainerDriver):  # type: ignore[misc]  # of a skipped package
    """A callback that puts regularizers on a LightningModule during ``trainer.fit``.

    The trainer gives the length of the training, the time, the GradScaler and the optimizers. After
    each epoch the callback warns of what `Attachment.verify` finds. Its state is in the trainer's
    checkpoints. A Trainer takes one callback for each unit and root. The `Attachment` is
    ``callback.attached``, also after fit.

    Example:
        >>> callback = Regularize({"model.layer4.*": DropBlock2d(p=LinearSchedule(0.0, 0.1))})
        >>> callback.attached is None  # before fit
        True

    Args:
        spec: any spec that `attach` accepts.
        unit: unit of the schedules: ``"epoch"``, or ``"step"`` for steps of the optimizer.
        log_every_n_steps: also pass the scalars to ``log_dict`` every so many steps, not only at
            the end of each epoch.
        root: name of the submodule where names begin.
        epochs: length of the training in `unit`, instead of the trainer's.
        fractions: whether the time moves within an epoch, by ``1 / num_training_batches`` a batch.
        rng_state: whether checkpoints of a single process hold torch's random state, so that a
            resumed run draws the same masks.
        strict: False loads the matching parts of the state of another spec.
        log_sites: whether the scalars of all sites are logged, not only means over the sites and
            the number of findings.

    Raises:
        SpecError: before the first training step, for a spec that does not fit the module.
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
        log_sites: bool = False,
    ) -> None:
        if log_every_n_steps is not None:
            as_count("log_every_n_steps", log_every_n_steps)
        if epochs is not None:
            as_count("epochs", epochs)

        TrainerDriver.__init__(self, spec, unit, root=root, strict=strict, log_sites=log_sites)
        self.log_every_n_steps = log_every_n_steps
        self.epochs = epochs
        self.fractions = fractions
        self.rng_state = rng_state
        self._within_epoch = False
        self._keeps_random = False
        self._is_set_up = False
        self._checkpoint: Mapping[str, Any] = {}

    @property
    def state_key(self) -> str:
        """The name of the state in a checkpoint.

        Before `setup` the name has a number of the callback, because Lightning refuses two equal
        names when a Trainer is made. So `setup` can refuse them with a clearer error.
        """
        key = str(self._generate_state_key(unit=self.unit, root=self.root))
        return key if self._is_set_up else f"{key}#{id(self)}"

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Forget the state of an earlier run, and warn of finders that run no other callbacks.

        Raises:
            ValueError: if the trainer has another callback with the same unit and root.
        """
        self._is_set_up = True
        keys = [callback.state_key.partition("#")[0] for callback in trainer.callbacks]
        count = keys.count(self.state_key)
        if count > 1:
            raise ValueError(
                f"the Trainer has {count} Regularize callbacks with unit={self.unit!r} and "
                f"root={self.root!r}, so their states would have the same name in a checkpoint: "
                "put all entries into the spec of a single callback"
            )

        self._checkpoint = {}
        self._max_epochs = trainer.max_epochs  # kept, because other callbacks may change it later
        self._keeps_random = self.rng_state and trainer.world_size == 1

        class_names = set()
        for callback in trainer.callbacks:
            class_names |= {cls.__name__ for cls in type(callback).__mro__}
        for finder in class_names & {"LearningRateFinder", "BatchSizeFinder"}:
            warn(messages.FINDER_WITHOUT_CALLBACK.format(finder=finder))

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Restore the random state, because the loader will draw its order from it."""
        self._restore_random()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Attach, because the layers now exist and are sharded, and the length is known."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # with manual optimization, the module may have a scaler of its own, so it stays unknown
        if scaler is None and module.automatic_optimization:
            scaler = False
        by_epoch = self.unit == "epoch"
        length = self._max_epochs if by_epoch else trainer.estimated_stepping_batches
        # LearningRateFinder restores a checkpoint of step 0, which is no resumed training
        is_resumed = trainer.ckpt_path is not None and trainer.global_step > 0

        self.load(self._checkpoint.get("attached"))
        self.begin(
            module,
            self.epochs or length,
            scaler=scaler,
            optimizers=trainer.optimizers,
            resumed=is_resumed,
        )
        if self._checkpoint.get("within_epoch"):
            # the loader has drawn its order again, which the saved run did before the checkpoint
            self._restore_random()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if getattr(trainer.fit_loop, "_skip_backward", False):
            return  # StochasticWeightAveraging's last epoch, which trains nothing

        self._within_epoch = True
        batches = trainer.num_training_batches if self.fractions else None
        self.tick(trainer.current_epoch, trainer.global_step, batch=batch_idx, batches=batches)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = self.log_every_n_steps
        if every is not None and trainer.global_step % every == 0:
            self._log(trainer, module, self.logged(), on_step=True)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._within_epoch = False
        self.end_epoch()
        self._log(trainer, module, self.logged(), on_step=False)

    def teardown(self, trainer: Any, module: Any, stage: Any) -> None:
        self.end()

    on_exception = teardown

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Lightning saves the state of the first rank."""
        attached = self.state()
        if attached is None:
            return {}

        state: dict[str, Any] = {"attached": attached, "within_epoch": self._within_epoch}
        if self._keeps_random:
            uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
            state_of_gpu = torch.cuda.get_rng_state() if uses_gpu else None
            state["random"] = {"cpu": torch.get_rng_state(), "cuda": state_of_gpu}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._checkpoint = state_dict
        self._restore_random()  # strategies such as FSDP load the checkpoint after `on_fit_start`

    def _log(self, trainer: Any, module: Any, scalars: dict[str, float], on_step: bool) -> None:
        """Pass scalars to the module's ``log_dict``, except in a barebones Trainer, which can't."""
        if not scalars or trainer.barebones:
            return
        module.log_dict(
            scalars,
            on_step=on_step,
            on_epoch=not on_step,
            batch_size=1,
            sync_dist=True,  # avoids a warning; with rank_zero_only=True, nothing is synchronized
            rank_zero_only=True,
        )

    def _restore_random(self) -> None:
        """Restore torch's random state from the checkpoint, if it has one that is of use here."""
        random = self._checkpoint.get("random")
        if not self._keeps_random or random is None:
            return
        torch.set_rng_state(random["cpu"])
        if random["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"])
