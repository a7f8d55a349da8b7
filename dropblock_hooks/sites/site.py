"""A site: one regularizer on one layer, with its state, its counts and its calls.

In eager mode, a `SiteHook` calls `act` in each forward in which the site acts. An `ObserveHook`
calls `see` in each one that is measured.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .. import messages
from .._torch import (
    NO_TASK,
    constant_when_traced,
    graph_task,
    has_scale_tensor,
    is_tracing,
    is_transformed,
    scale_tensor,
    skip_functions,
    transforming,
    transforms_now,
)
from ..axes.facts import Facts
from ..axes.reader import Reader
from ..axes.view import WITH_CHANNELS_FIRST, View
from ..compiling import is_exporting, new_handle
from ..functional.cells import MOST_RATES
from ..observers.base import Awaited, Seen, Watch
from ..observers.watchdog import Watchdog
from ..quoting import add_note
from ..regularizers.base import Now, Regularizer
from ..schedules import is_moving
from ..selectors.index import Target
from ..selectors.wrappers import holds_shards
from ..warn import warn
from .board import Board, Observed
from .counter import Counter, has_data
from .run import Run
from .scaler import is_enabled, is_under_float16_autocast
from .seeds import seeded

NOT_DENSE = "the gradient is not dense: build the layer without sparse=True"
Rates: TypeAlias = Mapping[str, Any]


class SiteError(ValueError):
    """A regularizer met a tensor that it can't work on; the message names the site.

    Example:
        >>> model = nn.Sequential(nn.ReLU())
        >>> attached = attach(model, {"0": DropBlock2d(0.1)})
        >>> model(torch.ones(8, 10))
        Traceback (most recent call last):
        dropblock_hooks.sites.site.SiteError: 0/DropBlock2d on ReLU '0': needs a 4-D tensor ...
    """


class LiveSite:
    """One regularizer on one layer, as hooks and compiled code use it. Users read a `Site`.

    Attributes:
        key: the name of the site in the Attachment, such as ``layer4.0/DropBlock2d``.
        name: the name of the layer or parameter in the model without wrappers.
        aliases: other names of a shared module.
        module_type: the class name of the layer.
        at: ``"output"`` or ``"input"`` of a layer, ``"parameter"`` or ``"attribute"``.
        regularizer: the regularizer or observer.
        rate: the present value of the first rate; None without rates.
    """

    def __init__(
        self, key: str, target: Target, item: Regularizer, run: Run, facts: Facts | None = None
    ) -> None:
        self.key = key
        self.run = run
        self.name = target.name
        self.owner = target.owner
        self.aliases = target.aliases
        self.module_type = target.type_name
        self.at: str = item.at if target.kind.is_layer else target.kind.noun
        of_parameter = target.kind.of_parameters
        self.reader = Reader(item, facts, run.grids, of_parameter=of_parameter)
        self.order = 0  # the number of the site in the attachment
        self.layer_number = target.layer_number  # in the order of the model
        self.position = (0, 0)  # the numbers of the entry and of the regularizer in the entry
        self.selector = key  # the selector of the entry

        # all counts; counts of compiled code are moved here when `counter` is read
        self.tally = Counter()
        # the length of axis 0 of the last tensor, to find layers whose axis 0 is not the batch
        self.samples: int | None = None
        self.rose = False  # whether the rate was ever above 0
        self.differentiable = True  # whether the last tensor may get a gradient
        self.anchor: Any = None  # the value of an anchored parameter at attaching
        # the address and the version of the parameter then; None if there is nothing to compare
        self.anchored_at: tuple[int, int] | None = None
        # whether the parameter got no gradient when `ParameterHook.read_layer` last ran
        self.frozen = False

        # the tensors of the site on the board, after compiled code has called the site
        self.cells: Any = None
        self.counts: Any = None
        self.gradient_counts: Any = None
        self.norm_cells: Any = None
        self.observed: Observed | None = None  # the tensors of an observer
        # what compiled code measures for an observer; see `read_layer`
        self.finds_dead = False
        self.reads_batches = False
        self.guesses_channels = False
        self.compares_input = False
        self.handle = new_handle(self)
        self.set_regularizer(item)

    def note_autocast(self, device: torch.device) -> None:
        """Note whether a bound is used under autocast to float16, in the first training forward.

        Bounds of accumulated gradients need no scale, because a GradScaler has unscaled these.
        """
        run = self.run
        if run.checked or run.scaler is not None:
            return
        if self.regularizer.reads_grad_scale and not self.accumulates:
            run.in_float16 |= is_under_float16_autocast(device)

    def set_regularizer(self, regularizer: Regularizer) -> None:
        """Set another regularizer of the same class, with the values of this epoch."""
        values = regularizer.values(self.run.epoch)
        # each site has a copy, because compiled code has guards on what several sites share
        self.regularizer = copy.copy(regularizer)
        # what is called with a tensor and `Now`; of an observer, its `Watch`
        self.bound: Any = self.regularizer.bind()
        self.watch: Watch | None = self.bound if isinstance(self.bound, Watch) else None
        self.of_gradients = regularizer.acts_on == "gradient"
        self.accumulates = regularizer.accumulates
        # whether it draws random numbers for activations
        self.draws = regularizer.random and not self.of_gradients
        self.has_map = regularizer.spatial is not None
        self.reads_axes = self.has_map or regularizer.channelwise
        self.has_share = regularizer.has_share
        self.block_options = "" if self.of_gradients else regularizer.block_options
        self.moves = any(map(is_moving, regularizer.rates.values()))
        self.always = regularizer.active == "always"
        self.move(values)
        self.note_scaler()

    def note_scaler(self) -> None:
        """Choose how compiled code runs the regularizer, which depends on the GradScaler."""
        scaler = self.run.scaler
        regularizer = self.regularizer
        reads_scale = regularizer.reads_grad_scale or regularizer.sees_gradients
        self.scaled = bool(scaler) and is_enabled(scaler) and reads_scale
        # whether it becomes a part of compiled graphs; otherwise an operator there calls Python
        self.traced = regularizer.traced and len(self.values) <= MOST_RATES
        if self.of_gradients and regularizer.block_options:
            self.traced = False  # compiled code has no function for blocks of gradients
        if self.scaled and not has_scale_tensor(scaler):
            # a graph reads the scale from a tensor, which only torch's own GradScaler has
            self.traced = False

    def move(self, values: dict[str, float]) -> None:
        """Set other values, in a new dict, because a pending backward may hold the old dict."""
        self.values = values
        self.rate = next(iter(values.values()), None)
        self.rose |= bool(self.rate)
        # a gradient has no nominal rate
        self.counted_rate = 0.0 if self.of_gradients else self.rate or 0.0
        idle_at_zero = self.regularizer.idle_at_zero and not self.of_gradients
        self.idle = self.rate == 0.0 and idle_at_zero

    def __getstate__(self) -> dict[str, Any]:
        self.run.take_counts(self)
        without = {"handle": None, "cells": None, "counts": None}
        without |= {"gradient_counts": None, "norm_cells": None, "observed": None}
        return {**self.__dict__, **without}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.handle = new_handle(self)  # a copy is another site

    def __repr__(self) -> str:
        return f"LiveSite({self.key!r}, {self.regularizer!r})"

    @property
    def counter(self) -> Counter:
        """All counts. Reading them waits for the device of a board."""
        self.run.take_counts(self)
        self.tally.settle()
        return self.tally

    @constant_when_traced
    def use_board(self, device: torch.device) -> None:
        """Take the tensors of the board on a device. torch.compile calls this while it traces."""
        self.run.compiled = True
        self.refuse_same_masks()
        skip_functions()
        if self.cells is not None and self.cells.device == device:
            return
        board = self.run.board_on(device)
        for site in self.run.sites:
            # blocks that are equal share compiled code only if no site has None in place of tensors
            if site.cells is None:
                site.use_tensors_of(board)
        self.use_tensors_of(board)
        scaler = self.run.scaler
        if self.scaled and has_scale_tensor(scaler) and scale_tensor(scaler) is None:
            scaler.scale(torch.zeros((), device=device))  # makes the scaler create its tensor

    @property
    def uses_same_masks(self) -> bool:
        """Whether the mask is drawn once, because a block of `Attachment.same_masks` is open."""
        seeds = self.run.seeds
        return seeds is not None and seeds.is_open and self.draws

    def refuse_same_masks(self) -> None:
        """Raise SiteError for compiled code in a block of `Attachment.same_masks`."""
        if self.uses_same_masks:
            raise self.error(
                "compiled code can't draw the same masks again: call the model without "
                "torch.compile in a block of same_masks()"
            )

    @constant_when_traced
    def note_no_gradient(self) -> None:
        """Note that no gradient can come. torch.compile calls this while it traces."""
        self.differentiable = False

    def shortcut_of(self, y: Tensor, given: Sequence[Tensor]) -> Tensor | None:
        """Return the input of a residual block; None if its output has another shape.

        SiteError if the layer gets no tensor.
        """
        if not given:
            raise self.error(
                "residual=True compares the output of a layer with its input, and this layer gets "
                "no floating-point tensor: choose a residual block"
            )
        if given[0].shape == y.shape:
            return given[0]
        self.note_no_shortcut()
        return None

    @constant_when_traced
    def note_no_shortcut(self) -> None:
        """Warn, once for an attachment, of a layer without a shortcut of the same shape."""
        shared = self.run.shared
        if not shared.get("no shortcut was told"):
            shared["no shortcut was told"] = True
            warn(messages.NO_SHORTCUT.format(site=self.key))

    @constant_when_traced
    def use_observed(self, device: torch.device, channels: int, has_batches: bool) -> None:
        """Take tensors for an observer. torch.compile calls this while it traces."""
        self.run.compiled = True
        skip_functions()
        now = self.observed
        if now is not None and now.fits(device, channels, has_batches):
            return
        self.run.take_counts(self)
        self.observed = Observed(self, device, channels, has_batches)
        for site in self.run.sites:
            if site.observed is None and site.traced and site.watch is not None:
                site.observed = Observed(site, device)

    def read_layer(self, module: nn.Module, parameter: str | None, together: bool) -> None:
        """Let the observer read the layer, and find out which numbers compiled code measures.

        Sharded parameters are read only if all processes call this `together`, as in a step.
        """
        watch = self.watch
        if watch is None:
            return
        observer = watch.observer
        if observer.reads_parameters and not together and holds_shards(module):
            return
        observer.read_layer(watch.open, module, parameter)
        self.finds_dead = observer.finds_dead(watch.open)
        # `ActivationStats` keeps the running statistics of a BatchNorm by this name
        self.reads_batches = observer.reads_given and "running" in watch.open
        self.guesses_channels = isinstance(observer, Watchdog)
        self.compares_input = observer.compares_input

    def use_tensors_of(self, board: Board) -> None:
        """Use the tensors of the site on a board."""
        self.cells = board.cells[self.order]
        self.counts = board.counts[self.order]
        self.gradient_counts = board.gradients[self.order]
        self.norm_cells = board.norms[self.order]

    @property
    def layout(self) -> str | None:
        """The axes of the last tensor, such as ``"NHWC"``; None before the first eager call."""
        view = self.reader.last
        return None if view is None else view.layout

    @property
    def calls(self) -> int:
        """Forward calls of the layer since attaching; see `Site.calls`."""
        self.run.take_counts(self)
        return self.tally.evaluated + self.tally.trained

    @property
    def active_calls(self) -> int:
        """Calls in which the site was on; for regularizers of gradients, the gradients it saw."""
        self.run.take_counts(self)
        return self.tally.active

    @property
    def map_size(self) -> tuple[int, ...] | None:
        """The spatial size of the last tensor; None without a map."""
        return self.counter.map_size

    @property
    def block_size(self) -> tuple[int, ...] | None:
        """The size of the blocks on the last map, clipped to the map; None without blocks."""
        size = self.counter.map_size
        return None if size is None else self.regularizer.block_in_force(size)

    def enter(self, training: bool) -> bool:
        """Count a forward call, unless a checkpoint recomputes it; return whether to act."""
        run = self.run
        if graph_task() == NO_TASK:
            if training:
                self.tally.trained += 1
                self.tally.off += not run.enabled
            else:
                self.tally.evaluated += 1
        if training:
            return run.installed and run.enabled
        # `acts` alone would do; this is faster in evaluation
        return (self.always or run.always) and self.acts(False)

    def take_skipped(self) -> None:
        """Add the calls in a pause of the observer to the tally.

        In these calls, `ObserveHook` only adds to the turn of the `Watch`.
        """
        watch = self.watch
        if watch is None:
            return
        calls = watch.take_skipped()
        self.tally.trained += calls
        if watch.observer.sees_values:
            self.tally.active += calls

    def count_idle(self, elements: int, training: bool) -> None:
        """Count a call at rate 0, which runs nothing. Calls under ``always()`` are not counted."""
        if graph_task() == NO_TASK and (training or self.always):
            self.tally.active += 1
            # without `has_share`, an earlier call tells whether ``apply`` counts elements
            if self.has_share or self.tally.total:
                self.tally.total += elements

    def acts(self, training: bool) -> bool:
        """Return whether the regularizer must run in this mode of its layer."""
        return self.run.installed and self.run.enabled and self.is_on(training)

    def is_on(self, training: bool) -> bool:
        """Return whether the site acts in this mode of its layer unless it is switched off."""
        return training or self.always or (self.run.always and self.draws)

    def view_of(self, x: Tensor) -> View:
        """Read the axes of a tensor; SiteError if they are unknown."""
        try:
            return self.reader.view(x)
        except ValueError as error:
            raise self.error(error) from None

    def view_or_none(self, x: Tensor) -> View | None:
        """Read the axes of a tensor; return None if its channels are unknown."""
        try:
            return self.reader.view(x) if x.ndim > 1 else None
        except ValueError:
            return None  # the report shows that channels are unknown

    def anchor_of(self, parameter: Tensor) -> Any:
        """Return the value of the parameter at attaching, on its present device; or None.

        Raises:
            SiteError: if a parameter of another shape has replaced it.
        """
        anchor = self.anchor
        if anchor is None:
            return None
        if anchor.shape != parameter.shape:
            before = tuple(anchor.shape)
            now = tuple(parameter.shape)
            raise self.error(
                f"the parameter had shape {before} at attach, and has shape {now} now: call "
                "attach after the layer is replaced"
            )

        if anchor.device != parameter.device:
            self.anchor = anchor.to(parameter.device)
        return self.anchor

    def error(self, cause: object) -> SiteError:
        """Make the error that names this site and the layer."""
        where = f" at its {self.at}" if self.at == "input" else ""
        return SiteError(f"{self.key} on {self.module_type} '{self.name or '.'}'{where}: {cause}")


def act(
    site: LiveSite, x: Tensor, layer_input: Any, training: bool, view: View | None = None
) -> Tensor:
    """Return the regularized activation, or a copy whose gradient will be regularized."""
    if transforming() or is_tracing():
        refuse_tracing(site, training)
    if site.regularizer.samplewise and site.reader.auto and x.ndim:
        site.samples = x.shape[0]
    if site.idle:  # the layout is not read, and no mask is drawn
        site.count_idle(x.numel(), training)
        return x
    if site.of_gradients:
        return _with_regularized_gradient(site, x)

    recomputes = graph_task() != NO_TASK
    # calls under always() in evaluation are not counted
    counts = not recomputes and (training or site.always)
    seeds = site.run.seeds
    seed = None if seeds is None else seeds.seed_of(site, x, recomputes)
    if seed is None:
        return perform(site, x, view, site.values, counts, input=layer_input)
    with seeded(seed, x.device):
        return perform(site, x, view, site.values, counts, input=layer_input)


def _with_regularized_gradient(site: LiveSite, x: Tensor) -> Tensor:
    """Return a copy with a hook that regularizes its gradient; or `x` if it gets no gradient."""
    view = site.view_of(x)
    site.differentiable = may_get_grad(x)
    if not site.differentiable:
        return x
    site.note_autocast(x.device)
    if site.regularizer.needs_activation:
        copy_of_x: Tensor = _KeepsActivation.apply(x, site, view, site.values)
        return copy_of_x
    # other code may use `x`, and an in-place operation on a view would lose the hook
    copied = x.clone()
    copied.register_hook(partial(regularize_grad, site, view, site.values))  # type: ignore[no-untyped-call]  # torch's
    return copied


class _KeepsActivation(torch.autograd.Function):
    """A copy of an activation, whose backward regularizes the gradient and reads the activation."""

    @staticmethod
    def forward(x: Tensor, site: LiveSite, view: View | None, rates: Rates) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.site, ctx.view, ctx.rates = inputs
        # saved, and no attribute of `ctx`, so that checkpointing can recompute it
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        (grad,) = grads
        new = regularize_grad(ctx.site, ctx.view, ctx.rates, grad, activation=x)
        return new, None, None, None


def perform(
    site: LiveSite,
    x: Tensor,
    view: View | None,
    rates: Rates,
    counts: bool = False,
    **attributes: Any,
) -> Tensor:
    """Run the regularizer of a site on a tensor.

    Args:
        site: the site.
        x: an activation or a gradient.
        view: how the axes are read; None reads them from the tensor.
        rates: the values by name.
        counts: whether the call is counted.
        attributes: other attributes of `Now`.

    Raises:
        SiteError: if the regularizer has raised a TypeError or a ValueError.
    """
    now = Now(**attributes, **rates)
    try:
        if view is None:
            view = site.reader.view(x)
        now.layout = view.layout
        plain = not site.reads_axes or view in WITH_CHANNELS_FIRST
        maps = x if plain else channels_first(site, x, view, now)

        result = site.bound(maps, now)
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not is_pair or not isinstance(result[0], Tensor) or result[0].shape != maps.shape:
            _refuse_result(result, maps)
    except Exception as error:
        name_site(error, site)
        raise

    y, affected = result
    if counts:
        size = maps.shape[2:] if site.has_map else None
        site.tally.add(affected, maps.numel(), site.counted_rate, size, now.norms)
    return y if plain else with_axes_of(x, y, maps, view)


def channels_first(site: LiveSite, x: Tensor, view: View, now: Now) -> Tensor:
    """Return a tensor with the channels on axis 1; also move the axes of the layer's input."""
    if site.regularizer.needs_input and getattr(now.input, "shape", None) == x.shape:
        now.input = view.to_maps(now.input)
    return view.to_maps(x)


def with_axes_of(x: Tensor, y: Tensor, maps: Tensor, view: View) -> Tensor:
    """Return the result `y` for `maps` with the axes of `x`; or `x` if nothing has changed."""
    if y is maps:
        return x
    return y if maps is x else view.from_maps(y, x)


def _refuse_result(result: Any, maps: Tensor) -> NoReturn:
    """Raise the error about an invalid result of ``apply``."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[0], Tensor):
        raise TypeError("apply must return a pair: a tensor, and a count or None")
    shape = tuple(result[0].shape)
    raise ValueError(f"must keep the shape {tuple(maps.shape)}, got {shape}")


def name_site(
    error: Exception, site: LiveSite, note: str = "the error comes from this site"
) -> None:
    """Raise a SiteError in place of a TypeError or a ValueError.

    Another error only gets a note that names the site, and the caller raises it again.
    """
    if isinstance(error, TypeError | ValueError):
        raise site.error(f"{error}{_meant_rate(error, site.regularizer)}") from error
    add_note(error, site.error(note))


def _meant_rate(error: Exception, regularizer: Regularizer) -> str:
    """Return what to write if ``apply`` has calculated with a schedule; "" for other errors."""
    for name, rate in regularizer.rates.items():
        if callable(rate) and type(rate).__name__ in str(error):
            return f": read now.{name} in apply, not self.{name}"
    return ""


def may_get_grad(x: Tensor) -> bool:
    """Return whether autograd, or a transform of torch.func, may need the gradient of a tensor."""
    # an outer torch.func.grad may want the gradient of a tensor that does not require it
    wanted = x.requires_grad or (not is_compiling() and is_transformed(x))
    return wanted and torch.is_grad_enabled()


def regularize_grad(
    site: LiveSite, view: View | None, rates: Rates, grad: Tensor | None, **attributes: Any
) -> Any:
    """Regularize and count a gradient.

    The `attributes` are those of `Now`. If they have no ``grad_scale``, the GradScaler gives it.
    """
    run = site.run
    if grad is None or not (run.installed and run.enabled):
        return grad
    if grad.layout is not torch.strided:
        raise site.error(NOT_DENSE)
    if site.watch is not None:
        if is_due(site, training=True):
            see_grad(site, grad)
        return grad

    if "grad_scale" not in attributes:
        attributes["grad_scale"] = run.loss_scale(grad.device)
    if site.anchor is not None:
        attributes["anchor"] = site.anchor_of(attributes["parameter"])
    return perform(site, grad, view, rates, True, **attributes)


def is_due(site: LiveSite, training: bool) -> bool:
    """Count a call for an observer, or a gradient of a parameter; return whether to measure it.

    The `Watch` counts all calls. Which of them the tally has as active calls depends on what the
    observer sees. One of these functions adds them:

    observer sees    calls in a pause          other calls, not due   measured calls
    values           `LiveSite.take_skipped`   `is_due`               `see`
    only gradients   none                      none                   `see_grad`
    neither          none                      none                   `see`, or `see_grad`
    """
    watch: Any = site.watch
    site.take_skipped()
    due: bool = watch.enter(training, site.run.shared)
    if not due and watch.observer.sees_values:
        site.tally.add(None, 0, 0.0)
    return due


def see(
    site: LiveSite,
    tensors: Sequence[Tensor],
    arguments: Sequence[Tensor],
    nesting: Callable[[], Any],
    training: bool,
    differentiable: bool,
) -> int | None:
    """Count one call of the layer and hand it to the observer; return the number of the call.

    The arguments are described in `Seen`.
    """
    run = site.run
    observer = site.bound.observer
    if observer.sees_values or not observer.sees_gradients:
        site.tally.add(None, 0, 0.0)
    if not tensors or not observer.sees_values:
        return None
    if observer.compares_input:
        site.shortcut_of(tensors[0], arguments)

    shown = tensors if observer.keeps_graph else [x.detach() for x in tensors]
    originals = dict(zip(map(id, shown), tensors, strict=True))

    def view(x: Tensor) -> View | None:
        # the graph of a tensor may show its axes, and a detached tensor has no graph
        return site.view_or_none(originals.get(id(x), x))

    seen = Seen(
        shown,
        run.epoch,
        run.shared,
        training=training,
        differentiable=differentiable,
        nesting=nesting,
        given=[x.detach() for x in arguments],
        view=view,
    )
    return _update(site, seen)


def see_grad(
    site: LiveSite,
    grad: Tensor | None,
    at: int = 0,
    ticket: int | None = None,
    awaited: Awaited | None = None,
) -> None:
    """Hand a gradient to an observer, and count it if the observer sees no values.

    `at` and `ticket` are described in `Seen`. `awaited` belongs to the call whose gradient it is.
    """
    run = site.run
    observer = site.bound.observer
    site.take_skipped()  # first, because the observer may note how many calls there were
    if awaited is not None:
        awaited.came = True
    if grad is None or not (has_data(grad) and run.installed and run.enabled):
        return
    if observer.sees_gradients:
        scale = run.loss_scale(grad.device)
        seen = Seen(
            [grad.detach()],
            run.epoch,
            run.shared,
            gradient=True,
            at=at,
            scale=scale,
            ticket=ticket,
        )
        _update(site, seen)
    if not observer.sees_values:
        site.tally.add(None, 0, 0.0)


def _update(site: LiveSite, seen: Seen) -> int:
    """Give the observer one call or one gradient; return the number of the call."""
    try:
        return int(site.bound.update(seen))
    except Exception as error:
        name_site(error, site)
        raise


def refuse_tracing(site: LiveSite, training: bool) -> None:
    """Raise SiteError if an active site can't work in the present trace or transform."""
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # torch's
    exported = is_exporting() and site.regularizer.acts_on == "gradient"
    transformed = transforming()
    if transformed and not is_compiling():  # torch.func.grad works in eager mode
        transformed = not transforms_now() <= {"Grad", "Functionalize"}
    if site.is_on(training) and (traced or exported or transformed):
        raise site.error(
            "active regularizers can't be used in torch.jit.trace, torch.func.vmap, "
            "torch.func.jvp or a compiled torch.func transform, and regularizers of gradients "
            "can't be used in torch.export: call model.eval() before, or use "
            "`with attached.paused():`"
        )
