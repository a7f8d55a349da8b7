"""The Attachment: the handle of what ``attach`` has put on a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..checkpointing import NO_TASK, graph_task
from ..findings import Finding, tell
from ..sites.grad_scaler import LossScale, checked_scaler
from ..sites.hooks import take_off
from ..sites.updates import checked_optimizers, use_optimizers
from ..tables import Table, counted
from ..warn import warn
from .distributed import check_group, compare, summed, tell_equal_seeds, world_size
from .epoch_checks import find_faults, look_back, not_stepped
from .logged import log
from .looks import alerts_now, look_at_step, look_for_alerts, tell_alerts
from .rates import as_time, values_at
from .report import SiteRow, readings, scalars, site_table
from .site_list import SiteList, Which, find
from .state import load, restore, save
from .suggest import Suggestion, suggestions


class Attachment(SiteList):
    """Regularizers attached to a model: the list of its sites, their time and switches.

    ``attach`` makes it, ``attachments(model)`` finds it again, also on a copy or a loaded model.
    As a context manager it removes itself at the end.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> attached = attach(model, {"1": Dropout2d(p=LinearSchedule(0.0, 0.2, epochs=3))})
        >>> for epoch in range(3):
        ...     attached.step(epoch)
        ...     y = model(torch.ones(8, 3, 9, 9))
        ...     print(attached.rates)
        {'1/Dropout2d': {'p': 0.0}}
        {'1/Dropout2d': {'p': 0.1}}
        {'1/Dropout2d': {'p': 0.2}}
        >>> attached.remove()
    """

    @property
    def epoch(self) -> float:
        """The time, in the unit of the schedules; 0 from the start."""
        return self._run.epoch

    def step(self, t: float | None = None) -> None:
        """Move every schedule to time `t`; without `t`, to the next epoch.

        Call it at the start of an epoch as ``step(epoch)``, or at its end as ``step()``. Realized
        rates begin anew when the whole part of `t` changes. Call it after the backward: activation
        checkpoints recompute with the rates of the moment. On an error, nothing has moved.

        Args:
            t: the epoch, at least 0; fractions are allowed (``epoch + i / n``).

        Raises:
            TypeError, ValueError: for a time that is not a number >= 0, or a rate out of range.
        """
        run = self._run
        if graph_task() != NO_TASK:
            warn(
                "step() was called during a backward: activation checkpoints that are recomputed "
                "after it use the new rates, and their gradients are wrong; call step() after "
                "backward()"
            )
        t = as_time(self.epoch + 1 if t is None else t)
        values, epochs = values_at(self.sites, t), math.floor(t) - math.floor(self.epoch)
        ended = epochs == 1 and not run.fresh
        told = look_back(self._base, run, self._hooks, ended) if epochs and run.installed else []
        alerts = look_at_step(self._base, run, self._hooks, epochs != 0)
        self._move(t, values)
        run.stepped, run.fresh = True, False
        tell(told, run.told)
        tell_equal_seeds(run, self.sites)
        tell_alerts(run, self._hooks, alerts)

    def _move(self, t: float, values: list[dict[str, float]]) -> None:
        """Put the values of a time in place; windows close where its whole part is another."""
        for site, new in zip(self.sites, values, strict=True):
            site.move(new)
        self.put()
        if math.floor(t) != math.floor(self.epoch):
            self._look()
            self._run.close_window(self.sites)
            self._look()
        self._run.epoch = t

    @property
    def enabled(self) -> bool:
        """Whether the regularizers act; False switches them off and leaves the hooks in place."""
        return self._run.enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        self._run.switch(bool(on))
        self.put()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Switch the regularizers off within a ``with`` block."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def always(self) -> AbstractContextManager[None]:
        """Within a ``with`` block, random regularizers of activations also act in evaluation.

        This is Monte-Carlo dropout, see `sample`. These calls are not counted.
        """
        return self._run.acting_always()

    def remove(self) -> None:
        """Take every hook off, so that the model computes what it did before; safe to repeat.

        Call it after the backward of checkpointed layers, which would be recomputed without hooks.
        Warns of schedules that nobody has moved by `step`, once.
        """
        base, run = self._base, self._run
        forgotten = not_stepped(self._hooks) if run.installed else []
        run.installed = False
        run.scale = LossScale()
        run.drop_optimizers()
        for module, hook in self._installed:
            hook.remove(module)
        for module in base.modules():  # to which others may have moved hooks
            take_off(run, module)
        run.grids.unwatch(base)
        tell(forgotten, run.told)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        try:
            if kind is None:  # what a `Watchdog` has seen since its last look
                base, run, hooks = self._base, self._run, self._hooks
                tell_alerts(run, hooks, look_for_alerts(base, run, hooks))
        finally:
            self.remove()

    @property
    def grad_scaler(self) -> Any:
        """The GradScaler whose scale multiplies gradient bounds; a loaded model has none.

        Objects that wrap one are accepted: timm's NativeScaler, Lightning's precision plugin,
        accelerate's Accelerator. False states that the loss is not scaled.
        """
        return self._run.scale.scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: Any) -> None:
        self._run.scale = LossScale(checked_scaler(scaler))

    @property
    def optimizer(self) -> Any:
        """The optimizer, or a list of several, at whose steps ``when="accumulated"`` acts.

        Wrapped optimizers are accepted (accelerate, Lightning, timm's Lookahead). The attachment
        does not keep it alive. A copy or a loaded model has none. None takes the hook off.

        Raises:
            RuntimeError, TypeError, ValueError: after `remove`; for an object that is no optimizer;
                for an optimizer that holds none of the parameters.
        """
        held = (reference() for reference, _ in self._run.optimizers)
        live = [optimizer for optimizer in held if optimizer is not None]
        return live if len(live) > 1 else next(iter(live), None)

    @optimizer.setter
    def optimizer(self, given: Any) -> None:
        if given is not None:
            self._check_installed()
        use_optimizers(self._run, self._installed, checked_optimizers(given))

    def report(self, *, distributed: bool = False) -> Table[SiteRow]:
        """A table of what happened at each site. Waits for the device.

        Args:
            distributed: add up the counts of all processes. Every rank must call it, in a process
                group, and all must have the same sites.
        """
        if distributed:
            check_group("report(distributed=True)")
        self._look()
        have = readings(self.sites, self._run)
        title = self._title()
        if distributed:
            have, title = summed(have, self.sites), f"{title}, {world_size()} ranks"
        return site_table(self.sites, have, title)

    @property
    def alerts(self) -> list[Finding]:
        """The findings of every `Watchdog` that hold now; they are also in `verify`."""
        return alerts_now(self._base, self._run, self._hooks)

    def _title(self) -> str:
        state = "" if self.enabled else ", paused"
        state = state if self._run.installed else ", removed"
        sites = counted(len(self), "site")
        return f"{sites} on {type(self._base).__name__}, epoch {self.epoch:g}{state}"

    def __str__(self) -> str:
        return str(self.report())

    def __repr__(self) -> str:
        return f"<Attachment: {self._title()}>"

    def _repr_html_(self) -> str:
        """The report, for notebooks."""
        return self.report()._repr_html_()

    def verify(self, *, distributed: bool = False) -> list[Finding]:
        """Everything that is wrong; an empty list where every site has acted. See `Kind`.

        Call it after a training step. It covers this epoch, or the last one where this one has no
        training call yet, as after ``step()``.

        Args:
            distributed: cover all processes, and what differs between them. Every rank must call
                it, in a process group.
        """
        if distributed:
            check_group("verify(distributed=True)")
        found = find_faults(self._base, self._run, self._hooks) + self.alerts
        return compare(self._run, self.sites, found) if distributed else found

    def suggest(self, share: float = 0.1, which: Which | None = None) -> Table[Suggestion]:
        """Gradient bounds that this share of the norms exceeds, and the calls that set them.

        Norms are those of the last window, or of all windows where it has none, before the bounds.
        Quantiles have an error of up to 9 %. Waits for the device.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 1))
            >>> attached = attach(model, {"param:0.weight": ClipGradNorm(100.0)})
            >>> for scale in range(1, 11):
            ...     model(torch.ones(1, 4)).sum().mul(scale).backward()
            >>> [row.call for row in attached.suggest(share=0.2)]
            ["attached.set('0.weight/ClipGradNorm', max_norm=17.45)"]

        Args:
            share: in (0, 1), of the norms; for `ClampGrad`, of the largest magnitudes.
            which: a site key, a selector or a class; None means every site with a bound.

        Raises:
            KeyError, TypeError: where `which` means no site.
            RuntimeError: after `remove`.
            ValueError: for a share outside (0, 1), or where no site has a bound.
        """
        self._check_installed()
        sites = self.sites if which is None else find(which, self._base, self._hooks)
        return suggestions(sites, share)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and statistics, as plain numbers and text."""
        return save(self.sites, self._run)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state_dict` gave, and begin a new window.

        Args:
            state: from an attachment of the same spec.
            strict: False restores the sites whose key is the same, also with another schedule.

        Raises:
            ValueError: for a state of another spec, with the differences; nothing is changed.
        """
        t, taken = load(state, self.sites, strict)
        self._move(t, values_at(self.sites, as_time(t)))
        restore(state, taken, self._run)

    def scalars(self, prefix: str = "reg/") -> dict[str, float]:
        """Scalars by tag: rates, realized rates of active sites, and observer values.

        Tags are ``<prefix><site key>/<name>``: a field, ``realized_rate``, or an observer's value.
        """
        self._look()
        return scalars(self.sites, prefix)

    def log(self, writer: Any, step: int) -> None:
        """Give every scalar to a logger, and the histograms of observers if it takes them.

        Args:
            writer: with ``add_scalar`` (and ``add_histogram_raw``), as TensorBoard's
                ``SummaryWriter``; with ``log``, as a run of wandb or its module; or with
                ``log_metrics``, as Lightning's loggers.
            step: where on the axis of steps.

        Raises:
            TypeError: for a writer with none of them.
        """
        log(writer, self.scalars(), self.sites, step)
