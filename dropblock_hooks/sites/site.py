"""A site: one regularizer on one layer, its state and what it has counted."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..checkpointing import (
    NO_TASK,
    Past,
    graph_task,
    loses_random_state,
    plainly_run,
)
from ..functional import axes
from ..functional.axes import Form
from ..functional.gradients import Clipped
from ..functional.masks import wide_dtype
from ..layouts.autograd_graph import UNTOLD, channels_of
from ..layouts.hints import Evidence
from ..layouts.infer import form_of
from ..regularizers.base import Now, Regularizer
from ..warn import warn
from .counts import Reading, Record
from .grad_scaler import seek
from .memory import ShapeMemory
from .meter import Counted
from .shared import Control

_EVALUATIONS = 2
_PARAMETER = Form(axes.PARAMETER)
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # batched gradients


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
        form: how the axes of the tensors seen last were read.
        regularizer: what is done here.
        values: the rates now, by field.
        rate: the main rate now: the first one of the regularizer; None where it has none.
        tensors: the same as 0-dim tensors, for compiled code: another number in one does not
            compile anew.
        record: what was counted.
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
        self.form: Form | None = None if evidence else _PARAMETER
        self.order = 0
        self.record = Record(regularizer.spatial, torch.device("cpu"))
        self._waiting = self._recomputed = False
        self._mode: bool | None = None  # of the last call, while nobody has stepped a schedule
        self._resumed = 0  # how often training went on after an evaluation
        self._acted = {True: Past[bool](), False: Past[bool]()}  # by the layer's mode
        self._drawn_with = Past[Mapping[str, float]]()
        self._forms = ShapeMemory[Form]()  # where nothing but the shape decides
        self._turned: dict[int, str] = {}  # where the channels were, by rank
        self._passed = ShapeMemory[tuple[Form, int]]()  # elements to count at a rate of 0
        self._apply: Any = None  # what the regularizer binds for this site
        self.set_regularizer(regularizer)
        self._notes_modes = self._waiting  # for good: `set` compiles nothing anew

    def set_regularizer(self, regularizer: Regularizer) -> None:
        """Put another one of the same class in place, with the values of the present epoch."""
        values = regularizer.values(self.control.epoch)
        self.regularizer = copy.copy(regularizer)  # compiled code guards what sites share
        before, self._apply = self._apply, self.regularizer.bind()
        if hasattr(before, "state_dict") and hasattr(self._apply, "load_state_dict"):
            self._apply.load_state_dict(before.state_dict())
        self.move(values)
        self._waiting = regularizer.moving
        self._beyond_training = regularizer.active == "always" or regularizer.follows_host

    @property
    def bound(self) -> Any:
        """What the regularizer has bound for this site, with a state of its own perhaps."""
        return self._apply

    def move(self, values: dict[str, float], device: torch.device | None = None) -> None:
        """Put other values in place; new tensors, since a pending backward may hold the old.

        They, and the meter, go to the device where the layer is, if that is known.
        """
        meter = self.record.meter
        if device is not None:
            meter.to(device)
        self.values = values
        self.rate = next(iter(values.values()), None)
        self._idle = self.regularizer.idle_at_zero and self.rate == 0.0
        self.tensors = _as_tensors(values, meter.counts.device)

    def __repr__(self) -> str:
        return f"Site({self.key!r}, {self.regularizer!r})"

    @property
    def at(self) -> str:
        """``"output"``, ``"input"`` or, for gradients of parameters, ``"parameter"``."""
        return self.regularizer.at if self.evidence else "parameter"

    @property
    def layout(self) -> str | None:
        """The axes of the tensors seen last, ``"NHWC"`` say; None before the first call."""
        return None if self.form is None else self.form.layout

    @property
    def calls(self) -> int:
        """Forward calls of the layer since it was attached; for a parameter, of its owner.

        Compiled code counts those in which the site is on.
        """
        return self.record.calls().calls

    @property
    def active_calls(self) -> int:
        """Calls in which it was on; of a gradient regularizer, the gradients that it has seen."""
        return self.record.calls().active

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
    def map_size(self) -> tuple[int | tuple[int, int], ...] | None:
        """Spatial size of the tensors seen, per axis; (smallest, largest) where it varies."""
        maps = self.record.sizes()
        return None if maps is None else _merge(*maps)

    @property
    def block_size(self) -> tuple[int | tuple[int, int], ...] | None:
        """The block in force on these maps, clipped where it is larger."""
        maps = self.record.sizes()
        if maps is None:
            return None
        low, high = (self.regularizer.block_in_force(size) for size in maps)
        return None if low is None or high is None else _merge(low, high)

    def enter(self, training: bool) -> bool:
        """Count a forward call in this mode; whether the regularizer is to be run in it."""
        if graph_task() != NO_TASK:  # recomputing, whatever was switched since the forward
            return bool(self._acted[training].again())
        record, control = self.record, self.control
        next(record.trained if training else record.evaluated)
        if self._waiting and not control.stepped:
            self._watch_time(training)
        if not (training or self._beyond_training):
            return False
        acts = control.installed and control.enabled and (training or self.acts(training))
        past = self._acted[training]
        if past.settled is not acts:
            past.note(acts)
        if training and not acts:
            control.idled = True
        return acts

    def acts(self, training: bool) -> bool:
        """Whether the regularizer is to be run in this mode of its layer."""
        control = self.control
        if not (control.installed and control.enabled):
            return False
        return self.is_on(training) or (self.regularizer.follows_host and not _exporting())

    def is_on(self, training: bool) -> bool:
        """Whether the regularizer is active in this mode of its layer."""
        return training or self.regularizer.active == "always"

    @property
    def reads_sizes(self) -> bool:
        """Whether sizes among the layer's keywords may be needed: where tokens form a map."""
        spatial = self.regularizer.spatial
        may_be_tokens = self.evidence is not None and self.evidence.last is not None
        return spatial is not None and spatial > 1 and may_be_tokens

    @property
    def reads_grids(self) -> bool:
        """Whether the grid of its tokens may have to be that of what the model has met."""
        options = self.regularizer
        return self.reads_sizes and options.grid is None and options.layout not in ("NCHW", "NHWC")

    def form_of(self, x: Tensor, told: Any = ()) -> Form:
        """How the axes of a tensor are read; `told` is what the layer took and gave.

        Raises:
            SiteError: where that can't be known.
        """
        if self.evidence is None:
            return _PARAMETER
        shape = x.shape
        form = self._forms.get(shape)
        if form is None:
            form = self._read(self.evidence, shape, told, self._seen(x))
            if form.grid is None:  # else what the layer was told in this call has its say
                self._forms.put(shape, form)
        self.form = form
        return form

    def traced_form_of(self, x: Tensor, told: Any = ()) -> Form:
        """The same in compiled code: no side effects, and no hash of a traced size."""
        if self.evidence is None:
            return _PARAMETER
        return self._read(self.evidence, x.shape, told, self._turned.get(x.ndim, ""))

    def _seen(self, x: Tensor) -> str:
        """What the graph says of the channels, or has said of a tensor of this rank.

        Of tokens it is asked until it has told, since their forms are not remembered.
        """
        if not self.evidence or self.evidence.own or self.regularizer.layout != "auto":
            return ""
        known = self._turned.get(x.ndim, "")
        if known and x.ndim == 3:
            return known
        seen = channels_of(x)
        if seen in ("", UNTOLD):
            return known or seen
        self._turned[x.ndim] = seen
        return seen

    def _read(self, evidence: Evidence, shape: torch.Size, told: Any, seen: str) -> Form:
        try:
            return form_of(self.regularizer, evidence, shape, told, seen, self.control.sizes)
        except ValueError as error:
            raise self.error(error) from None

    def regularize(self, x: Tensor, layer_input: Any, training: bool, told: Any = ()) -> Tensor:
        """The activation, regularized and counted."""
        on = training or self.is_on(training)
        again = on and graph_task() != NO_TASK
        values: Mapping[str, float] = self.values
        if again:
            self._watch_recomputation()  # first: it may be stopped early, inside the call
        if again or self._drawn_with.settled is not values:
            values = self.values_of_the_forward(again)
        if not again and self._idle and self._pass_by(x):
            return x
        form = self.form_of(x, told)
        now = Now(input=layer_input, layout=form.layout, training=on, grad_scale=1.0, **values)
        y, affected, total = self.run(x, form, now)
        if on and not again:
            self.record.add_active(_known(affected, total), total, self.rate or 0.0)
            if self._idle and y is x and form.grid is None:
                self._passed.put(x.shape, (form, 0 if affected is None else total))
        return y

    def values_of_the_forward(self, again: bool) -> Mapping[str, float]:
        """The values now; in a forward that runs again, those of the one that it repeats."""
        past, now = self._drawn_with, self.values
        before = past.again() if again else None
        if before is not None:
            return before
        if past.settled is not now:
            past.note(now)
        return now

    def _pass_by(self, x: Tensor) -> bool:
        """At a rate of 0, count what a whole call with this shape has counted, if there was one."""
        seen = self._passed.get(x.shape)
        if seen is None:
            return False
        self.form, total = seen
        self.record.add_idle(total)
        return True

    def regularize_grad(self, grad: Tensor, form: Form, values: Mapping[str, float]) -> Tensor:
        """The gradient, regularized and counted."""
        if self.regularizer.reads_grad_scale and not self.control.scaler_sought:
            seek(self.control, self.key)
        scale = self.control.grad_scale(grad.device)
        now = Now(input=None, layout=form.layout, training=True, grad_scale=scale, **values)
        y, affected, total = self.run(grad, form, now)
        self.record.add_active(_known(affected, total), total, 0.0)
        return y

    def run(self, x: Tensor, form: Form, now: Now) -> tuple[Tensor, Counted, int]:
        """The tensor regularized, how much of it was affected, and out of how many elements."""
        compiling = is_compiling()
        traced = compiling and self.regularizer.traceable
        apply = self.regularizer.apply if traced else self._apply
        try:
            if self.regularizer.spatial is None and not self.regularizer.channelwise:
                return *_applied(apply, x, now), x.numel()
            inner = axes.as_map(x, form)
            if self.regularizer.spatial is not None:
                metered = compiling and not torch.compiler.is_exporting()
                seen = self.record.meter if metered else self.record
                seen.see_map(inner.shape[2:])
            y, affected = _applied(apply, inner, now)
            return (x if y is inner else axes.put_back(y, x, form)), affected, inner.numel()
        except (TypeError, ValueError) as error:
            raise self.error(error) from error

    def error(self, cause: object) -> SiteError:
        """An error that names the site."""
        where = f" at its {self.at}" if self.at == "input" else ""
        return SiteError(f"{self.key} on {self.module_type} '{self.name or '.'}'{where}: {cause}")

    def _watch_recomputation(self) -> None:
        """Warn, once, where a checkpoint draws another mask than the forward did."""
        if self._recomputed or self.rate == 0.0 or not self.regularizer.random:
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
        times = max(self._resumed, self.record.resumed())
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

    def still(self) -> Site:
        """The site as it is now, read once: what it has counted does not change any more."""
        return self.showing(self.record.read())

    def showing(self, reading: Reading) -> Site:
        """The site with these counts in place of its own."""
        shown = copy.copy(self)
        shown.record = cast(Record, reading)
        return shown


def _applied(apply: Any, x: Tensor, now: Now) -> tuple[Tensor, Counted]:
    """What ``apply`` returns, if it is what it must be."""
    result = apply(x, now)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise TypeError(f"apply must return (tensor, count or None), got {_shown(result)}")
    y, changed = result
    if y.shape != x.shape:
        raise ValueError(f"must keep the shape {tuple(x.shape)}, got {tuple(y.shape)}")
    if now.norms is not None and isinstance(changed, Tensor):
        return y, Clipped(changed, *now.norms)
    return y, changed


def _exporting() -> bool:
    """Whether the graph is for deployment, where a peer's module in evaluation has no place."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    return tracing or torch.compiler.is_exporting()


def _as_tensors(values: Mapping[str, float], device: torch.device) -> dict[str, Tensor]:
    dtype = wide_dtype(device)
    with torch.inference_mode(False):  # a validation's mode must not be that of the next training
        return {name: torch.full((), v, dtype=dtype, device=device) for name, v in values.items()}


def _known(affected: Counted, total: int) -> Counted:
    """The count, if it is, or holds, one number, out of a number of elements; else None.

    Not so inside a function transform or batched gradients, which it must not outlive, and where
    there is no data: on the meta device, in fake tensors, and of symbolic sizes, as in make_fx.
    """
    count = affected.changed if isinstance(affected, Clipped) else affected
    if type(total) is not int:
        return None
    if not isinstance(count, Tensor):
        return affected
    if type(count) is not Tensor:
        fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
        if isinstance(count, fake):
            return None
    return None if count.is_meta or _is_transformed(count) or _is_batched(count) else affected


def _shown(result: object) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(item).__name__ for item in result)})"
    return type(result).__name__


def _merge(low: tuple[int, ...], high: tuple[int, ...]) -> tuple[int | tuple[int, int], ...]:
    return tuple(a if a == b else (a, b) for a, b in zip(low, high, strict=True))
