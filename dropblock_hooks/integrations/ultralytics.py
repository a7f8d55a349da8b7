"""``Regularize``: a callback for the training of Ultralytics' YOLO models."""

import json
from pathlib import Path
from typing import Any

from ..attachment.attachment import Attachment
from .driver import TrainerDriver

_EVENTS = (
    "on_train_start",
    "on_train_batch_start",
    "on_train_epoch_end",
    "on_model_save",
    "teardown",
)


class Regularize:
    """Callbacks that put regularizers on the model that ``YOLO.train`` builds and trains.

    Call `add_to` before ``train``. Hooks on ``YOLO(...).model`` are lost, because the trainer
    builds another model. The checkpoints hold the averaged model, which has no hooks, so they load
    without this package. The state of the regularizers is beside them, in ``regularize.json``.

    Example:
        >>> from dropblock_hooks.integrations.ultralytics import Regularize
        >>> regularize = Regularize({"model.[678]": DropBlock2d(p=LinearSchedule(0.0, 0.1))})
        >>> yolo = YOLO("yolo11n-cls.yaml")  # doctest: +SKIP
        >>> regularize.add_to(yolo)  # doctest: +SKIP
        >>> yolo.train(data="imagenette", epochs=20)  # doctest: +SKIP

    Args:
        spec: any spec that `attach` accepts. The unit of its schedules is the epoch, with
            fractions. Schedules without epochs take the length of the
            training.
        root: name of the submodule where names begin.
        strict: False loads the matching parts of the state of another spec.

    Attributes:
        attached: the `Attachment`, also after the training; None before it begins.

    Raises:
        SpecError: before the first training step, for a spec that does not fit the model.
        ValueError: on resuming, for the state of another spec.
    """

    def __init__(self, spec: Any, *, root: str = "", strict: bool = True) -> None:
        self._driver = TrainerDriver(spec, root=root, strict=strict)

    @property
    def attached(self) -> Attachment | None:
        """The `Attachment`, also after the training; None before it begins."""
        return self._driver.attached

    def add_to(self, yolo: Any) -> None:
        """Add the callbacks to a ``YOLO`` model, or to a trainer of Ultralytics."""
        for event in _EVENTS:
            yolo.add_callback(event, getattr(self, event))

    def on_train_start(self, trainer: Any) -> None:
        """Attach to the model of the trainer, whose averaged copy exists by now."""
        resumed, file = trainer.start_epoch > 0, self._file(trainer)
        self._driver.load(json.loads(file.read_text()) if resumed and file.exists() else None)
        self._driver.begin(
            trainer.model,
            None if trainer.args.time else trainer.epochs,  # limited by hours
            scaler=trainer.scaler,
            optimizers=trainer.optimizer,
            resumed=resumed,
        )

    def on_train_batch_start(self, trainer: Any) -> None:
        """Move the schedules."""
        self._driver.tick(trainer.epoch, batches=len(trainer.train_loader))

    def on_train_epoch_end(self, trainer: Any) -> None:
        """Warn of new findings, and log the rates with the learning rates."""
        self._driver.end_epoch()
        if self.attached is not None:
            for key, rates in self.attached.rates.items():  # results.csv needs equal columns
                trainer.lr.update({f"reg/{key}/{name}": value for name, value in rates.items()})

    def on_model_save(self, trainer: Any) -> None:
        """Write the state beside the checkpoint."""
        self._file(trainer).write_text(json.dumps(self._driver.state()))

    def teardown(self, trainer: Any) -> None:
        """Remove the hooks, also if the training raised."""
        self._driver.end()

    def _file(self, trainer: Any) -> Path:
        return Path(trainer.wdir, "regularize.json")
