"""The hook of the model, which counts forwards and runs the checks that are due."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
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

_EVALUATIONS = 2  # a training that nobody steps is reported after so many evaluations


class Checks(Protocol):
    """The checks that a `ModelHook` runs. ``diagnosis`` implements them."""

    def check_steps(self, hook: ModelHook) -> None:
        """Report schedules that nobody steps, after several evaluations."""

    def require_optimizer(self, hook: ModelHook) -> None:
        """Raise a SiteError if a regularizer judges updates and no optimizer is known."""

    def check_first(self, hook: ModelHook, model: nn.Module, inputs: Any) -> None:
        """Report the faults that the first training forward of a window shows."""

    def new_alerts(self, hook: ModelHook, model: nn.Module, statistics: bool) -> list[Finding]:
        """Return the new findings of a `Watchdog`, without `statistics` those about NaN and Inf."""

    def tell_alerts(self, hook: ModelHook, alerts: Sequence[Finding]) -> None:
        """Report the findings of a `Watchdog`."""


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

    def __init__(
        self, run: Run, hooks: Sequence[SiteHook], model: nn.Module, checks: Checks
    ) -> None:
        self.run = run
        self.hooks = hooks
        self.checks = checks
        self._model = weakref.ref(model)
        self.parameters = [hook for hook in hooks if not hook.by_call]

        regularizers = [hook.site.regularizer for hook in hooks]
        dogs = [item for item in regularizers if isinstance(item, Watchdog)]
        self.every = min((dog.every for dog in dogs if dog.every), default=0)
        self.fewest = max((dog.enough for dog in dogs), default=0)  # forwards for statistics
        self.compares = any("equal_inputs" in dog.names for dog in dogs)

        self._training = False  # the mode of the last forward
        self._turns = 0  # how often the mode changed to training

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
        if turned or first or self.fewest or self.parameters or run.compiled:
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
            self.checks.require_optimizer(self)
            run.looked = True
            self._look_at_new_parameters(model)
            self.checks.check_first(self, model, inputs)
        if run.ticker is None and not launch.is_captured():
            if self.fewest:
                self._note_measured(model, inputs)
            if self.every:
                self._count(model)

    def _note_turn(self, training: bool) -> None:
        """Note that the mode has changed, and report a training of several epochs without step."""
        self._training = training
        self._turns += training
        if training and self._turns > _EVALUATIONS:
            self.checks.check_steps(self)

    def _hook_parameters(self, model: nn.Module) -> None:
        """Hook the parameters of layers that were never called themselves."""
        for hook in self.parameters:
            tally = hook.site.tally  # reading all its counts could wait for a device
            if tally.trained or tally.evaluated or hook.site.regularizer.accumulates:
                continue
            owner = find_module(model, hook.site.owner)
            if owner is not None:
                hook.put(owner)

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
                hook.look(owner, together=True)

    def _note_measured(self, model: nn.Module, inputs: Any) -> None:
        """Let a `Watchdog` note inputs and parameters after a forward that it has measured."""
        clock = Clock.of(self.run.shared)
        if not (clock.measures and torch.is_grad_enabled()):
            return
        if self.compares:
            clock.batches.note(*inputs)
        for hook in self.hooks:
            dog = hook.site.regularizer
            if isinstance(dog, Watchdog):
                layer = find_module(model, hook.site.name)
                if layer is not None:
                    dog.note(hook.site.bound.open, layer)

    def _count(self, model: nn.Module) -> None:
        """Count a training forward, look if a `Watchdog` is due, and plan the next forward."""
        clock = Clock.of(self.run.shared)
        clock.count()
        alerts = self._alerts(model) if clock.looks_for_nan(self.every) else []

        clock.gap = None
        clock.plan(self.every, self.fewest)
        self.checks.tell_alerts(self, alerts)  # comes last, because it may raise an error

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
        alerts = self._alerts(model)
        self.run.write()  # which forwards are measured from now on
        self.checks.tell_alerts(self, alerts)

    def _alerts(self, model: nn.Module) -> list[Finding]:
        """Look after this forward: for all faults at each n-th one, else for NaN and Inf."""
        forwards = Clock.of(self.run.shared).forwards
        statistics = forwards % self.every == 0
        return self.checks.new_alerts(self, model, statistics)
