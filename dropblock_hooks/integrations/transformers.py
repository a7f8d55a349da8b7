"""``Regularize``: a callback of the Trainer of Hugging Face's Transformers."""

from typing import Any

from transformers.trainer_callback import DefaultFlowCallback, ExportableState, TrainerCallback

from ..specs.spec import Spec
from .driver import TrainerDriver

_ONE_CALLBACK = "a Trainer takes one Regularize callback, with all of the spec"


class Regularize(TrainerCallback, ExportableState, TrainerDriver):  # type: ignore[misc]  # of a skipped package
    """A callback that puts regularizers on the model of a Trainer, for its training.

    The Trainer gives the time, the length of the training and the GradScaler. Scalars go into its
    logs, the state into its checkpoints. After each epoch the callback warns of what
    `Attachment.verify` finds. The end of training removes the hooks. If the training raises, call
    ``callback.attached.remove()``. A Trainer takes one such callback. Add it by `add_to`, or with
    ``Trainer(..., callbacks=[callback])``, where reporters such as TensorBoard get no scalars.

    Example:
        >>> from dropblock_hooks.integrations.transformers import Regularize
        >>> callback = Regularize({"bert.encoder.layer.*": Dropout(p=LinearSchedule(0.0, 0.1))})
        >>> trainer = Trainer(model, args, train_dataset=data)  # doctest: +SKIP
        >>> callback.add_to(trainer)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP

    Args:
        spec: any spec that `attach` accepts.
        unit: unit of the schedules: ``"epoch"``, or ``"step"`` for steps of the optimizer.
        root: name of the submodule where names begin.
        strict: False loads the matching parts of the state of another spec.
        log_sites: whether the scalars of all sites are logged, not only means over the sites and
            the number of findings.

    Raises:
        SpecError: for a bad spec; when training begins, for one that does not fit the model.
        RuntimeError: when training begins, for ``nn.DataParallel`` or a second `Regularize`.
        ValueError: for another unit, or for `L2SP`; when training begins, for a checkpoint of
            another spec.
    """

    def __init__(
        self,
        spec: Any,
        unit: str = "epoch",
        *,
        root: str = "",
        strict: bool = True,
        log_sites: bool = False,
    ) -> None:
        checked = Spec(spec)
        _refuse_anchors(checked)
        try:
            plain = checked.to_plain()
        except ValueError:  # the spec holds code, which a checkpoint in JSON can't hold
            plain = None
        options: dict[str, Any] = {"root": root, "strict": strict, "log_sites": log_sites}
        self._arguments = {"spec": plain, "unit": unit, **options}
        TrainerDriver.__init__(self, spec, unit, **options)

    def add_to(self, trainer: Any) -> None:
        """Add the callback to a Trainer, in front of the reporters, which then get its scalars.

        A Trainer calls its callbacks in their order, and puts TensorBoard and other reporters in
        front of those that it is given. The order of the other callbacks stays the same. A callback
        that the Trainer already has is moved.

        Example:
            >>> from tempfile import TemporaryDirectory
            >>> from transformers import Trainer, TrainingArguments
            >>> from dropblock_hooks.integrations.transformers import Regularize
            >>> with TemporaryDirectory() as folder:
            ...     args = TrainingArguments(folder, report_to=[], use_cpu=True)
            ...     trainer = Trainer(nn.Linear(2, 2), args)
            >>> Regularize({"": Dropout(0.1)}).add_to(trainer)
            >>> [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
            ['DefaultFlowCallback', 'Regularize', 'ProgressCallback']

        Args:
            trainer: a ``Trainer`` of Transformers, or a subclass.

        Raises:
            RuntimeError: if the training has begun.
        """
        if trainer.is_in_train:
            raise RuntimeError(
                "add_to was called during a training: call it before trainer.train(), and make a "
                "new Trainer if a training has raised an error"
            )

        callbacks: list[Any] = trainer.callback_handler.callbacks
        others = [callback for callback in callbacks if callback is not self]
        if any(isinstance(callback, Regularize) for callback in others):
            raise RuntimeError(_ONE_CALLBACK)

        place = 0
        for number, callback in enumerate(others, start=1):
            if isinstance(callback, DefaultFlowCallback):
                place = number  # the flow callback stays in front: it decides when to log
                break
        callbacks[:] = [*others[:place], self, *others[place:]]

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint of the Trainer, with the keys of `ExportableState`."""
        saved = TrainerDriver.state(self)
        return {"args": self._arguments, "attributes": {"saved": saved}}

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: Any,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if args.n_gpu > 1:
            raise RuntimeError(
                f"the Trainer uses nn.DataParallel on {args.n_gpu} GPUs, which shares the state of "
                "hooks between threads: start it with torchrun, or set CUDA_VISIBLE_DEVICES=0"
            )
        # a Trainer keeps a list of states for several callbacks of one class
        if isinstance(state.stateful_callbacks.get(type(self).__name__), list):
            raise RuntimeError(_ONE_CALLBACK)

        is_resumed = state.global_step > 0
        if is_resumed:
            # an entry must exist, because the Trainer writes the state into existing entries only
            empty: dict[str, Any] = {"args": {}, "attributes": {}}
            stored = state.stateful_callbacks.setdefault(type(self).__name__, empty)
            self.load(stored["attributes"].get("saved"))

        length = state.max_steps if self.unit == "step" else state.num_train_epochs
        # False says that the loss is not scaled
        scaler = getattr(optimizer, "scaler", None) or False
        self.begin(model, length, scaler=scaler, optimizers=optimizer, resumed=is_resumed)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tick(state.epoch, state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end_epoch()

    def on_log(
        self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        if "loss" not in logs:  # the logs of an evaluation
            return
        scalars = self.logged()
        logs.update(scalars)
        state.log_history[-1].update(scalars)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()


def _refuse_anchors(spec: Spec) -> None:
    """Raise ValueError for regularizers whose state has values of parameters."""
    for entry in spec.entries:
        for regularizer in entry.regularizers or ():
            if regularizer.anchored:
                raise ValueError(
                    "a Trainer writes the state of callbacks as JSON, which can't hold the "
                    f"parameters that {regularizer.label} keeps: attach it to the model before the "
                    "training, and save attached.state_dict() yourself"
                )
