"""Checks after forwards of the model, mostly after the first training forward of a window.

A `ModelHook` calls the methods of `ForwardChecks`. `place.install` makes the object and gives it to
the hook. `plan` also calls `find_no_batch`, and `verify` calls `find_unknown_scaler`.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .. import messages
from .._torch import tree_leaves
from ..findings import Finding, tell
from ..observers.batches import is_list
from ..observers.updates import writes_to
from ..quoting import listed
from ..regularizers.memory import WithMemory
from ..sites.hooks import SiteHook
from ..sites.model_hook import ModelHook
from ..sites.run import Run
from ..sites.site import LiveSite
from ..sites.windows import Window, windows
from ..warn import warn
from .alerts import new_alerts, tell_alerts
from .endings import not_stepped
from .idle import find_idle
from .lost import find_overwritten, find_split_groups, old_anchors
from .routed import around, routed_lists

_BATCH_OF_IMAGES = 4  # axes; messages count a tensor in a list with fewer axes as one sample
_MOST_VIEWS = 64  # tensors in a list; longer lists have too many sums of neighbors


class ForwardChecks:
    """The checks that a `ModelHook` runs in the forwards of the model; see `Checks` there."""

    def check_steps(self, hook: ModelHook) -> None:
        """Report a schedule if ``step`` was never called.

        The hook asks when the mode changes to training for the third time, and later.
        """
        sites = [site_hook.site for site_hook in hook.hooks]
        tell(not_stepped(sites), hook.run.told)

    def require_optimizer(self, hook: ModelHook) -> None:
        """Refuse a training whose updates a regularizer can't judge."""
        for site in _sites_without_optimizer(hook):
            if isinstance(site.regularizer, WithMemory):
                raise site.error(
                    f"{site.regularizer.label} judges each update, and no optimizer is known in "
                    "this forward: pass attach(..., optimizer=optimizer), or set "
                    "attached.optimizer = optimizer"
                )

    def note_writes(self, hook: ModelHook, model: nn.Module) -> None:
        """Note how often parameters were written up to the end of the first forward of a window.

        ``diagnosis.now`` compares with it, because later writes show that the model is trained,
        also in evaluation mode.
        """
        hook.run.writes = writes_to(model)

    def check_first(self, hook: ModelHook, model: nn.Module, inputs: Any) -> None:
        """Report the faults that the first training forward of a window shows."""
        run = hook.run
        self.note_writes(hook, model)
        opened, _ = windows(run, hook.hooks)
        # no backward has run yet, so missing gradients are no fault
        window = replace(opened, backward=False)

        # the layer of a parameter may never be called, so its hook is left out
        by_call = [site_hook for site_hook in hook.hooks if site_hook.by_call]
        expected = _not_left_out(model, by_call, window)
        idle = find_idle(model, expected, window)
        run.history.note_findings(idle)
        tell(idle, run.told)
        # ``behind`` compares the calls of later forwards with these
        run.first_calls = {key: counts.trained for key, counts in window.sites.items()}

        sites = []
        for site_hook in hook.hooks:
            site = site_hook.site
            if window.sites[site.key].calls:
                sites.append(site)
        run.no_batch = find_no_batch(sites, inputs)
        findings = list(run.no_batch)
        findings += _find_no_optimizer(hook)
        findings += find_unknown_scaler(run)
        findings += find_overwritten(model, run, hook.parameters)
        findings += find_split_groups(model, run, hook.parameters)
        run.history.note_findings(findings)
        tell(findings, run.told)

        keys = old_anchors(model, hook.parameters)
        if keys:
            text = messages.ANCHOR_BEFORE_LOADING.format(sites=listed(keys, 5))
            warn(text)

    def new_alerts(self, hook: ModelHook, model: nn.Module, statistics: bool) -> list[Finding]:
        """Return the new findings of a `Watchdog`: all, or only NaN and Inf if not `statistics`."""
        return new_alerts(model, hook.run, hook.hooks, statistics)

    def tell_alerts(self, hook: ModelHook, alerts: Sequence[Finding]) -> None:
        """Report the findings of a `Watchdog`."""
        tell_alerts(hook.run, hook.hooks, alerts)


def _not_left_out(model: nn.Module, hooks: list[SiteHook], window: Window) -> list[SiteHook]:
    """Return the hooks whose layers the model should have called in this forward.

    A layer in a list from which the model chooses some may be left out.
    """
    called = [hook.site.owner for hook in hooks if window.sites[hook.site.key].calls]
    routed = routed_lists(model, called)
    expected = []
    for hook in hooks:
        was_called = window.sites[hook.site.key].calls
        parents = around(hook.site.owner)
        if was_called or routed.isdisjoint(parents):
            expected.append(hook)
    return expected


def _sites_without_optimizer(hook: ModelHook) -> list[LiveSite]:
    """Return the sites that act at the steps of an optimizer, if no optimizer is known."""
    is_copy = hook.model is None  # a copy gets its own optimizer later
    if hook.run.optimizers or is_copy:
        return []
    sites = [site_hook.site for site_hook in hook.parameters]
    return [site for site in sites if site.regularizer.accumulates]


def _find_no_optimizer(hook: ModelHook) -> list[Finding]:
    """Find sites that act at the steps of an optimizer, if no optimizer is known."""
    keys = [site.key for site in _sites_without_optimizer(hook)]
    if not keys:
        return []
    finding = messages.NO_OPTIMIZER.finding(
        *keys,
        epoch=hook.run.epoch,
    )
    return [finding]


def find_unknown_scaler(run: Run) -> list[Finding]:
    """Find out whether bounds act under autocast to float16 while no GradScaler is known."""
    is_known = run.scaler is not None
    if is_known or not run.in_float16:
        return []
    finding = messages.GRAD_SCALER.finding(epoch=run.epoch)
    return [finding]


def find_no_batch(sites: Iterable[LiveSite], inputs: Any) -> list[Finding]:
    """Find the sites that drop whole samples, and whose axis 0 is not as long as the batch.

    Axis 0 of such a tensor may hold windows or tokens.

    Args:
        sites: the sites that were called in a forward.
        inputs: the arguments of the model in that forward.
    """
    leaves = tree_leaves(inputs)
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.ndim]
    if not tensors:
        return []

    leaves_and_lists = tree_leaves(inputs, is_leaf=is_list)
    lists = [value for value in leaves_and_lists if is_list(value)]
    first = _first_batch(tensors[0], lists)
    batches = _batches(tensors, lists)

    findings = []
    for site in sites:
        if site.samples is None or site.samples in batches:
            continue
        finding = messages.NO_BATCH.finding(
            site.key,
            epoch=site.run.epoch,
            samples=site.samples,
            batch=first,
        )
        findings.append(finding)
    return findings


def _first_batch(first: Tensor, lists: Sequence[list[Any]]) -> int:
    """Return the length of the batch for messages: of the first tensor, or of its list."""
    has_batch_axis = first.ndim >= _BATCH_OF_IMAGES
    if has_batch_axis:
        return first.shape[0]
    for values in lists:
        if values and values[0] is first:
            return len(values)  # every tensor in the list is a sample
    return first.shape[0]


def _batches(tensors: Sequence[Tensor], lists: Sequence[list[Any]]) -> set[int]:
    """Return all lengths that axis 0 of whole samples may have.

    Images may come in a list. A model may concatenate images of the same size. Tensors in a list
    may be samples or batches, such as tokens with their mask, so both lengths are allowed.
    """
    sizes = [x.shape[0] for x in tensors]
    batches = set(sizes)
    batches.add(sum(sizes))
    for values in lists:
        batches.add(len(values))
        batches |= _sums_of_neighbors(values)
    return batches


def _sums_of_neighbors(values: list[Any]) -> set[int]:
    """Return the lengths of axis 0 that result if neighbors in a list are concatenated."""
    if len(values) > _MOST_VIEWS:
        return set()
    if not all(isinstance(x, Tensor) and x.ndim for x in values):
        return set()

    lengths = [x.shape[0] for x in values]
    ends = [0, *itertools.accumulate(lengths)]
    pairs = itertools.combinations(ends, 2)
    return {last - first for first, last in pairs}
