"""The checks of run time: of the sites, of the training, and of several processes.

The first training forward of a window warns of sites that were not called; its end, of the rest.
"""

from __future__ import annotations

import atexit
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

_made: WeakSet[ModelHook] = WeakSet()  # of all attachments; copies are not in it
_EVALUATIONS = 2  # after which a training that nobody steps is reported
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

    It hooks parameters whose owners are never called themselves, as in an attention that takes the
    weights of its projections. Compiled code calls no Python. torch calls the hooks of a model that
    ``torch.compile`` has returned outside of that code, so this one leaves after the first forward
    of a window, and a `Ticker` tells when a `Watchdog` is due. ``Attachment.step`` puts it back.
    """

    @property
    def __name__(self) -> str:
        """The name, which torch.jit.script asks for first."""
        raise AttributeError(
            "torch.jit.script can't compile a model with an attachment: script it after "
            "attached.remove(), or use torch.export"
        )

    def __init__(self, run: Run, hooks: Sequence[SiteHook], model: nn.Module) -> None:
        self.run, self.hooks = run, hooks
        self._model = weakref.ref(model)
        self.parameters = [hook for hook in hooks if not hook.by_call]
        dogs = [each for hook in hooks if isinstance(each := hook.site.regularizer, Watchdog)]
        self.every = min((dog.every for dog in dogs if dog.every), default=0)
        self.fewest = max((dog.min_calls for dog in dogs), default=0)  # forwards for statistics
        self._training, self._turns = False, 0  # the mode of the last forward; turns to training
        _made.add(self)

    @property
    def model(self) -> nn.Module | None:
        """The model that it was made for; None once that is gone, and of a copy."""
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
                self._check(model, training, args[:-1])
                if run.compiled and run.looked and not self.parameters:
                    self._leave(model)
            finally:
                set_eval_frame(callback)

    def put_on(self, model: nn.Module) -> None:
        """Put it on the model, if it is not there."""
        if self not in forward_hooks(model).values():
            model.register_forward_hook(self, with_kwargs=True)

    def _leave(self, model: nn.Module) -> None:
        """Take it off a compiled model until `Attachment.step` begins another window."""
        for key, hook in list(forward_hooks(model).items()):
            if hook is self:
                remove_forward_hook(model, key)
        self._start_ticker(counted=1)

    def _check(self, model: nn.Module, training: bool, inputs: Any) -> None:
        """Look at what needs to be looked at in this forward."""
        run = self.run
        if training is not self._training and not run.stepped:
            self._training = training
            self._turns += training
            if training and self._turns > _EVALUATIONS:  # training goes on after two
                tell(not_stepped(hook.site for hook in self.hooks), run.told)
        for hook in self.parameters:
            owner = None if hook.site.calls else find_module(model, hook.site.owner)
            if owner is not None:
                hook.put(owner)
        if not (training and run.enabled) or transforming():
            return  # under a transform no number can be read
        if not run.looked and not run.counts_on_meta():
            run.looked = True
            window = replace(windows(run, self.hooks)[0], backward=False)
            tell(_idle(model, [hook for hook in self.hooks if hook.by_call], window), run.told)
            run.no_batch = find_no_batch([hook.site for hook in self.hooks], inputs)
            tell(run.no_batch + self._without_optimizer(), run.told)
        if self.every and run.ticker is None:
            self._count(model)

    def _count(self, model: nn.Module) -> None:
        """Count a training forward, look if a `Watchdog` is due, and plan the next forward."""
        clock = Clock.of(self.run.shared)
        clock.count()
        alerts = self._alerts(model) if clock.looks_for_nan(self.every) else []
        clock.gap = None
        clock.plan(self.every, self.fewest)
        tell_alerts(self.run, self.hooks, alerts)  # which may raise an error

    def _without_optimizer(self) -> list[Finding]:
        """A finding if gradients are to be regularized at steps of an optimizer nobody gave."""
        waiting = [hook for hook in self.parameters if hook.site.regularizer.accumulates]
        if self.run.optimizers or not waiting or self.model is None:  # a copy gets its own later
            return []
        keys = tuple(hook.site.key for hook in waiting)
        text = "it acts at the steps of the optimizer, and no optimizer is known in this forward"
        kind, epoch = Kind.NO_OPTIMIZER, self.run.epoch
        return [Finding(kind, Severity.WARNING, keys, text, CURE_NO_OPTIMIZER, epoch)]

    @constant_when_traced
    def _note_traced(self) -> None:
        """Let a `Watchdog` look at compiled code; torch.compile calls it while it traces."""
        self._start_ticker()

    def _start_ticker(self, counted: int = 0) -> None:
        """Start the clock of a `Watchdog`; so many of the next backwards were counted before."""
        model = self.model
        Clock.of(self.run.shared).measures = True  # a graph can't leave out measurements
        if self.every and self.run.ticker is None and model is not None:
            self.run.ticker = Ticker(model, self._wait, self._look, counted)

    def _wait(self) -> int:
        """In how many forwards the `Watchdog` is due."""
        done = Clock.of(self.run.shared).forwards
        power = 1 << done.bit_length()  # the next one of 1, 2, 4, 8, ...
        return min(power, (done // self.every + 1) * self.every) - done

    def _look(self) -> None:
        model = self.model
        if model is None:
            return
        clock = Clock.of(self.run.shared)
        clock.forwards += self._wait()
        tell_alerts(self.run, self.hooks, self._alerts(model))

    def _alerts(self, model: nn.Module) -> list[Finding]:
        """What a look finds after this forward: all faults at each n-th one, else NaN and Inf."""
        forwards = Clock.of(self.run.shared).forwards
        return new_alerts(model, self.run, self.hooks, forwards % self.every == 0)


@atexit.register
def tell_at_exit() -> None:
    """Warn at the end of the process of what somebody has forgotten."""
    for hook in list(_made):
        if hook.run.installed and hook.model is not None:
            tell(find_forgotten(hook.run, [each.site for each in hook.hooks]), hook.run.told)


def find_forgotten(run: Run, sites: Sequence[Site]) -> list[Finding]:
    """What somebody has forgotten, when a training has ended."""
    return not_stepped(sites) or find_at_end(run, sites)


def find_faults(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """Everything that is wrong in the open window, or in the last one in which it was trained."""

    def error(kind: Kind, text: str, cure: str, *sites: str) -> Finding:
        return Finding(kind, Severity.ERROR, sites, text, cure, run.epoch)

    if not run.installed:
        return [error(Kind.REMOVED, "the attachment was removed", "Call attach again")]
    found = run.scaler_findings()
    window, before = windows(run, hooks)
    if before.has("calls", "active") and not window.has("trained", "active"):
        window = before
    if not window.has("calls", "active") and not _leaves_no_trace(hooks):
        text = "no layer was called in this epoch, or since attaching or loading"
        found.append(error(Kind.NOT_RUN, text, "Run a training step first"))
    gone = sorted(set(run.keys) - {hook.site.key for hook in hooks})  # of a copy, say
    found += [error(*REPLACED, key) for key in gone]
    found += filter(None, [hook.diagnose(base, window) for hook in hooks])
    found += run.no_batch
    found += find_frozen(base, run, hooks)
    if run.epoch >= 1:
        found += find_zero_rates(run, [hook.site for hook in hooks])
    return found + not_stepped(hook.site for hook in hooks)


def tell_faults(attached: Any) -> None:
    """Warn of each fault once, and let each `Watchdog` look and act."""
    base, run, hooks = attached._base, attached._run, attached._hooks
    tell(find_faults(base, run, hooks), run.told)
    tell_alerts(run, hooks, new_alerts(base, run, hooks))


def faults_before(t: float, base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """The faults to report when the time moves to `t`, which may close the window."""
    if graph_task() != NO_TASK:
        warn(
            "step() was called during a backward: activation checkpoints that are recomputed "
            "after it use the new rates, and their gradients are wrong; call step() after "
            "backward()"
        )
    epochs = math.floor(t) - math.floor(run.epoch)
    if not run.installed:
        return find_faults(base, run, hooks)  # that it was removed
    if not epochs:
        return []
    window, _ = windows(run, hooks)
    if window.has("trained", "active") and not window.has("off"):
        gradients = [hook for hook in hooks if hook.site.regularizer.acts_on == "gradient"]
        came = any(window.sites[hook.site.key].active for hook in gradients)
        came = came or any(p.grad is not None for p in base.parameters())
        return _idle(base, hooks, replace(window, backward=came))
    if window.has("off") or epochs != 1 or run.fresh or _leaves_no_trace(hooks):
        return []  # the time was set, or compiled code only read rates
    text = f"an epoch has ended in which this {bare_type(base).__name__} was not trained"
    if window.model.evaluated:
        text += f": it ran {counted(window.model.evaluated, 'forward')} in evaluation mode"
    cure = (
        "Call model.train() before training. If another model is trained (a trainer may have "
        "copied this one), attach to that one; if this one is compiled, its code calls none of "
        "these layers"
    )
    return [Finding(Kind.NOT_TRAINED, Severity.WARNING, (), text, cure, run.epoch)]


def _leaves_no_trace(hooks: Iterable[SiteHook]) -> bool:
    """Whether compiled code may run the model uncounted, because it only reads rates."""
    return all(hook.holds_rate and not hook.needs_calls for hook in hooks)


def _idle(base: nn.Module, hooks: Iterable[SiteHook], window: Window) -> list[Finding]:
    """The faults of sites that did nothing; freezing a parameter after training it is no fault."""
    idle = [hook for hook in hooks if not window.sites[hook.site.key].active]
    faults = [(hook, hook.diagnose(base, window)) for hook in idle]
    found = [f for hook, f in faults if f and not (f.kind == Kind.LOST and hook.site.active_calls)]
    never = [hook for hook in idle if not hook.site.active_calls]
    return found + find_frozen(base, never[0].run, never) if never else found


def find_no_batch(sites: Iterable[Site], inputs: Any) -> list[Finding]:
    """A finding for each site of whole samples whose tensor has another length than the batch.

    `inputs` are the arguments of the model. Axis 0 of a tensor may hold windows, or tokens.
    """
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.ndim]
    sizes = [x.shape[0] for x in tensors]
    lists = [len(each) for each in tree_leaves(inputs, is_leaf=_is_list) if _is_list(each)]
    batches = {*sizes, *lists, sum(sizes)}  # images may come in a list, or in several sizes
    found = []
    for site in sites:
        if sizes and site.samples is not None and site.samples not in batches:
            text = (
                f"axis 0 of its tensor has {site.samples} elements and the batch has {sizes[0]}, "
                "so it does not act on whole samples"
            )
            cure = (
                "Put it on a layer whose axis 0 is the batch, such as the block around it, or say "
                "layout= if these elements are samples"
            )
            run = site.run
            keys = (site.key,)
            found.append(Finding(Kind.NO_BATCH, Severity.WARNING, keys, text, cure, run.epoch))
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def find_frozen(base: nn.Module, run: Run, hooks: Iterable[SiteHook]) -> list[Finding]:
    """A finding for each entry of the spec whose parameters are all frozen.

    A frozen parameter beside others is no fault: it is regularized once it is unfrozen.
    """
    entries: dict[tuple[int, int], list[ParameterHook]] = defaultdict(list)
    for hook in hooks:
        if isinstance(hook, ParameterHook):
            entries[hook.site.position].append(hook)
    whole = Counter(site.position for site in run.sites)
    found = []
    for position, members in entries.items():
        owners = [(hook, hook.find(base)) for hook in members]
        frozen = [h for h, owner in owners if owner is not None and h.is_frozen(owner)]
        if len(frozen) < whole[position]:
            continue
        keys = tuple(hook.site.key for hook in frozen)
        text = "the parameter is frozen (requires_grad is False) and gets no gradient"
        cure = (
            "Unfreeze it, or leave it out of the spec. If its layer was wrapped after attach, "
            "attach after that"
        )
        found.append(Finding(Kind.LOST, Severity.ERROR, keys, text, cure, run.epoch))
    return found


def not_stepped(sites: Iterable[Site]) -> list[Finding]:
    """The finding that schedules are moving and nobody has called ``step``; or nothing."""
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
    """The findings of all ranks and their differences; the same list on every rank."""
    mine = {site.key: repr(site.regularizer) for site in sites}
    mine[""] = f"epoch {run.epoch:g}{'' if run.enabled else ', paused'}"
    lists, stated, seeds = zip(*gathered((local, mine, torch.initial_seed())), strict=True)
    found = []
    for each in dict.fromkeys(chain(*lists)):
        on = [str(rank) for rank, findings in enumerate(lists) if each in findings]
        where = "" if len(on) == len(lists) else f" (on rank {', '.join(on)})"
        found.append(replace(each, text=f"{each.text}{where}"))
    for key in dict.fromkeys(chain(*stated)):
        values = [each.get(key, "nothing") for each in stated]
        if len(set(values)) > 1:
            shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            keys = (key,) if key else ()
            found.append(Finding(Kind.DIFFERS, Severity.ERROR, keys, f"the ranks differ: {shown}"))
    drawn_alike = any(site.draws for site in sites) and len(set(seeds)) < len(seeds)
    return [*found, _EQUAL_SEEDS] if drawn_alike else found


def tell_equal_seeds(run: Run, sites: Sequence[Site]) -> None:
    """Warn, once for an attachment, if another rank has the same random seed.

    Each rank puts its seed into the store of the process group and reads the seeds that are there.
    No rank waits: it looks again in the next step, until all seeds are there.
    """
    if run.compared or world_size() < 2 or not (run.installed and any(s.draws for s in sites)):
        return
    store = store_of_processes()
    if store is None:
        run.compared = True
        return
    rank = distributed.get_rank()
    seed = str(torch.initial_seed())
    if not run.seed_sent:
        store.set(f"dropblock_hooks/seed/{rank}", seed)
        run.seed_sent = True
    others = [f"dropblock_hooks/seed/{other}" for other in range(world_size()) if other != rank]
    known = [key for key in others if store.check([key])]
    run.compared = len(known) == len(others)
    if any(store.get(key).decode() == seed for key in known):
        run.compared = True
        tell([_EQUAL_SEEDS], run.told)
