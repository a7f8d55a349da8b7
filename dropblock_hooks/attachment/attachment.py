"""The Attachment: the handle that ``attach`` returns."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from ..checks import NON_NEGATIVE, as_number
from ..diagnosis.alerts import alerts_now, new_alerts, tell_alerts
from ..diagnosis.at_end import find_at_end, find_in_last_epoch
from ..diagnosis.endings import has_risen, not_stepped
from ..diagnosis.now import find_before_step, find_faults
from ..diagnosis.ranks import findings_of_all_ranks, tell_equal_seeds
from ..findings import Finding, merged, tell
from ..observers.capture import Capture, Record
from ..observers.watchdog import Clock
from ..quoting import kind_of, quote
from ..schedules import longer_than
from ..selectors.select import Select
from ..sites.history import History
from ..sites.hooks import SiteHook, remove_hooks
from ..sites.processes import world_size
from ..sites.public import Site
from ..sites.run import Run
from ..sites.scaler import checked_scaler
from ..sites.site import LiveSite
from ..sites.updates import checked_optimizers, use_optimizers
from ..tables import Table, counted
from ..warn import warn
from .history import close_last, history_of
from .lookup import (
    Suggestion,
    Which,
    captures,
    find,
    site_at,
    suggestions,
    values_at,
    with_rates,
)
from .report import SiteRow, readings, site_table, summed
from .same_masks import same_masks
from .state import check, restore, save


class Attachment:
    """Regularizers attached to a model: the list of its sites, their time and switches.

    ``attach`` makes it, and ``attachments(model)`` finds it. A ``with`` block ends with `remove`.

    Example:
        >>> ramp = LinearSchedule(0.0, 0.2, epochs=3)
        >>> attached = attach(nn.Sequential(nn.ReLU()), {"0": Dropout(p=ramp)})
        >>> attached.step(1)
        >>> attached.rates
        {'0/Dropout': {'p': 0.1}}
    """

    def __init__(
        self, base: nn.Module, run: Run, installed: list[tuple[nn.Module, SiteHook]]
    ) -> None:
        self._base = base
        self._run = run
        self._installed = installed
        self._hooks = [hook for _, hook in installed]
        self._sites = tuple(hook.site for hook in self._hooks)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites, in the order of the spec."""
        return tuple(map(Site, self._sites))

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attachment) and self._run is other._run

    def __hash__(self) -> int:
        return hash(self._run)

    def __getitem__(self, key: str | int) -> Site:
        """Return the site with this key, on the layer of this name, or at this position.

        `select` finds several sites.

        Args:
            key: the key of the site, the name of its layer, or its number.

        Raises:
            KeyError: if there is no such site, or if the layer has several.
            IndexError: if the number is too large.
            TypeError: if `key` has another type.
        """
        return Site(site_at(key, self._sites))

    def select(self, which: Which) -> tuple[Site, ...]:
        """Find all sites of a selector or a class, in model order: at least one.

        Args:
            which: a site key, a selector, or a class of regularizers.

        Raises:
            KeyError: if there is no such site.
            TypeError: if `which` has another type.
        """
        return tuple(map(Site, self._select(which)))

    def _select(self, which: Which) -> tuple[LiveSite, ...]:
        """Return the `LiveSite` objects of the sites that `select` finds."""
        return find(which, self._base, self._sites)

    @property
    def rates(self) -> dict[str, dict[str, float]]:
        """The present values, by site key and field."""
        return {site.key: dict(site.values) for site in self._sites}

    def set(self, which: Which, **rates: Any) -> None:
        """Set another rate or schedule at sites, at all or none. Their realized rates begin anew.

        Warns of a schedule that is longer than the training.

        Args:
            which: as for `select`.
            rates: numbers or schedules by field; a `ByDepth` is spread over these layers.

        Raises:
            KeyError: if there is no such site.
            TypeError: if a field does not exist, or a value has the wrong type.
            ValueError: if a value is out of range, or no rate is given.
            RuntimeError: after `remove`.
        """
        self._run.check_installed()
        sites = self._select(which)
        regularizers = with_rates(sites, rates, self._run)
        if self._run.epochs is not None:
            for text in longer_than(self._run.epochs, rates):
                warn(f"set({quote(which)}): {text}", each_call=True)

        for site, regularizer in zip(sites, regularizers, strict=True):
            site.take_skipped()  # first, because the state of an observer begins anew
            site.set_regularizer(regularizer)
            site.counter.forget_elements()
            self._run.history.forget_norms(site.key)
        self._refresh()

    def _refresh(self) -> None:
        """Write the rates that modules hold, and hook parameters that were replaced."""
        for module, hook in self._installed:
            hook.refresh(module)
        self._run.write()

    def _watch_forwards(self) -> None:
        """Put the hook of the model back, because it removes itself from a compiled model."""
        if self._run.installed and self._run.model_hook is not None:
            self._run.model_hook.put_on(self._base)

    def _read_layers(self, together: bool = False) -> None:
        """Let each hook read facts about its layer, for a report or for the next window.

        If all processes do this `together`, sharded parameters can be gathered.
        """
        for module, hook in self._installed:
            hook.read_layer(module, together)

    @property
    def epoch(self) -> float:
        """The time, in the unit of the schedules; 0 from the start."""
        return self._run.epoch

    def step(self, t: float | None = None) -> None:
        """Move every schedule to time `t`. Call ``step(epoch)`` before the first batch of an epoch.

        Never call it between a forward and its backward. Realized rates begin anew when the whole
        part of `t` changes. If `t` or a rate is refused, nothing has moved.

        Args:
            t: the epoch, at least 0; fractions are allowed (``epoch + i / n``). Without it, the
                time moves to the next epoch, so ``step()`` comes after the last batch of an epoch.

        Raises:
            TypeError: if `t` is no number.
            ValueError: if `t` is negative, or a rate at this time is out of range.
            WatchdogError: if a `Watchdog` with ``action="raise"`` has a new finding.
        """
        t = self.epoch + 1 if t is None else as_number("epoch", t, allowed=NON_NEGATIVE)
        values = values_at(self._sites, t)

        run = self._run
        faults = find_before_step(t, self._base, run, self._hooks)
        window_ends = self._is_in_another_epoch(t)
        alerts = []
        if window_ends:
            alerts = new_alerts(self._base, run, self._hooks)
            Clock.of(run.shared).end_epoch()
        if window_ends and run.installed:
            run.history.note_findings(faults)
            run.history.note_end(math.floor(self.epoch), self._sites)

        self._move(t, values)
        run.stepped = True
        run.fresh = False
        for hooks_of_step in run.optimizers:
            hooks_of_step.began = False  # a step that raised an error has not reset this

        tell(faults, run.told)
        tell_equal_seeds(run, self._sites)
        tell_alerts(run, self._hooks, alerts)  # last, because it may raise an error

    def _is_in_another_epoch(self, t: float) -> bool:
        """Return whether a time has another whole part than the present time."""
        return math.floor(t) != math.floor(self.epoch)

    def _move(self, t: float, values: list[dict[str, float]]) -> None:
        """Set the values of a time. Windows close if the whole part of the time changes.

        Hooks read their layers twice: before a window closes, for its last numbers, and after
        that, for the next window.
        """
        window_ends = self._is_in_another_epoch(t)
        if window_ends:
            self._run.take_counts()

        for site, values_of_site in zip(self._sites, values, strict=True):
            site.move(values_of_site)
        self._refresh()

        if window_ends:
            self._read_layers(together=True)
            self._run.close_window(self._sites)
            self._read_layers(together=True)
            self._watch_forwards()
        self._run.epoch = t

    @property
    def enabled(self) -> bool:
        """Whether the regularizers act; False switches them off and leaves the hooks in place."""
        return self._run.enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        self._run.enabled = bool(on)
        self._run.switched = True
        self._refresh()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Switch the regularizers off within a ``with`` block."""
        before = self.enabled
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = before

    @contextmanager
    def always(self) -> Iterator[None]:
        """Let dropout act in evaluation too, within a ``with`` block; see `sample`.

        Calls in evaluation are not counted.
        """
        before = self._run.always
        self._run.always = True
        self._run.switched = True
        self._run.write()
        try:
            yield
        finally:
            self._run.always = before
            self._run.write()

    def same_masks(self) -> AbstractContextManager[None]:
        """Let each site draw one mask within a ``with`` block, and use it in all of its calls.

        It is for several passes of a model that belong together, such as both sides of a siamese
        network, or the steps of a recurrent cell. To compare several inputs under the same mask of
        Monte-Carlo dropout, call the model yourself in the block, because `sample` draws new masks.
        The first call of a site in the block draws the mask. Regularizers of gradients and the
        model's own dropouts draw a new mask in each call. Compiled code runs in eager mode in the
        block.

        Example:
            >>> attached = attach(model := nn.Linear(3, 50), {".": Dropout(0.5)})
            >>> with attached.same_masks():
            ...     first, second = model(torch.ones(2, 3)), model(torch.zeros(2, 3))
            >>> torch.equal(first == 0, second == 0)
            True

        Raises:
            RuntimeError: for a `Retune` of a layer that itself drops, and in compiled functions.
            SiteError: in a later call of a site, if its tensor has another shape or dtype.
        """
        return same_masks(self._run, self._hooks)

    def remove(self) -> None:
        """Take every hook off. Call it after the backward.

        Warns of faults of the last epoch, as ``step`` would. Warns also of rates that never moved,
        or stayed 0. A process that ends without this call gives the same warnings.
        """
        run = self._run
        faults = []
        if run.installed:
            error = sys.exception()  # for example in a `finally` block
            of_last_epoch = find_in_last_epoch(self._base, run, self._hooks, error)
            faults = find_at_end(run, self._hooks, of_last_epoch)
            close_last(run, of_last_epoch)
        run.installed = False

        if run.ticker is not None:
            run.ticker.stop()
        run.scaler = None
        run.write()
        use_optimizers(run, (), [])

        hooked = [module for module, _ in self._installed]  # some may have left the model
        others = self._base.modules()  # other code may have moved hooks to any of them
        for module in dict.fromkeys((*hooked, *others)):
            remove_hooks(run, module)
        for module, hook in self._installed:
            hook.restore(module)
        tell(faults, run.told)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        try:
            if kind is None:  # a `Watchdog` judges the calls since its last look
                alerts = new_alerts(self._base, self._run, self._hooks)
                tell_alerts(self._run, self._hooks, alerts)
        finally:
            self.remove()

    @property
    def grad_scaler(self) -> Any:
        """The GradScaler, or its wrapper, whose scale multiplies gradient bounds; see `attach`.

        Raises:
            TypeError: if an object without ``get_scale`` is set.
        """
        return self._run.scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: Any) -> None:
        self._run.scaler = checked_scaler(scaler)
        for site in self._sites:
            site.note_scaler()

    @property
    def optimizer(self) -> Any:
        """The optimizer, or a list of several, at whose steps ``when="accumulated"`` acts.

        The attachment holds only a weak reference to it.

        Raises:
            TypeError: if another object is set.
            ValueError: if the optimizer holds none of the parameters with ``when="accumulated"``.
            RuntimeError: if it is set after `remove`.
        """
        optimizers = [step.optimizer for step in self._run.optimizers]
        live = [optimizer for optimizer in optimizers if optimizer is not None]
        if len(live) > 1:
            return live
        return live[0] if live else None

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        if optimizer is not None:
            self._run.check_installed()
        use_optimizers(self._run, self._installed, checked_optimizers(optimizer))

    def report(self, *, distributed: bool = False) -> Table[SiteRow]:
        """Return a table with a row for each site. This waits for the device.

        Args:
            distributed: True adds up the counts of all ranks. All ranks must call it.

        Raises:
            RuntimeError: with `distributed`, if there is no process group, or the ranks have
                different sites.
            SiteError: if ``compute`` of an observer raises an error.
        """
        self._read_layers(together=distributed)
        numbers = readings(self._sites, self._run)
        title = self._title()
        if distributed:
            numbers = summed(numbers, self._sites)
            title = f"{title}, {world_size()} ranks"
        return site_table(self._sites, numbers, title)

    @property
    def history(self) -> History:
        """A row for each site and epoch, oldest first. Reading it waits for the device.

        `step` adds the rows of the epoch that ends, and `remove` adds the rows of the last epoch.
        The rows of the present epoch come last. `state_dict` saves all rows. At more than 20,000
        rows, but not below 64 epochs, every second epoch is forgotten. The rows print as a table;
        ``history.to_dicts()`` and ``history.to_pandas()`` convert them.
        """
        return history_of(self._base, self._run, self._hooks)

    @property
    def alerts(self) -> list[Finding]:
        """The findings of every `Watchdog` that hold now; they are also in `verify`."""
        return merged(alerts_now(self._base, self._run, self._hooks))

    def _title(self) -> str:
        """Describe the attachment and its state in a line."""
        title = f"{counted(len(self), 'site')} on {type(self._base).__name__}, epoch {self.epoch:g}"
        if not self._run.installed:
            return f"{title}, removed"
        if not self.enabled:
            title += ", paused"
        if not_stepped(self._sites):
            title += ", step() was never called"
        return title

    def __str__(self) -> str:
        return "\n".join(map(str, [self.report(), *self.alerts]))

    def __repr__(self) -> str:
        return f"<Attachment: {self._title()}>"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def verify(self, *, distributed: bool = False) -> list[Finding]:
        """Return all findings about faults; an empty list if every site has acted. See `Kind`.

        They cover this epoch, or the last epoch if this epoch has no training call yet. The same
        fault at several sites is one finding with these sites.

        Args:
            distributed: True covers all ranks, and their differences. All ranks must call it.

        Raises:
            RuntimeError: with `distributed`, if there is no process group.
        """
        findings = find_faults(self._base, self._run, self._hooks)
        findings += alerts_now(self._base, self._run, self._hooks)
        if distributed:
            findings = findings_of_all_ranks(self._run, self._sites, findings)
        return merged(findings)

    def captured(self, which: str | Select | None = None) -> dict[str, list[Record]]:
        """Return the calls that `Capture` has kept, oldest first, by layer.

        If a layer has several `Capture` sites, their calls are listed by site key.

        Args:
            which: a site key or a selector; None means every `Capture`.

        Raises:
            KeyError: if there is no `Capture` at such a site.
            TypeError: if `which` has another type.
            RuntimeError: if nothing was captured.
        """
        sites = self._select(Capture if which is None else which)
        return captures(which, sites)

    def suggest(self, share: float = 0.1, which: Which | None = None) -> Table[Suggestion]:
        """Propose gradient bounds that this share of the norms exceeds, and the calls to set them.

        The norms are those before the bounds in this epoch, or in the last one if nothing was
        counted in this one yet. If there are none, all norms since attaching count.

        Args:
            share: the share of the norms, in (0, 1); for `ClampGrad`, of the largest magnitudes.
            which: as for `select`; None means every site with a bound.

        Raises:
            ValueError: if `share` is out of range, or no site has a bound.
            KeyError: if there is no such site.
            TypeError: if `share` or `which` has another type.
            RuntimeError: after `remove`.
        """
        self._run.check_installed()
        sites = self._sites if which is None else self._select(which)
        return suggestions(sites, share)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the counts as plain numbers and text, without observers' statistics.

        It also has the `history`, and the memories of `AdaGC`, `ZClip` and `SkipUpdate`. For `L2SP`
        it has the values of the parameters at ``attach``, as tensors. The memory of a class of your
        own is saved if its ``bind`` returns an object with ``state_dict`` and ``load_state_dict``.

        Raises:
            TypeError: if ``bind`` has returned another object that may have a memory, such as a
                closure.
        """
        return save(self._sites, self._run)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore the result of `state_dict`. Realized rates go on in the epoch of the state.

        Args:
            state: the state of an attachment of the same spec. The training may have become longer:
                schedules without epochs of their own follow it.
            strict: False restores the sites whose key is the same, also with another schedule.

        Raises:
            ValueError: if the state is damaged or, with `strict`, of another spec. Nothing has
                changed then.
        """
        saved = check(state, self._sites, self._run, strict)
        values = values_at(self._sites, saved.epoch)

        self._move(saved.epoch, values)
        restore(saved, self._sites, self._run)
        for site in self._sites:  # the state does not tell whether the main rate was above 0
            main_rate = next(iter(site.regularizer.rates.values()), 0.0)
            site.rose |= has_risen(main_rate, saved.epoch)

    def scalars(self, prefix: str = "reg/") -> dict[str, float]:
        """Return rates, realized rates of active sites, penalties and observer values, by tag.

        A tag is the prefix, the key of the site, and the name of the number.
        """
        rows = self.report()
        windows = [site.tally.window() for site in self._sites]
        trained = any(window.trained or window.active for window in windows)

        scalars: dict[str, float] = {}
        for row, window in zip(rows, windows, strict=True):
            observed = row.observed or {}
            numbers = dict(observed if isinstance(observed, Mapping) else observed.scalars())
            numbers |= row.values
            # in a window with training, the row may show the realized rate of the last window
            numbers["realized_rate"] = window.share() if trained else row.realized_rate

            if row.penalty is not None:
                numbers["penalty"] = window.norms.mean if trained else row.penalty

            for name, value in numbers.items():
                if value is not None:
                    scalars[f"{prefix}{row.site}/{name}"] = value
        return scalars

    def log(self, writer: Any, step: int) -> None:
        """Write every scalar to a logger.

        Args:
            writer: TensorBoard's ``SummaryWriter``, a run of wandb or its module, a logger of
                Lightning, or an object with ``add_scalar``, ``log`` or ``log_metrics``.
            step: the position on the axis of steps.

        Raises:
            TypeError: if `writer` has none of these methods.
        """
        if hasattr(writer, "add_scalar"):
            for tag, value in self.scalars().items():
                writer.add_scalar(tag, value, step)
        elif hasattr(writer, "log_metrics"):
            writer.log_metrics(self.scalars(), step=step)
        elif hasattr(writer, "log"):
            writer.log(self.scalars(), step=step)
        else:
            raise TypeError(
                "log takes a writer with add_scalar (TensorBoard's), log (a run of wandb) or "
                f"log_metrics, got {kind_of(writer)}: others take attached.scalars()"
            )
