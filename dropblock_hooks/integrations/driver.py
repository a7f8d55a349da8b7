"""``TrainerDriver``: shared by the callbacks of all trainers.

A callback calls `TrainerDriver.begin` before the training, `TrainerDriver.tick` before each batch,
`TrainerDriver.end_epoch`, and `TrainerDriver.end`.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from .. import messages
from ..attach import attach
from ..attachment.attachment import Attachment
from ..attachment.history import rates_now
from ..checks import check_option
from ..diagnosis.now import AFTER_THE_END, tell_faults
from ..warn import warn


class TrainerDriver:
    """Attaches a spec for a training and moves its time; a callback calls it in its hooks.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> driver = TrainerDriver({"1": Dropout(p=LinearSchedule(0.0, 0.1))})
        >>> attached = driver.begin(model, 2)
        >>> for epoch in range(2):
        ...     for batch in range(5):
        ...         driver.tick(epoch, batches=5)
        ...         y = model(torch.ones(8, 4))
        ...     scalars = driver.end_epoch()
        >>> driver.end()
        >>> attached["1/Dropout"].calls, scalars["reg/1/Dropout/p"]
        (10, 0.1)

    Args:
        spec: any spec that `attach` accepts.
        unit: unit of the schedules: ``"epoch"``, or ``"step"`` for steps of the optimizer.
        root: name of the submodule where names begin.
        strict: False loads the matching parts of the state of another spec.
        log_sites: whether `logged` has the scalars of all sites, too.

    Raises:
        ValueError: if `unit` is not ``"epoch"`` or ``"step"``.

    Attributes:
        attached: the `Attachment`, also after the training; None before.
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
        check_option("unit", unit, ("epoch", "step"))
        self.spec = spec
        self.unit = unit
        self.root = root
        self.strict = strict
        self.log_sites = log_sites
        self.attached: Attachment | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._batch = 0
        self._findings: int | None = None  # the number of findings at the end of the last epoch

    def begin(
        self,
        model: nn.Module,
        length: float | None,
        *,
        scaler: Any = None,
        optimizers: Any = None,
        resumed: bool = False,
    ) -> Attachment:
        """Attach the spec, and load the state of a checkpoint if there is one.

        Args:
            model: the model that is trained, wrapped or not.
            length: length of the training in `unit`; None, -1 or infinity if it is not known.
            scaler: the GradScaler; False if the loss is not scaled; None if this is not known.
            optimizers: for regularizers with ``when="accumulated"``.
            resumed: whether a training is resumed; a missing state is then reported.

        Raises:
            SpecError: if the spec does not fit the model.
            ValueError: if the state belongs to another spec.
        """
        self.end()
        epochs = None
        if length is not None and 0 < length < math.inf:
            epochs = math.ceil(length)

        attached = attach(model, self.spec, root=self.root, epochs=epochs, grad_scaler=scaler)
        # no warning of schedules that are shorter than the training
        attached._run.told.add(AFTER_THE_END)
        self.attached = attached
        try:
            # the hooks of an optimizer cost time, and only these regularizers need them
            if any(site.regularizer.accumulates for site in attached):
                attached.optimizer = optimizers
            if self._loaded is not None:
                attached.load_state_dict(self._loaded, strict=self.strict)
        except BaseException:
            self.end()
            raise

        if resumed and self._loaded is None:
            warn(messages.NO_STATE_OF_CALLBACK)
        self._loaded = None
        self._batch = 0
        self._findings = None
        return attached

    def tick(
        self, epoch: float, step: int = 0, *, batch: int | None = None, batches: float | None = None
    ) -> None:
        """Move the schedules. Call it before each training batch.

        Args:
            epoch: the epoch, from 0; a fraction only without `batches`.
            step: the steps of the optimizer so far, for ``unit="step"``.
            batch: the batch in its epoch, from 0; None counts the calls since the last `end_epoch`.
            batches: the batches of an epoch, for fractions; None, 0 or infinity if not known.
        """
        if self.attached is None:
            return

        if batch is None:
            batch = self._batch
        if batches and batches < math.inf:
            last = batches - 1  # the epoch may have more batches than the trainer has said
            epoch += min(batch, last) / batches
        self.attached.step(epoch if self.unit == "epoch" else step)
        self._batch = batch + 1

    def end_epoch(self) -> dict[str, float]:
        """Warn of what `Attachment.verify` finds, each finding once; return the scalars to log."""
        # False if the trainer has resumed from the end of an epoch, and ends this epoch again
        has_trained = self._batch > 0
        if self.attached is not None and has_trained:
            self._batch = 0
            self._findings = len(tell_faults(self.attached))
        return self.scalars()

    def end(self) -> None:
        """Remove the hooks; the counts can still be read."""
        if self.attached is not None:
            self.attached.remove()

    def scalars(self) -> dict[str, float]:
        """Return the scalars of `Attachment.scalars`; none before `begin`."""
        return {} if self.attached is None else self.attached.scalars()

    def logged(self) -> dict[str, float]:
        """Return a few scalars for a logger, however many sites there are; none before `begin`.

        ``dropblock_hooks/nominal_rate`` and ``dropblock_hooks/realized_rate`` are means over the
        sites that drop, in this epoch. ``dropblock_hooks/findings`` is the number of findings when
        the last epoch ended. With ``log_sites=True``, `scalars` are added.
        """
        attached = self.attached
        if attached is None:
            return {}

        scalars: dict[str, float] = {}
        means = rates_now(attached._run)
        if means is not None:
            nominal, realized = means
            scalars["dropblock_hooks/nominal_rate"] = nominal
            scalars["dropblock_hooks/realized_rate"] = realized
        if self._findings is not None:
            scalars["dropblock_hooks/findings"] = float(self._findings)
        return scalars | self.scalars() if self.log_sites else scalars

    def state(self) -> Mapping[str, Any] | None:
        """Return the state for a checkpoint; None before `begin`."""
        return None if self.attached is None else self.attached.state_dict()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Keep a state for the next `begin`; None forgets it."""
        self._loaded = state
