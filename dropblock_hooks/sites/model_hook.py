"""The hook of the model, which counts forwards and runs the checks that are due.

`place.install` puts it on the model. Then torch calls it after each forward of the model.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from .._torch import (
    NO_TASK,
    constant_when_traced,
    forward_hooks,
    graph_task,
    remove_forward_hook,
    run_as_python,
    set_eval_frame,
    transforming,
)
from ..findings import Finding
from ..functional.kernels import launch
from ..observers.watchdog import Clock, Watchdog
from ..selectors.wrappers import find_module
from .hooks import SiteHook
from .run import Run
from .ticker import Ticker

_EVALUATIONS = 2  # a training without ``step`` is reported after so many evaluations


class Checks(Protocol):
    """The checks that a `ModelHook` runs. ``diagnosis`` implements them."""

    def check_steps(self, hook: ModelHook) -> None:
        """Report schedules if ``step`` was not called after several evaluations."""

    def require_optimizer(self, hook: ModelHook) -> None:
        """Raise a SiteError if a regularizer judges updates and no optimizer is known."""

    def note_writes(self, hook: ModelHook, model: nn.Module) -> None:
        """Note how often parameters were written before the first forward of a window."""

    def check_first(self, hook: ModelHook, model: nn.Module, inputs: Any) -> None:
        """Report the faults that the first training forward of a window shows."""

    def new_alerts(self, hook: ModelHook, model: nn.Module, statistics: bool) -> list[Finding]:
        """Return the new findings of a `Watchdog`: all, or only NaN and Inf if not `statistics`."""

    def tell_alerts(self, hook: ModelHook, alerts: Sequence[Finding]) -> None:
        """Report the findings of a `Watchdog`."""


def _watchdogs(hooks: Sequence[SiteHook]) -> list[Watchdog]:
    """Return each `Watchdog` of the sites."""
    regularizers = [hook.site.regularizer for hook in hooks]
    return [item for item in regularizers if isinstance(item, Watchdog)]


def _is_handled_by(caller: FrameType, error: BaseException) -> bool:
    """Return whether the caller of a hook handles this error, because the forward has raised it.

    ``sys.exception`` also returns an error that code further out handles while it trains.
    """
    traceback = error.__traceback__  # begins at the frame that handles the error
    return traceback is not None and traceback.tb_frame is caller


class ModelHook:
    """Forward hook of the model: counts forwards, and checks the sites in the first of a window.

    It also hooks parameters of layers that are never called. An attention, for example, may read
    only the weights of its projections.

    Compiled code calls no Python. However, a model that ``torch.compile`` has returned calls its
    hooks outside of the compiled code. Therefore this hook removes itself after the first forward
    of a window. A `Ticker` then says when a `Watchdog` is due, and ``Attachment.step`` puts the
    hook back.
    """

    @property
    def __name__(self) -> str:
        """The name, which torch.jit.script asks for first."""
        raise AttributeError(
            "torch.jit.script can't compile a model with an attachment: script it after "
            "attached.remove(), or use torch.export"
        )

    def __init__(
        self, run: Run, hooks: Sequence[SiteHook], model: nn.Module, checks: Checks
    ) -> None:
        self.run = run
        self.hooks = hooks
        self.checks = checks
        self._model = weakref.ref(model)
        self.parameters = [hook for hook in hooks if not hook.by_call]
        # the step of the optimizer finds the gradients for the other hooks
        self.to_hook = [h for h in self.parameters if not h.site.regularizer.accumulates]

        dogs = _watchdogs(hooks)
        self.every = min((dog.every for dog in dogs if dog.every), default=0)
        # the measured forwards that statistics need
        self.fewest = max((dog.enough for dog in dogs), default=0)
        self.compares = any("equal_inputs" in dog.names for dog in dogs)
        self.checks_all = bool(self.fewest or self.to_hook)  # whether each forward has a check

        self._training = False  # the mode of the last forward
        self._changes_to_training = 0  # how often the mode changed to training, including the start

    @property
    def model(self) -> nn.Module | None:
        """The model that the hook was made for; None if it is gone, and None in a copy."""
        return None if self._model is None else self._model()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}  # a copy has another model

    @run_as_python
    def __call__(self, model: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling():
            self._note_traced(model.training)
            return
        run = self.run
        training = model.training
        if not run.installed or graph_task() != NO_TASK:
            return  # checkpointing recomputes a forward that was counted before

        run.counter.trained += training
        run.counter.evaluated += not training

        # decided here, because a method would take time in each forward
        if training:
            due = run.enabled and not run.checked
        else:  # the model may be trained in evaluation mode
            due = run.writes is None and torch.is_grad_enabled()
        mode_changed = training is not self._training and not run.stepped
        may_have_failed = sys.exception() is not None  # torch calls this hook after an error, too
        if True in (due, mode_changed, self.checks_all, run.compiled, may_have_failed):
            callback = set_eval_frame(None)  # otherwise dynamo would compile the checks
            try:
                inputs = args[:-1]
                self._check_and_leave(model, training, inputs, caller=sys._getframe(1))
            finally:
                set_eval_frame(callback)

    def put_on(self, model: nn.Module) -> None:
        """Put the hook on the model, if it is not there."""
        if self not in forward_hooks(model).values():
            # called even if the forward raises an error, so that it is counted as failed
            model.register_forward_hook(self, with_kwargs=True, always_call=True)

    def _check_and_leave(
        self, model: nn.Module, training: bool, inputs: Any, caller: FrameType
    ) -> None:
        """Run the checks of a forward, then leave a compiled model if no other check is needed.

        There is no check if the forward, or an earlier hook of the model, has raised an error.
        """
        run = self.run
        error = sys.exception()
        if error is not None and _is_handled_by(caller, error):
            run.counter.failed += training
            run.counter.trained -= training
            run.counter.evaluated -= not training
            return
        self._check(model, training, inputs)
        if run.compiled and run.checked and not self.to_hook:
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
            self._note_mode(training)
        self._hook_parameters(model)
        self._note_writes(model, training)

        if not (training and run.enabled) or transforming():
            if self.fewest:
                Clock.of(run.shared).count_unmeasured()
            return  # under a transform of torch.func no number can be read

        if self._is_first(training):
            self.checks.require_optimizer(self)
            run.checked = True
            self._read_new_parameters(model)
            self.checks.check_first(self, model, inputs)
        if run.ticker is None and not launch.is_captured():
            self._run_watchdogs(model, inputs)

    def _is_first(self, training: bool) -> bool:
        """Return whether this is the first training forward of a window, with real tensors."""
        run = self.run
        return training and run.enabled and not run.checked and not run.counts_on_meta()

    def _run_watchdogs(self, model: nn.Module, inputs: Any) -> None:
        """Give each `Watchdog` the facts about a training forward, and let it look if it is due."""
        if self.fewest:
            self._after_measured_forward(model, inputs)
        if self.every:
            self._count(model)

    def _note_writes(self, model: nn.Module, training: bool) -> None:
        """Note the writes of parameters in evaluation mode, which may be used to train, too."""
        if not training and self.run.writes is None and torch.is_grad_enabled():
            self.checks.note_writes(self, model)

    def _note_mode(self, training: bool) -> None:
        """Note a change of the mode, and report a training of several epochs without ``step``."""
        self._training = training
        self._changes_to_training += training
        if training and self._changes_to_training > _EVALUATIONS:
            self.checks.check_steps(self)

    def _hook_parameters(self, model: nn.Module) -> None:
        """Hook the parameters of layers that were never called."""
        for hook in self.to_hook:
            tally = hook.site.tally  # `counter` could wait for a device
            if tally.trained or tally.evaluated:
                continue
            owner = find_module(model, hook.site.owner)
            if owner is not None:
                hook.refresh(owner)

    def _read_new_parameters(self, model: nn.Module) -> None:
        """Let `WeightStats` read parameters that were initialized after it was attached.

        No update has come before this forward, so their values are those at the begin of the epoch.
        """
        for hook in self.hooks:
            watch = hook.site.watch
            if watch is None or not watch.open.get("waits"):
                continue
            owner = hook.find(model)
            if owner is not None:
                hook.read_layer(owner, together=True)

    def _after_measured_forward(self, model: nn.Module, inputs: Any) -> None:
        """Let each `Watchdog` see inputs and parameters after a forward that it has measured."""
        clock = Clock.of(self.run.shared)
        if not (clock.measures and torch.is_grad_enabled()):
            return
        if self.compares:
            clock.batches.compare(*inputs)
        for hook in self.hooks:
            dog = hook.site.regularizer
            if isinstance(dog, Watchdog):
                layer = find_module(model, hook.site.name)
                if layer is not None:
                    dog.after_measured_forward(hook.site.bound.open, layer)

    def _count(self, model: nn.Module) -> None:
        """Count a training forward, let a `Watchdog` look if it is due, and plan the next one."""
        clock = Clock.of(self.run.shared)
        clock.count()
        alerts = self._alerts(model) if clock.looks_for_nan(self.every) else []

        clock.gap = None  # only this look reports it
        clock.plan(self.every, self.fewest)
        self.checks.tell_alerts(self, alerts)  # comes last, because it may raise an error

    @constant_when_traced
    def _note_traced(self, training: bool) -> None:
        """Start the clock of a `Watchdog`. torch.compile calls this while it traces.

        Raises:
            SiteError: for a training whose updates a regularizer can't judge.
        """
        if self._is_first(training):
            self.checks.require_optimizer(self)
        self._start_ticker()

    def _start_ticker(self, counted: int = 0) -> None:
        """Start the clock of a `Watchdog`, if there is one.

        Args:
            counted: how many of the next backwards belong to forwards that were already counted.
        """
        run = self.run
        model = self.model
        Clock.of(run.shared).measures = True  # a graph can't leave out measurements
        if self.every and run.ticker is None and model is not None:
            run.ticker = Ticker(model, wait=self._wait, due=self._look, leave_out=counted)

    def _wait(self) -> int:
        """Return the number of forwards until the `Watchdog` is due."""
        done = Clock.of(self.run.shared).forwards
        next_power = 1 << done.bit_length()  # of 1, 2, 4, 8, ...
        next_multiple = (done // self.every + 1) * self.every
        return min(next_power, next_multiple) - done

    def _look(self) -> None:
        """Judge the numbers of a `Watchdog` in compiled code, and report its findings."""
        model = self.model
        if model is None:
            return
        clock = Clock.of(self.run.shared)
        clock.forwards += self._wait()  # those since the last look, which the ticker has counted
        alerts = self._alerts(model)
        self.run.write()  # compiled code reads there which forwards to measure
        self.checks.tell_alerts(self, alerts)

    def _alerts(self, model: nn.Module) -> list[Finding]:
        """Return the new findings: of all kinds in each n-th forward, else only NaN and Inf."""
        forwards = Clock.of(self.run.shared).forwards
        statistics = forwards % self.every == 0
        return self.checks.new_alerts(self, model, statistics)
