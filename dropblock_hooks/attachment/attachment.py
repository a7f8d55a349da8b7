"""The Attachment: the handle of what ``attach`` has put on a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..checkpointing import NO_TASK, graph_task
from ..findings import Finding, tell
from ..observers.kept_calls import Record as Call
from ..regularizers.base import Regularizer
from ..selectors.select import Select
from ..sites.grad_scaler import tell_missing
from ..sites.parameters import ParameterHook
from ..sites.record import standing_still
from ..tables import Table, counted
from ..warn import warn
from .activity import look_back
from .captured import captured
from .compiled import tell_recompiling
from .distributed import check_group, compare, summed, tell_equal_seeds, world_size
from .find import find
from .logged import log
from .rates import as_time, check_installed, move, values_at, with_rates
from .removal import take_out
from .report import SiteRow, look, readings, scalars, site_table
from .site_list import SiteList
from .state import load, restore, save
from .suggest import Suggestion, suggestions
from .training_loop import OfTrainingLoop
from .verify import find_faults, windows
from .watchdog import alerts_now, look_at_step, tell_alerts


class Attachment(SiteList, OfTrainingLoop):
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
        return self._control.epoch

    def step(self, t: float | None = None) -> None:
        """Move every schedule to time `t`; without it, one on (at the end of an epoch).

        Nothing else moves time. When the whole part of `t` changes, `Site.realized_rate` begins
        anew. A value outside its range is an error, and then nothing has moved. Call it after the
        backward: an activation checkpoint recomputes with the rates of the moment.

        Args:
            t: the epoch, at least 0; fractions are allowed (``epoch + i / n``).

        Raises:
            TypeError, ValueError: for a time that is not a number >= 0, or a rate out of range.
        """
        control, sites = self._control, self.sites
        if graph_task() != NO_TASK:
            warn(
                "step() was called during a backward: activation checkpoints that are recomputed "
                "after it use the new rates, and their gradients are wrong; call step() after "
                "backward()"
            )
        with standing_still(self._records):
            self._tell_waiting()
            t = as_time(self.epoch + 1 if t is None else t)
            values, epochs = values_at(sites, t), math.floor(t) - math.floor(self.epoch)
            look, ended = epochs and control.installed, epochs == 1 and not control.fresh
            told = look_back(self._base, control, self._hooks, ended) if look else []
            alerts = look_at_step(self._base, control, self._hooks, epochs != 0)
            move(self._base, control, self._installed, t, values)
            self.rehook()
            control.stepped, control.fresh = True, False
            tell(told, control.told)
            tell_equal_seeds(control, sites)
            tell_missing(control, sites)
            tell_recompiling(control, self._hooks)
            tell_alerts(control, self._hooks, alerts)

    def rehook(self) -> None:
        """Hook parameters that have become other objects: compiled code can't."""
        for module, hook in self._installed:
            if isinstance(hook, ParameterHook) and self._control.installed:
                hook.rehook(module)

    def _tell_waiting(self) -> None:
        """Warn of a schedule that nobody moves: compiled code can't."""
        control = self._control
        if control.installed and not (control.warned or control.stepped):
            site = next((site for site in self.sites if site.resumed()), None)
            if site is not None:
                site.tell_waiting()

    @property
    def rates(self) -> dict[str, dict[str, float]]:
        """The values now, by site key and field."""
        return {site.key: dict(site.values) for site in self.sites}

    def set(self, which: str | Select | type[Regularizer], **rates: Any) -> None:
        """Give sites another rate or schedule; all or none. Their realized rates begin anew.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
            >>> attached = attach(model, {"1": Dropout2d(p=0.1)})
            >>> attached.set("1/Dropout2d", p=0.3)
            >>> attached.rates
            {'1/Dropout2d': {'p': 0.3}}
            >>> attached.set(Dropout2d, p=0.2)

        Args:
            which: a site key, a selector, or a class of regularizers: the sites that have one.
            rates: rate fields by name, numbers or schedules; a `ByDepth` is spread over the layers
                of each class of regularizers for itself.

        Raises:
            KeyError: where no site is meant, with the reason.
            RuntimeError: after `remove`.
            TypeError, ValueError: for a field that is no rate of theirs, or a bad value.
        """
        check_installed(self._control, "set")
        sites = find(which, self._base, self._hooks)
        changed = with_rates(sites, rates, self._control)
        with standing_still(site.record for site in sites):
            for site, regularizer in zip(sites, changed, strict=True):
                site.set_regularizer(regularizer)
                site.record.forget_elements()
            self._put()

    @property
    def enabled(self) -> bool:
        """Whether the regularizers act; False leaves the hooks in place."""
        return self._control.enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        self._control.switch(bool(on))
        self._put()

    def _put(self) -> None:
        """Put the rates of layers that drop by themselves in place."""
        for module, hook in self._installed:
            hook.put(module)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Switch off within a ``with`` block."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def always(self) -> AbstractContextManager[None]:
        """Within a ``with`` block, what draws random numbers for activations acts in evaluation.

        As if it were ``active="always"``, but not counted: Monte-Carlo dropout, see `sample`. A
        backward through checkpointed layers belongs inside.
        """
        return self._control.acting_always()

    def remove(self) -> None:
        """Take every hook out; the model is what it was. Safe to repeat, also before a backward.

        Not before that of a checkpointed forward, which would be recomputed without the hooks.
        """
        try:
            with standing_still(self._records):
                self._tell_waiting()
        finally:
            take_out(self._base, self._control, self._installed)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()

    def report(self, *, distributed: bool = False) -> Table[SiteRow]:
        """What has happened at each site: objects, text, dicts, pandas. Waits for the device.

        Args:
            distributed: over all processes of the group: calls and elements are added up. Every
                rank must call it, and gets the same table.

        Raises:
            RuntimeError: for ``distributed=True`` without a process group, or with sites that
                differ between the ranks.
        """
        if distributed:
            check_group("report(distributed=True)")
        with standing_still(self._records, norms=True):
            tell_missing(self._control, self.sites)
            self._tell_waiting()
            look(self._installed)
            have = readings(self.sites, self._control)
        title = self._title()
        if distributed:
            have, title = summed(have), f"{title}, {world_size()} ranks"
        return site_table(self.sites, have, title)

    def captured(self, which: str | Select | None = None) -> dict[str, list[Call]]:
        """What `Capture` has kept at all sites, or those of a site key or a selector: by the name
        of the layer its last calls, oldest first; by site key where it has several.

        Raises:
            KeyError, RuntimeError: where there is none, or nothing was kept, with the cause.
        """
        return captured(which, self._base, self._control, self._hooks)

    def _title(self) -> str:
        state = "" if self.enabled else ", paused"
        state = state if self._control.installed else ", removed"
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
        """What is wrong: an empty list where every site is on and has been seen at work.

        It speaks of the last window: the epoch, or the time since attaching or loading. Where
        nothing has been trained in it yet, as after ``step()`` at the end of an epoch, it speaks of
        the one before. Call it after a training step. It tells of sites whose layer was never
        called, or only in evaluation; of layers that were replaced; of hooks that were lost; of
        parameters that got no gradient; of schedules that nobody moves.

        Args:
            distributed: on all processes of the group, and what differs between them: sites, time,
                switches; ranks whose random states are equal, which draw equal masks. Every rank
                must call it, and gets the same list.

        Raises:
            RuntimeError: for ``distributed=True`` without a process group.
        """
        if distributed:
            check_group("verify(distributed=True)")
        with standing_still(self._records):
            found = find_faults(self._base, self._control, self._installed)
            found += alerts_now(self._base, self._control, self._hooks)
        return compare(self._control, self.sites, found) if distributed else found

    def suggest(
        self, share: float = 0.1, which: str | Select | type[Regularizer] | None = None
    ) -> Table[Suggestion]:
        """Bounds for gradients beyond which this share of what was seen lies, and how to set them.

        They come from the norms of the last window, or of all since attaching where it has none;
        a share of 0.1 is the norm that 90 % do not exceed, within 4.5 %. See `Norms`: bounds that
        are set hide nothing, since norms are counted before them. Waits for the device.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 1))
            >>> attached = attach(model, {"param:0.weight": ClipGradNorm(100.0)})
            >>> for scale in range(1, 11):
            ...     model(torch.ones(1, 4)).sum().mul(scale).backward()
            >>> print(attached.suggest(share=0.2))
            bounds that 0.2 of the norms (of ClampGrad, of the values) lie beyond
            site                   bound     now  changed  proposed  norms  over
            ---------------------  --------  ---  -------  --------  -----  ------
            0.weight/ClipGradNorm  max_norm  100  0        16.71     10     window
            <BLANKLINE>
            attached.set('0.weight/ClipGradNorm', max_norm=16.71)

        Args:
            share: in (0, 1), of the norms; of a `ClampGrad`, of the values.
            which: a site key, a selector, or a class of regularizers; None means every site with a
                bound.

        Raises:
            KeyError, TypeError: where `which` means no site.
            RuntimeError: after `remove`.
            ValueError: for a share outside (0, 1), or where no site has a bound.
        """
        check_installed(self._control, "suggest")
        sites = self.sites if which is None else find(which, self._base, self._hooks)
        with standing_still(self._records, norms=True):
            return suggestions(sites, share)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and statistics, as plain numbers and text."""
        with standing_still(self._records, norms=True):
            self._tell_waiting()
            return save(self.sites, self._control)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state_dict` gave; schedules are at its epoch then, in a new window.

        Args:
            state: from an Attachment of the same spec.
            strict: False takes what fits: sites by key, also with another schedule.

        Raises:
            ValueError: for a state of another spec, with the differences; nothing is changed.
        """
        t = as_time(load(state, self.sites, strict))
        move(self._base, self._control, self._installed, t, values_at(self.sites, t))
        self.rehook()
        restore(state, self.sites, self._control)

    def scalars(self, prefix: str = "reg/") -> dict[str, float]:
        """What has happened, by tag, for ``log_dict``, ``wandb.log`` and the like.

        Tags are ``<prefix><site key>/<field>`` and ``<prefix><site key>/realized_rate``, which is
        left out where nothing was counted, also of a site that was off in this epoch's training;
        and of observers what they have seen, ``<prefix><site key>/mean``.
        """
        with standing_still(self._records):
            self._tell_waiting()
            look(self._installed)
            window, _ = windows(self._control, self._hooks)
            on = {key for key, each in window.sites.items() if each.active or not window.trained}
            return scalars(self.sites, on, prefix)

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
