"""The checks at run time: of the sites, of the training loop, and of several processes.

The first training forward of a window reports the sites that were not called. The end of the window
reports all other faults.
"""

from __future__ import annotations

import atexit
import itertools
import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, distributed, nn

from .._torch import (
    constant_when_traced,
    forward_hooks,
    remove_forward_hook,
    run_as_python,
    set_eval_frame,
    store_of_processes,
    transforming,
    tree_leaves,
)
from ..checkpointing import NO_TASK, graph_task
from ..findings import Finding, Kind, Severity, tell
from ..observers.watchdog import Clock, Watchdog
from ..selectors.wrappers import bare_type, find_module
from ..sites.held import CURE_NO_OPTIMIZER, ParameterHook
from ..sites.hooks import REPLACED, SiteHook
from ..sites.run import Run, Window, windows, world_size
from ..sites.site import Site
from ..tables import counted
from ..warn import warn
from .alerts import new_alerts, tell_alerts
from .endings import find_at_end, find_zero_rates
from .report import gathered
from .ticker import Ticker

_made: WeakSet[ModelHook] = WeakSet()  # the hooks of all attachments, without those of copies
_EVALUATIONS = 2  # a training that nobody steps is reported after so many evaluations
_EQUAL_SEEDS = Finding(
    Kind.EQUAL_GENERATORS,
    Severity.WARNING,
    (),
    "several ranks have the same torch.initial_seed() and draw the same masks",
    "Seed each data-parallel rank differently: torch.manual_seed(seed + rank). The ranks of one "
    "tensor-parallel group need equal seeds",
)


class ModelHook:
    """Forward hook of the model: counts forwards, and checks the sites at the first of a window.

    It also hooks parameters of layers that are never called, such as the projections of an
    attention that reads only their weights.

    Compiled code calls no Python. torch calls the hooks of a model that ``torch.compile`` has
    returned outside of that code. Therefore this hook leaves after the first forward of a window,
    a `Ticker` tells when a `Watchdog` is due, and ``Attachment.step`` puts the hook back.
    """

    @property
    def __name__(self) -> str:
        """The name, which torch.jit.script asks for first."""
        raise AttributeError(
            "torch.jit.script can't compile a model with an attachment: script it after "
            "attached.remove(), or use torch.export"
        )

    def __init__(self, run: Run, hooks: Sequence[SiteHook], model: nn.Module) -> None:
        self.run = run
        self.hooks = hooks
        self._model = weakref.ref(model)
        self.parameters = [hook for hook in hooks if not hook.by_call]

        regularizers = [hook.site.regularizer for hook in hooks]
        dogs = [item for item in regularizers if isinstance(item, Watchdog)]
        self.every = min((dog.every for dog in dogs if dog.every), default=0)
        self.fewest = max((dog.min_calls for dog in dogs), default=0)  # forwards for statistics

        self._training = False  # the mode of the last forward
        self._turns = 0  # how often the mode changed to training
        _made.add(self)

    @property
    def model(self) -> nn.Module | None:
        """The model that the hook was made for; None if that is gone, and in a copy."""
        return None if self._model is None else self._model()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}  # a copy has another model

    @run_as_python
    def __call__(self, model: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling():
            self._note_traced()
            return
        run = self.run
        training = model.training
        if not run.installed or graph_task() != NO_TASK:
            return  # a recomputation of checkpointing is no other forward

        run.counter.trained += training
        run.counter.evaluated += not training

        turned = training is not self._training and not run.stepped
        first = training and run.enabled and not run.looked
        if turned or first or self.every or self.parameters or run.compiled:
            callback = set_eval_frame(None)  # dynamo would compile what is called here
            try:
                self._check_and_leave(model, training, inputs=args[:-1])  # the last is the output
            finally:
                set_eval_frame(callback)

    def put_on(self, model: nn.Module) -> None:
        """Put the hook on the model, if it is not there."""
        if self not in forward_hooks(model).values():
            model.register_forward_hook(self, with_kwargs=True)

    def _check_and_leave(self, model: nn.Module, training: bool, inputs: Any) -> None:
        """Run the checks of a forward, and leave a compiled model that needs no other check."""
        run = self.run
        self._check(model, training, inputs)
        if run.compiled and run.looked and not self.parameters:
            self._leave(model)

    def _leave(self, model: nn.Module) -> None:
        """Take the hook off a compiled model until `Attachment.step` begins another window."""
        for key, hook in list(forward_hooks(model).items()):
            if hook is self:
                remove_forward_hook(model, key)
        self._start_ticker(counted=1)

    def _check(self, model: nn.Module, training: bool, inputs: Any) -> None:
        """Run the checks that are due in this forward."""
        run = self.run
        if training is not self._training and not run.stepped:
            self._note_turn(training)
        self._hook_parameters(model)

        if not (training and run.enabled) or transforming():
            return  # under a transform no number can be read

        if not run.looked and not run.counts_on_meta():
            run.looked = True
            self._check_first(model, inputs)
        if self.every and run.ticker is None:
            self._count(model)

    def _note_turn(self, training: bool) -> None:
        """Note that the mode has changed, and report a training of several epochs without step."""
        self._training = training
        self._turns += training
        if training and self._turns > _EVALUATIONS:
            tell(not_stepped(hook.site for hook in self.hooks), self.run.told)

    def _hook_parameters(self, model: nn.Module) -> None:
        """Hook the parameters of layers that were never called themselves."""
        for hook in self.parameters:
            owner = None if hook.site.calls else find_module(model, hook.site.owner)
            if owner is not None:
                hook.put(owner)

    def _check_first(self, model: nn.Module, inputs: Any) -> None:
        """Report what the first training forward of a window shows."""
        run = self.run
        self._look_at_new_parameters(model)
        opened, _ = windows(run, self.hooks)
        window = replace(opened, backward=False)
        called = [hook for hook in self.hooks if hook.by_call]
        tell(_idle(model, called, window), run.told)

        run.no_batch = find_no_batch([hook.site for hook in self.hooks], inputs)
        tell(run.no_batch + self._without_optimizer(), run.told)

    def _look_at_new_parameters(self, model: nn.Module) -> None:
        """Let `WeightStats` see parameters that had no numbers yet when it was attached.

        The first update comes after this forward, so they are those with which the epoch began.
        """
        for hook in self.hooks:
            watch = hook.site.watch
            if watch is None or not watch.open.get("waits"):
                continue
            owner = hook.find(model)
            if owner is not None:
                hook.look(owner)

    def _count(self, model: nn.Module) -> None:
        """Count a training forward, look if a `Watchdog` is due, and plan the next forward."""
        clock = Clock.of(self.run.shared)
        clock.count()
        alerts = self._alerts(model) if clock.looks_for_nan(self.every) else []

        clock.gap = None
        clock.plan(self.every, self.fewest)
        tell_alerts(self.run, self.hooks, alerts)  # comes last, because it may raise an error

    def _without_optimizer(self) -> list[Finding]:
        """Find sites that act at the steps of an optimizer, if no optimizer is known."""
        waiting = [hook for hook in self.parameters if hook.site.regularizer.accumulates]
        is_copy = self.model is None  # a copy gets its own optimizer later
        if self.run.optimizers or not waiting or is_copy:
            return []

        keys = tuple(hook.site.key for hook in waiting)
        text = "it acts at the steps of the optimizer, and no optimizer is known in this forward"
        return [
            Finding(
                kind=Kind.NO_OPTIMIZER,
                severity=Severity.WARNING,
                sites=keys,
                text=text,
                cure=CURE_NO_OPTIMIZER,
                epoch=self.run.epoch,
            )
        ]

    @constant_when_traced
    def _note_traced(self) -> None:
        """Let a `Watchdog` look at compiled code; torch.compile calls this while it traces."""
        self._start_ticker()

    def _start_ticker(self, counted: int = 0) -> None:
        """Start the clock of a `Watchdog`, if there is one.

        Args:
            counted: how many of the next backwards belong to forwards that were counted before.
        """
        run = self.run
        model = self.model
        Clock.of(run.shared).measures = True  # a graph can't leave out measurements
        if self.every and run.ticker is None and model is not None:
            run.ticker = Ticker(model, wait=self._wait, due=self._look, leave_out=counted)

    def _wait(self) -> int:
        """Return in how many forwards the `Watchdog` is due."""
        done = Clock.of(self.run.shared).forwards
        next_power = 1 << done.bit_length()  # of 1, 2, 4, 8, ...
        next_multiple = (done // self.every + 1) * self.every
        return min(next_power, next_multiple) - done

    def _look(self) -> None:
        """Look at what compiled code has counted for a `Watchdog`, and report it."""
        model = self.model
        if model is None:
            return
        clock = Clock.of(self.run.shared)
        clock.forwards += self._wait()
        tell_alerts(self.run, self.hooks, self._alerts(model))

    def _alerts(self, model: nn.Module) -> list[Finding]:
        """Look after this forward: for all faults at each n-th one, else for NaN and Inf."""
        forwards = Clock.of(self.run.shared).forwards
        statistics = forwards % self.every == 0
        return new_alerts(model, self.run, self.hooks, statistics)


@atexit.register
def tell_at_exit() -> None:
    """Warn at the end of the process of what somebody has forgotten."""
    for model_hook in list(_made):
        run = model_hook.run
        if run.installed and model_hook.model is not None:
            sites = [hook.site for hook in model_hook.hooks]
            tell(find_forgotten(run, sites), run.told)


def find_forgotten(run: Run, sites: Sequence[Site]) -> list[Finding]:
    """Find what somebody has forgotten, when a training has ended."""
    return not_stepped(sites) or find_at_end(run, sites)


def find_faults(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """Find everything that is wrong in the open window.

    If the model was not trained in it, the last window is judged, if anything was called there.
    """

    def error(kind: Kind, text: str, cure: str, *sites: str) -> Finding:
        return Finding(kind, Severity.ERROR, sites, text, cure, run.epoch)

    if not run.installed:
        return [error(Kind.REMOVED, "the attachment was removed", "Call attach again")]

    findings = run.scaler_findings()
    window, last_window = windows(run, hooks)
    if last_window.has("calls", "active") and not window.has("trained", "active"):
        window = last_window
    if not window.has("calls", "active") and not _leaves_no_trace(hooks):
        text = "no layer was called in this epoch, or since attaching or loading"
        findings.append(error(Kind.NOT_RUN, text, "Run a training step first"))

    sites = [hook.site for hook in hooks]
    present = {site.key for site in sites}
    missing = sorted(set(run.keys) - present)  # a copy may have lost hooks
    findings += [error(*REPLACED, key) for key in missing]
    findings += filter(None, [hook.diagnose(base, window) for hook in hooks])

    findings += run.no_batch
    findings += find_frozen(base, run, hooks)
    if run.epoch >= 1:
        findings += find_zero_rates(run, sites)
    return findings + not_stepped(sites)


def tell_faults(attached: Any) -> None:
    """Warn of each fault once, and let each `Watchdog` look and act."""
    base = attached._base
    run = attached._run
    hooks = attached._hooks
    tell(find_faults(base, run, hooks), run.told)
    tell_alerts(run, hooks, new_alerts(base, run, hooks))


def faults_before(t: float, base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """Find the faults to report when the time moves to `t`, which may close the window."""
    if graph_task() != NO_TASK:
        warn(
            "step() was called during a backward: activation checkpoints that are recomputed "
            "after it use the new rates, and their gradients are wrong; call step() after "
            "backward()"
        )
    if not run.installed:
        return find_faults(base, run, hooks)  # that it was removed
    epochs = math.floor(t) - math.floor(run.epoch)
    if not epochs:
        return []

    window, _ = windows(run, hooks)
    was_off = window.has("off")
    if window.has("trained", "active") and not was_off:
        return _idle(base, hooks, replace(window, backward=_had_backward(base, hooks, window)))

    time_was_set = epochs != 1 or run.fresh
    if was_off or time_was_set or _leaves_no_trace(hooks):
        return []
    return [_not_trained(base, run, window)]


def _had_backward(base: nn.Module, hooks: Iterable[SiteHook], window: Window) -> bool:
    """Return whether a backward of the model ran in the window, as far as gradients tell."""
    gradients = [hook for hook in hooks if hook.site.regularizer.acts_on == "gradient"]
    if any(window.sites[hook.site.key].active for hook in gradients):
        return True
    return any(p.grad is not None for p in base.parameters())


def _not_trained(base: nn.Module, run: Run, window: Window) -> Finding:
    """Make the finding that an epoch has ended without a training forward."""
    text = f"an epoch has ended in which this {bare_type(base).__name__} was not trained"
    if window.model.evaluated:
        text += f": it ran {counted(window.model.evaluated, 'forward')} in evaluation mode"
    cure = (
        "Call model.train() before training. If another model is trained (a trainer may have "
        "copied this one), attach to that one; if this one is compiled, its code calls none of "
        "these layers"
    )
    return Finding(Kind.NOT_TRAINED, Severity.WARNING, (), text, cure, run.epoch)


def _leaves_no_trace(hooks: Iterable[SiteHook]) -> bool:
    """Return whether compiled code may run the model uncounted, because it only reads rates."""
    return all(hook.holds_rate and not hook.needs_calls for hook in hooks)


def _idle(base: nn.Module, hooks: Iterable[SiteHook], window: Window) -> list[Finding]:
    """Find the faults of the sites that did nothing in a window.

    If somebody freezes a parameter after it was trained, that is no fault.
    """
    idle = [hook for hook in hooks if not window.sites[hook.site.key].active]
    findings = []
    for hook in idle:
        fault = hook.diagnose(base, window)
        if fault is None:
            continue
        frozen_later = fault.kind == Kind.LOST and hook.site.active_calls
        if not frozen_later:
            findings.append(fault)

    never = [hook for hook in idle if not hook.site.active_calls]
    if never:
        findings += find_frozen(base, never[0].run, never)
    return findings


def find_no_batch(sites: Iterable[Site], inputs: Any) -> list[Finding]:
    """Find the sites of whole samples whose tensor has another length than the batch.

    Axis 0 of such a tensor may hold windows, or tokens.

    Args:
        sites: the sites that were called in a forward.
        inputs: the arguments of the model in that forward.
    """
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.ndim]
    sizes = [x.shape[0] for x in tensors]
    if not sizes:
        return []
    # images may come in a list, or in several sizes
    lists = [value for value in tree_leaves(inputs, is_leaf=_is_list) if _is_list(value)]
    batches = {*sizes, *map(len, lists), sum(sizes)}

    findings = []
    for site in sites:
        if site.samples is None or site.samples in batches:
            continue
        text = (
            f"axis 0 of its tensor has {site.samples} elements and the batch has {sizes[0]}, "
            "so it does not act on whole samples"
        )
        cure = (
            "Put it on a layer whose axis 0 is the batch, such as the block around it, or say "
            "layout= if these elements are samples"
        )
        keys = (site.key,)
        epoch = site.run.epoch
        findings.append(Finding(Kind.NO_BATCH, Severity.WARNING, keys, text, cure, epoch))
    return findings


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def find_frozen(base: nn.Module, run: Run, hooks: Iterable[SiteHook]) -> list[Finding]:
    """Find the entries of the spec whose parameters are all frozen.

    A frozen parameter beside others is no fault, because it is regularized once it is unfrozen.
    """
    entries: dict[tuple[int, int], list[ParameterHook]] = defaultdict(list)
    for hook in hooks:
        if isinstance(hook, ParameterHook):
            entries[hook.site.position].append(hook)

    sizes = Counter(site.position for site in run.sites)
    findings = []
    for position, members in entries.items():
        frozen = [hook for hook in members if _has_frozen(hook, base)]
        if len(frozen) < sizes[position]:
            continue
        keys = tuple(hook.site.key for hook in frozen)
        text = "the parameter is frozen (requires_grad is False) and gets no gradient"
        cure = (
            "Unfreeze it, or leave it out of the spec. If its layer was wrapped after attach, "
            "attach after that"
        )
        findings.append(Finding(Kind.LOST, Severity.ERROR, keys, text, cure, run.epoch))
    return findings


def _has_frozen(hook: ParameterHook, base: nn.Module) -> bool:
    """Return whether the parameter of a hook is still in the model, and frozen."""
    owner = hook.find(base)
    return owner is not None and hook.is_frozen(owner)


def not_stepped(sites: Iterable[Site]) -> list[Finding]:
    """Find out whether schedules are moving and nobody has called ``step``: one finding or none."""
    for site in sites:
        if site.moves and site.counter.trained and not site.run.stepped:
            text = (
                f"the rate of {site.key} is still {site.rate} in call {site.calls} of the layer, "
                "since nobody has called step"
            )
            cure = (
                "Call attached.step(epoch) at the start of each epoch, or step() at its end; if "
                "the rate is to stand still, step(0) at the start silences this"
            )
            return [Finding(Kind.NOT_STEPPED, Severity.WARNING, (), text, cure, site.run.epoch)]
    return []


def compare(run: Run, sites: Sequence[Site], local: Sequence[Finding]) -> list[Finding]:
    """Find the faults of all ranks and their differences; the same list on every rank."""
    settings = {site.key: repr(site.regularizer) for site in sites}
    settings[""] = f"epoch {run.epoch:g}{'' if run.enabled else ', paused'}"
    of_ranks = gathered((local, settings, torch.initial_seed()))
    findings_of_ranks, settings_of_ranks, seeds = zip(*of_ranks, strict=True)

    findings = _with_ranks(findings_of_ranks) + _differences(settings_of_ranks)
    seeds_repeat = len(set(seeds)) < len(seeds)
    if seeds_repeat and any(site.draws for site in sites):
        findings.append(_EQUAL_SEEDS)
    return findings


def _with_ranks(findings_of_ranks: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Name the ranks of each finding, if it does not hold on all of them."""
    named = []
    for finding in dict.fromkeys(chain(*findings_of_ranks)):
        ranks = [str(rank) for rank, those in enumerate(findings_of_ranks) if finding in those]
        everywhere = len(ranks) == len(findings_of_ranks)
        where = "" if everywhere else f" (on rank {', '.join(ranks)})"
        named.append(replace(finding, text=f"{finding.text}{where}"))
    return named


def _differences(settings_of_ranks: Sequence[dict[str, str]]) -> list[Finding]:
    """Find the sites whose regularizer is another one on some ranks; the key "" is the model."""
    findings = []
    for key in dict.fromkeys(chain(*settings_of_ranks)):
        values = [settings.get(key, "nothing") for settings in settings_of_ranks]
        if len(set(values)) == 1:
            continue
        shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
        keys = (key,) if key else ()
        text = f"the ranks differ: {shown}"
        findings.append(Finding(Kind.DIFFERS, Severity.ERROR, keys, text))
    return findings


def tell_equal_seeds(run: Run, sites: Sequence[Site]) -> None:
    """Warn, once for an attachment, if another rank has the same random seed.

    Each rank puts its seed into the store of the process group and reads the seeds that are there.
    No rank waits for the others. It looks again in the next step, until all seeds are there.
    """
    if run.compared or world_size() < 2 or not run.installed:
        return
    if not any(site.draws for site in sites):
        return
    store = store_of_processes()
    if store is None:
        run.compared = True
        return

    rank = distributed.get_rank()
    seed = str(torch.initial_seed())
    if run.comparison is None:  # later attachments of the process must not read these seeds
        run.comparison = next(_comparisons)
        store.set(_key_of_seed(run.comparison, rank), seed)

    others = _seeds_of_others(store, run.comparison, rank)
    run.compared = None not in others
    if seed in others:
        run.compared = True
        tell([_EQUAL_SEEDS], run.told)


_comparisons = itertools.count()


def _key_of_seed(comparison: int, rank: int) -> str:
    return f"dropblock_hooks/seed/{comparison}/{rank}"


def _seeds_of_others(store: Any, comparison: int, rank: int) -> list[str | None]:
    """Read the seeds of the other ranks from the store, without waiting; None for missing ones."""
    seeds: list[str | None] = []
    for other in range(world_size()):
        if other == rank:
            continue
        key = _key_of_seed(comparison, other)
        is_there = store.check([key])
        seeds.append(store.get(key).decode() if is_there else None)
    return seeds
