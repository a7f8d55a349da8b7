"""A site: one regularizer on one layer, its state and what it has counted."""

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpointing import NO_TASK, Past, graph_task, loses_random_state, plainly_run
from ..functional.axes import Form, are_numbers
from ..functional.masks import wide_dtype
from ..layouts.hints import Evidence
from ..observers.base import Watch
from ..regularizers.base import Regularizer
from ..warn import warn
from .counts import Varying, varying
from .forms import Forms
from .meter import Sizes
from .record import Record
from .shared import Control

_EVALUATIONS = 2


class SiteError(ValueError):
    """A regularizer met a tensor that it can't work on; the message names the site."""


class Site:
    """One regularizer on one layer.

    Attributes:
        key: its name in the Attachment: ``layer4.0/DropBlock2d``.
        name: the layer (or parameter), as the bare model names it.
        aliases: other names of the same, shared, module.
        module_type: class name of the layer.
        evidence: what the model tells about its layout; None for a parameter.
        forms: how the axes of its tensors are read.
        regularizer: what is done here.
        values: the rates now, by field.
        rate: the main rate now: the first one of the regularizer; None where it has none.
        record: what was counted.
        bound: what the regularizer has bound for this site, with a state of its own perhaps.
    """

    def __init__(
        self,
        key: str,
        name: str,
        module_type: str,
        regularizer: Regularizer,
        control: Control,
        aliases: tuple[str, ...] = (),
        evidence: Evidence | None = None,
    ) -> None:
        self.key = key
        self.name = name
        self.aliases = aliases
        self.module_type = module_type
        self.control = control
        self.evidence = evidence
        self.forms = Forms(regularizer, evidence, control.sizes)
        self.order = 0
        self.record = Record(regularizer.spatial, torch.device("cpu"))
        self._waiting = self._recomputed = False
        self._mode: bool | None = None  # of the last call, while nobody has stepped a schedule
        self._resumed = 0  # how often training went on after an evaluation
        self._acted = {True: Past[bool](), False: Past[bool]()}  # by the layer's mode
        self._drawn_with = Past[Mapping[str, float]]()
        self.bound: Any = None
        self.set_regularizer(regularizer)
        self._notes_modes = self._waiting  # for good: `set` compiles nothing anew

    def set_regularizer(self, regularizer: Regularizer) -> None:
        """Put another one of the same class in place, with the values of the present epoch."""
        values = regularizer.values(self.control.epoch)
        self.regularizer = copy.copy(regularizer)  # compiled code guards what sites share
        self.forms.regularizer = self.regularizer
        self._at_input = regularizer.at == "input"
        before, self.bound = self.bound, self.regularizer.bind()
        if hasattr(before, "state_dict") and hasattr(self.bound, "load_state_dict"):
            self.bound.load_state_dict(before.state_dict())
        self.move(values)
        self._waiting = regularizer.moving
        self._beyond_training = regularizer.active == "always" or regularizer.follows_host

    def move(self, values: dict[str, float], device: torch.device | None = None) -> None:
        """Put other values in place; new tensors, since a pending backward may hold the old.

        They, and the meter, go to the device where the layer is, if that is known.
        """
        meter = self.record.meter
        if device is not None:
            meter.to(device)
            if self.watch is not None:
                self.watch.to(device)
        self.values = values
        self.rate = next(iter(values.values()), None)
        whole = self.regularizer.index is None and self.regularizer.idle_at_zero
        self._idle = whole and self.rate == 0.0
        self._still = False  # True: at a rate of 0, and a training call would do as the last one
        # for compiled code: other numbers in it do not compile anew. Not one tensor without axes
        # for each: torch would take those for Python scalars, and trace all twice
        place = meter.counts.device
        with torch.inference_mode(False):  # of a validation: the next training can't use such
            self._traced = torch.empty(len(values), dtype=wide_dtype(place), device=place)
            for at, value in enumerate(values.values()):
                self._traced[at].fill_(value)  # no copy from the host, which would be waited for

    def close_window(self) -> None:
        """The whole part of the epoch changes: begin to count anew."""
        self.record.close_window()
        if self.watch is not None:
            self.watch.close_window()

    @property
    def watch(self) -> Watch | None:
        """What it has seen, where it is one of an observer."""
        return self.bound if isinstance(self.bound, Watch) else None

    def __repr__(self) -> str:
        return f"Site({self.key!r}, {self.regularizer!r})"

    @property
    def at(self) -> str:
        """``"output"`` or ``"input"``; of no layer ``"parameter"`` or ``"attribute"``."""
        if self.evidence:
            return self.regularizer.at
        return "parameter" if self.regularizer.acts_on == "gradient" else "attribute"

    @property
    def layout(self) -> str | None:
        """The axes of the tensors seen last, ``"NHWC"`` say; None before the first call."""
        form = self.forms.last
        return None if form is None or self.at == "attribute" else form.layout

    @property
    def calls(self) -> int:
        """Forward calls of the layer since it was attached; for a parameter, of its owner.

        Compiled code counts those in which the site is on.
        """
        return self.record.read(elements=False).life.calls

    @property
    def active_calls(self) -> int:
        """Calls in which it was on; of a gradient regularizer, the gradients that it has seen."""
        return self.record.read(elements=False).life.active

    @property
    def realized_rate(self) -> float | None:
        """Share of the elements dropped or changed since the epoch began.

        The window closes when the whole part of the epoch changes; an empty window shows the one
        that closed then. Attaching, `Attachment.set` and loading a state begin one that shows
        nothing. Reading it waits for the device.
        """
        return self.record.read().shown.share()

    @property
    def expected_rate(self) -> float | None:
        """The mean nominal rate over the same window as `realized_rate`."""
        return self.record.read().shown.expected_share()

    @property
    def total_realized_rate(self) -> float | None:
        """The same as `realized_rate`, since attaching."""
        return self.record.read().life.share()

    @property
    def mean_norm(self) -> float | None:
        """The mean norm of its gradients before they were clipped, over the same window.

        In the unit of the unscaled loss, without norms that are not finite; None where the
        regularizer takes no norm. Reading it waits for the device.
        """
        return self.record.read().shown.mean_norm()

    @property
    def map_size(self) -> Varying | None:
        """Spatial size of the tensors seen, per axis; (smallest, largest) where it varies."""
        return self.record.read(elements=False).map_size

    @property
    def block_size(self) -> Varying | None:
        """The block in force on these maps, clipped where it is larger."""
        return self.block_on(self.record.read(elements=False).maps)

    def block_on(self, maps: Sizes | None) -> Varying | None:
        """The block in force on the smallest and the largest of these maps."""
        if maps is None:
            return None
        low, high = (self.regularizer.block_in_force(size) for size in maps)
        return None if low is None or high is None else varying((low, high))

    def enter(self, training: bool, given: tuple[Any, ...] = ()) -> bool:
        """Count a forward call in this mode; whether the regularizer is to be run in it.

        `given` is what torch calls the hook with, a pre-hook with (arguments, keywords): at a rate
        of 0 a tensor of a shape and type that was seen needs no run.
        """
        if graph_task() != NO_TASK:  # recomputing, whatever was switched since the forward
            return bool(self._acted[training].again())
        record, control = self.record, self.control
        if not (training or self._beyond_training or control.was_always):
            next(record.evaluated)
            if self._waiting and not control.stepped:
                self._watch_time(training)
            return False
        counter = record.trained if training else record.evaluated
        acts = still = training and self._still and control.installed and control.enabled
        if not still:
            acts = control.installed and control.enabled and (training or self.acts(training))
            past = self._acted[training]
            if past.settled is not acts:
                past.note(acts)
            if training:
                if not acts:
                    control.idled = True  # never written back: another thread may have set it
                settled = past.settled is True and self._drawn_with.settled is self.values
                self._still = still = self._idle and settled
        if still:
            try:  # where torch.jit traces, sizes are tensors, and equal to none that was seen
                x = given[0][0] if self._at_input else given[-1]
                seen = record.idle[x.shape]
                if seen.dtype is not x.dtype:
                    seen = record.idle[x.shape, x.dtype]
            except (AttributeError, IndexError, KeyError, TypeError):
                pass  # no tensor, a new kind, or a symbolic size (make_fx), which has no hash
            else:
                self.forms.last, counter, acts = seen.form, seen.calls, False
        next(counter)
        if self._waiting and not control.stepped:
            self._watch_time(training)
        return acts

    def remember_idle(self, x: Tensor, form: Form, total: int) -> None:
        """A call has counted so many elements, and done nothing: at a rate of 0, as all will."""
        if self._idle and form.grid is None and are_numbers(x.shape):
            self.record.remember_idle(x, form, total)

    def acts(self, training: bool) -> bool:
        """Whether the regularizer is to be run in this mode of its layer."""
        control = self.control
        if not (control.installed and control.enabled):
            return False
        if self.is_on(training):
            return True
        tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # torch's
        return self.regularizer.follows_host and not (tracing or torch.compiler.is_exporting())

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers for activations."""
        return self.regularizer.random and self.regularizer.acts_on == "activation"

    def is_on(self, training: bool) -> bool:
        """Whether the regularizer is active in this mode of its layer."""
        if training or self.regularizer.active == "always":
            return True
        return self.control.always and self.draws

    def form_of(self, x: Tensor, told: Any = ()) -> Form:
        """How the axes of a tensor are read; `told` is what the layer took and gave.

        Raises:
            SiteError: where that can't be known.
        """
        try:
            return self.forms.of(x, told)
        except ValueError as error:
            raise self.error(error) from None

    def values_of_the_forward(self, again: bool) -> Mapping[str, float]:
        """The values now; in a forward that runs again, those of the one that it repeats."""
        past, now = self._drawn_with, self.values
        if again:
            self._watch_recomputation()  # first: it may be stopped early, inside the call
            before = past.again()
            if before is not None:
                return before
        if past.settled is not now:
            past.note(now)
        return now

    def traced_values(self, device: torch.device) -> dict[str, Tensor]:
        """The values on this device, as 0-dim tensors, for compiled code; the meter follows, at the
        price of one compilation.
        """
        self.record.meter.to(device)
        row = self._traced.to(device, non_blocking=True)
        return {name: row[at] for at, name in enumerate(self.values)}

    def error(self, cause: object) -> SiteError:
        """An error that names the site."""
        where = f" at its {self.at}" if self.at == "input" else ""
        return SiteError(f"{self.key} on {self.module_type} '{self.name or '.'}'{where}: {cause}")

    def _watch_recomputation(self) -> None:
        """Warn, once, where a checkpoint draws another mask than the forward did."""
        if self._recomputed or self.rate == 0.0 or not self.draws:
            return
        self._recomputed = True
        if loses_random_state():
            warn(
                f"{self.key}: the gradients are wrong: its layer is checkpointed with "
                "preserve_rng_state=False, so the recomputation draws another mask than the "
                "forward did; leave preserve_rng_state at True"
            )

    def _watch_time(self, training: bool) -> None:
        """Warn, once, when training goes on after evaluations, and nobody has called ``step``."""
        if training and self._mode is False:
            self._resumed += 1
        if training or self._mode is not None:
            self._mode = training
        if plainly_run() and "torch._dynamo" in sys.modules:  # the other mode may run compiled
            self.record.meter.see_mode(training)
        if self._resumed >= _EVALUATIONS:
            self.tell_waiting()

    def trace_mode(self, training: bool) -> None:
        """Let compiled code note a mode, where the schedule moves: it can't warn."""
        if self._notes_modes and not torch.compiler.is_exporting():
            self.record.meter.see_mode(training)

    def resumed(self) -> int:
        """After how many evaluations training went on without a ``step``; 0 where that may be."""
        if self.control.stepped or not self._waiting:
            return 0
        times = max(self._resumed, self.record.read(elements=False).resumed)
        return times if times >= _EVALUATIONS else 0

    def waiting(self) -> str:
        """What is told of a schedule that nobody moves."""
        evaluations = self.resumed()
        return (
            f"rate still {self.rate} after {self.calls} calls of the layer and {evaluations} "
            "evaluations, since nobody has called step: call attached.step(epoch) at the start of "
            "each epoch, or step() at its end; if the rate is to stand still, step(0) at the "
            "start silences this"
        )

    def tell_waiting(self) -> None:
        """Warn, once for the Attachment, of a schedule that nobody moves."""
        if not self.control.warned:
            self.control.warned = True
            warn(f"{self.key}: {self.waiting()}")
