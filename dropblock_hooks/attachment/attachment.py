"""The Attachment: the handle of what ``attach`` has put on a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from ..regularizers.base import Regularizer
from ..selectors.select import Select
from ..sites.grad_scaler import checked_scaler, tell_missing
from ..sites.hooks import SiteHook
from ..sites.parameters import ParameterHook
from ..sites.record import Record, standing_still
from ..sites.shared import Control
from ..sites.site import Site
from ..tables import Table, counted
from ..warn import warn
from .activity import look_back
from .compiled import tell_recompiling
from .distributed import check_group, compare, summed, tell_equal_generators, world_size
from .find import find
from .finding import Finding
from .rates import as_time, move, values_at, with_rates
from .removal import take_out
from .report import SiteRow, readings, scalars, site_table
from .state import load, restore, save
from .verify import find_faults, windows
from .watchdog import look_for_alerts, tell_alerts


class Attachment:
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

    def __init__(
        self, base: nn.Module, control: Control, installed: list[tuple[nn.Module, SiteHook]]
    ) -> None:
        self._base = base
        self._control = control
        self._installed = installed

    @property
    def _hooks(self) -> list[SiteHook]:
        return [hook for _, hook in self._installed]

    @property
    def _records(self) -> list[Record]:
        """Of the model's forwards, and of each site."""
        return [self._control.record, *(site.record for site in self.sites)]

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites, in the order of the spec."""
        return tuple(hook.site for _, hook in self._installed)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self._installed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attachment) and self._control is other._control

    def __hash__(self) -> int:
        return hash(id(self._control))

    def __getitem__(self, which: str | Select | type[Regularizer]) -> Site | tuple[Site, ...]:
        """One site by its key; a tuple of sites by a selector, or by a class of regularizers.

        Raises:
            KeyError: for what is neither, with the reason or the closest keys.
        """
        meant = find(which, self._base, self._hooks)
        return meant[0] if meant[0].key == which else meant

    @property
    def epoch(self) -> float:
        """The time, in the unit of the schedules; 0 from the start."""
        return self._control.epoch

    def step(self, t: float | None = None) -> None:
        """Move every schedule to time `t`; without it, one on (at the end of an epoch).

        Nothing else moves time. When the whole part of `t` changes, `Site.realized_rate` begins
        anew. A value outside its range is an error, and then nothing has moved.

        Args:
            t: the epoch, at least 0; fractions are allowed (``epoch + i / n``).

        Raises:
            TypeError, ValueError: for a time that is not a number >= 0, or a rate out of range.
        """
        control, sites = self._control, self.sites
        with standing_still(self._records):
            self._tell_waiting()
            t = as_time(self.epoch + 1 if t is None else t)
            values, epochs = values_at(sites, t), math.floor(t) - math.floor(self.epoch)
            look, ended = epochs and control.installed, epochs == 1 and not control.fresh
            told = look_back(self._base, control, self._hooks, ended) if look else []
            alerts = look_for_alerts(self._base, control, self._hooks)
            move(self._base, control, self._installed, t, values)
            self.rehook()
            control.stepped, control.fresh = True, False
            for text in told:
                warn(text)
            tell_equal_generators(self._base, control, sites)
            tell_missing(control, sites)
            tell_recompiling(control, self._hooks)
            tell_alerts(control, alerts)

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
            >>> attached.rates
            {'1/Dropout2d': {'p': 0.2}}

        Args:
            which: a site key, a selector, or a class of regularizers: the sites that have one.
            rates: rate fields by name, numbers or schedules; a `ByDepth` is spread over the layers
                of each class of regularizers for itself.

        Raises:
            KeyError: where no site is meant, with the reason.
            RuntimeError: after `remove`.
            TypeError, ValueError: for a field that is no rate of theirs, or a bad value.
        """
        if not self._control.installed:
            raise RuntimeError(
                "the attachment was removed, so there is nothing to set: attach again"
            )
        sites = find(which, self._base, self._hooks)
        if not rates:
            raise ValueError("set takes at least one rate: set(which, p=0.2)")
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

    @property
    def grad_scaler(self) -> Any:
        """The GradScaler whose scale multiplies gradient bounds; set it on a loaded model.

        What wraps one can be given as well: timm's NativeScaler, Lightning's precision plugin,
        accelerate's Accelerator. False says that the loss is not scaled, and that a GradScaler
        elsewhere in the process is another model's.
        """
        return self._control.grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: Any) -> None:
        self._control.use_scaler(checked_scaler(scaler))

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
        with standing_still(self._records):
            tell_missing(self._control, self.sites)
            self._tell_waiting()
            have = readings(self.sites, self._control)
        title = self._title()
        if distributed:
            have, title = summed(have), f"{title}, {world_size()} ranks"
        return site_table(self.sites, have, title)

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
        return compare(self._base, self._control, self.sites, found) if distributed else found

    def state_dict(self) -> dict[str, Any]:
        """Epoch and statistics, as plain numbers and text."""
        with standing_still(self._records):
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
        """Rates and realized rates by tag, for ``log_dict``, ``wandb.log`` and the like.

        Tags are ``<prefix><site key>/<field>`` and ``<prefix><site key>/realized_rate``, which is
        left out where nothing was counted, also of a site that was off in this epoch's training.
        """
        with standing_still(self._records):
            self._tell_waiting()
            window, _ = windows(self._control, self._hooks)
            on = {key for key, each in window.sites.items() if each.active or not window.trained}
            return scalars(self.sites, on, prefix)

    def log(self, writer: Any, step: int) -> None:
        """Give every scalar to ``writer.add_scalar`` (TensorBoard's, or anything alike)."""
        if not hasattr(writer, "add_scalar"):
            raise TypeError(f"log takes a writer with add_scalar, got {type(writer).__name__}")
        for tag, value in self.scalars().items():
            writer.add_scalar(tag, value, step)
