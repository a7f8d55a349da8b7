"""``Regularize``: callbacks for the training of Ultralytics' YOLO models."""

from typing import Any

from .driver import TrainerDriver


class Regularize(TrainerDriver):
    """Callbacks that put regularizers on the model that ``YOLO.train`` builds and trains.

    Hooks on ``YOLO(...).model`` are lost, because the trainer builds another model. Checkpoints
    hold the averaged model, which has no hooks, so they load without this package. The `Attachment`
    is ``regularize.attached``, also after the training.

    Example:
        >>> regularize = Regularize({"model.[678]": DropBlock2d(p=LinearSchedule(0.0, 0.1))})
        >>> yolo = YOLO("yolo11n-cls.yaml")  # doctest: +SKIP
        >>> regularize.add_to(yolo)  # doctest: +SKIP
        >>> yolo.train(data="imagenette", epochs=20)  # doctest: +SKIP

    Args:
        spec: any spec that `attach` accepts. The unit of its schedules is the epoch, with
            fractions. Schedules without epochs take the length of the training.
        root: name of the submodule where names begin.

    Raises:
        SpecError: before the first training step, for a spec that does not fit the model.
    """

    def __init__(self, spec: Any, *, root: str = "") -> None:
        super().__init__(spec, root=root)

    def add_to(self, yolo: Any) -> None:
        """Add the callbacks to a ``YOLO`` model, or to a trainer of Ultralytics."""
        yolo.add_callback("on_train_start", self._begin)
        yolo.add_callback("on_train_batch_start", self._tick)
        yolo.add_callback("on_train_epoch_end", self._end_epoch)
        yolo.add_callback("teardown", self._end)

    def _begin(self, trainer: Any) -> None:
        is_limited_by_hours = bool(trainer.args.time)
        length = None if is_limited_by_hours else trainer.epochs
        self.begin(trainer.model, length, scaler=trainer.scaler, optimizers=trainer.optimizer)

    def _tick(self, trainer: Any) -> None:
        self.tick(trainer.epoch, batches=len(trainer.train_loader))

    def _end_epoch(self, trainer: Any) -> None:
        self.end_epoch()
        if self.attached is None:
            return
        # only the rates, because each line of results.csv must have the same columns
        for key, rates in self.attached.rates.items():
            for name, rate in rates.items():
                trainer.lr[f"reg/{key}/{name}"] = rate

    def _end(self, trainer: Any) -> None:
        self.end()
