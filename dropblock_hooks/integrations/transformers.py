"""``Regularize``: a callback of the Trainer of Hugging Face's Transformers."""

from __future__ import annotations

import math
import warnings
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers.trainer_callback import ExportableState, TrainerCallback

from ..attach import attach, attachments
from ..attachment.attachment import Attachment
from ..attachment.epoch_checks import tell_faults
from ..checks import check_option
from ..sites.run import Run
from ..spec.spec import Spec
from ..warn import HookWarning, warn

_SPECS: WeakKeyDictionary[Run, Any] = WeakKeyDictionary()
"""What callbacks have attached, with its spec: a Trainer may put a new callback in their place."""
_NOT_KNOWN = 10**9  # epochs, or steps, of a training whose length is told when it begins


class Regularize(TrainerCallback, ExportableState):  # type: ignore[misc]  # of a skipped package
    """Attaches a spec to the model of a Trainer, for its training.

    The spec is attached when the Trainer is made; where ``train`` makes another model
    (``model_init``), it moves to that one. The time is that of the Trainer. Scalars go into its
    logs, the state into its checkpoints. After each epoch you are warned of what
    `Attachment.verify` finds. The end of training removes the hooks. If the training raises, call
    ``callback.attached.remove()``.

    Example:
        >>> from dropblock_hooks.integrations.transformers import Regularize
        >>> callback = Regularize({"bert.encoder.layer.*": Dropout(p=LinearSchedule(0.0, 0.1))})
        >>> trainer = Trainer(model, args, callbacks=[callback])  # doctest: +SKIP

    Args:
        spec: what ``attach`` takes. Schedules without epochs follow the training's length.
        unit: of schedules: ``"epoch"`` (fractions too, at each step), or ``"step"`` of the
            optimizer.
        root: name of the submodule where names begin.
        strict: False takes what fits from a checkpoint of another spec.

    Attributes:
        attached: the `Attachment`; None before the Trainer is made. ``train`` may make another one.

    Raises:
        SpecError: for a bad spec; when the Trainer is made, for one that does not fit the model.
        RuntimeError: for a second `Regularize` on a model, or for ``nn.DataParallel``.
        ValueError: for another unit; when training begins, for a checkpoint of another spec.
    """

    def __init__(
        self, spec: Any, unit: str = "epoch", *, root: str = "", strict: bool = True
    ) -> None:
        check_option("unit", unit, ("epoch", "step"))
        if spec is None:
            raise ValueError(
                "spec is None: in a checkpoint that means a spec with code in it, which can't be "
                "written: leave restore_callback_states_from_checkpoint=False, the counts are "
                "restored all the same"
            )
        checked = Spec.of(spec)
        try:
            self._plain = checked.to_plain()
        except ValueError:  # the spec holds code
            self._plain = None
        self.spec, self.unit, self.root, self.strict = spec, unit, root, strict
        self.attached: Attachment | None = None
        self.saved: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint of the Trainer holds of it."""
        args = {
            "spec": self._plain,
            "unit": self.unit,
            "root": self.root,
            "strict": self.strict,
        }
        saved = None if self.attached is None else self.attached.state_dict()
        return {"args": args, "attributes": {"saved": saved}}

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach; of a length that is not known yet, so that what is wrong is told now."""
        if args.n_gpu > 1:
            raise RuntimeError(
                f"the Trainer will use nn.DataParallel on {args.n_gpu} GPUs, which shares the "
                "state of hooks between threads: start it with torchrun, or show it one GPU "
                "(CUDA_VISIBLE_DEVICES=0)"
            )
        _refuse_second(given["model"])
        by_steps = args.max_steps > 0
        if by_steps == (self.unit == "step"):
            length = args.max_steps if by_steps else math.ceil(args.num_train_epochs)
            self._attach(given["model"], max(length, 1))
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HookWarning)  # they come when training begins
                self._attach(given["model"], _NOT_KNOWN)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach to the model that is trained, where it or the length is another one."""
        model = given["model"]
        if self.attached is None and self.saved is not None:
            for attached in _of_callbacks(model):  # of the callback that this one replaces
                self.attached, self.spec = attached, _SPECS[_run(attached)]
        length = max(state.max_steps if self.unit == "step" else state.num_train_epochs, 1)
        now = self.attached
        if now is None or now not in attachments(model) or _run(now).epochs != length:
            now = self._attach(model, length)
        scaler = getattr(given.get("optimizer"), "scaler", None)
        now.grad_scaler = False if scaler is None else scaler
        if any(site.regularizer.accumulates for site in now):
            now.optimizer = given.get("optimizer")
        if state.global_step:
            self._resume(now, state.stateful_callbacks)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Move the schedules."""
        if self.attached is not None:
            self.attached.step(state.epoch if self.unit == "epoch" else state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Warn of what is wrong, of each fault once."""
        if self.attached is not None:
            tell_faults(self.attached)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Put the scalars beside the loss."""
        logs = given["logs"]
        if self.attached is not None and "loss" in logs:
            scalars = self.attached.scalars()
            logs.update(scalars)
            state.log_history[-1].update(scalars)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Remove what is attached; what was counted can still be read."""
        if self.attached is not None:
            self.attached.remove()

    def _attach(self, model: nn.Module, length: int) -> Attachment:
        if self.attached is not None:
            self.attached.remove()
        _refuse_second(model)
        self.attached = attach(model, self.spec, root=self.root, epochs=length)
        _SPECS[_run(self.attached)] = self.spec
        return self.attached

    def _resume(self, attached: Attachment, stored: dict[str, Any]) -> None:
        """Restore what a checkpoint has counted."""
        name = type(self).__name__
        # the Trainer saves only over what it finds
        saved = stored.setdefault(name, self.state() | {"attributes": {}})["attributes"].get(
            "saved"
        )
        if saved is None:
            warn(
                "the checkpoint has nothing of Regularize, since it was written without it: its "
                "counts begin anew, and the rates follow the time of the Trainer"
            )
            return
        try:
            attached.load_state_dict(saved, strict=self.strict)
        except ValueError:
            attached.remove()
            raise


def _refuse_second(model: nn.Module) -> None:
    """Raise RuntimeError for a model that has what a callback has attached."""
    if _of_callbacks(model):
        raise RuntimeError(
            "this model has a Regularize callback already: a Trainer takes one, with all of the "
            "spec; what an earlier Trainer, or the first of two callbacks, has left on the model "
            "is taken off by detach_all(model)"
        )


def _run(attached: Attachment) -> Run:
    return attached.sites[0].run


def _of_callbacks(model: nn.Module) -> list[Attachment]:
    """What callbacks have attached to a model."""
    return [found for found in attachments(model) if _run(found) in _SPECS]
