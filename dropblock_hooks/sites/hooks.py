"""The hooks that a site puts on its target, and how they are put on, found and taken off.

`place.install` puts them on the layers. Then torch calls a `SiteHook` in each forward of its layer.

Hooks are objects of module-level classes. They hold no module, no Attachment and no tensor of a
graph, so a model with hooks can be copied and pickled.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, compiler, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from .._torch import (
    COMPILING,
    NO_TASK,
    constant_when_traced,
    forward_hooks,
    forward_pre_hooks,
    graph_task,
    is_tracing,
    remove_forward_hook,
    set_eval_frame,
    shares_memory,
    transforming,
)
from ..compiling import TOO_OLD, is_exporting, refuse_version
from ..functional.operators import drop_and_count
from ..observers.base import Awaited, Observer, sees_tensors
from ..quoting import with_article
from ..regularizers.base import Regularizer
from ..selectors.index import Index, Target
from ..selectors.wrappers import find_module
from . import compiled, indexing, operator
from .counter import has_data
from .observed import observe
from .run import Run
from .site import LiveSite, act, is_due, may_get_grad, see, see_grad

_QUANTIZED = (
    "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic.quantized",
    "torch.ao.nn.sparse.quantized",
)
"""The packages of layers for inference only. ``torch.ao.quantization.convert`` makes such layers in
training mode, and moves hooks to them.
"""

Precedence = IntEnum("Precedence", "BEFORE ACTIVATIONS AFTER GRADIENTS LAST")
"""The order of the hooks of a layer. A backward runs them in reverse order."""


class Call(NamedTuple):
    """The arguments and the output of one call of a layer, as torch passes them to a hook.

    Attributes:
        args: the positional arguments of the layer.
        kwargs: the keyword arguments; None if the hook was registered without them.
        output: the output of the layer; None before the layer runs.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None = None
    output: Any = None


class SiteHook:
    """Regularizes a tensor or its gradient: a forward hook, or a forward pre-hook at an input."""

    takes: ClassVar[type[Regularizer]] = Regularizer  # the regularizers that this hook is for
    by_call: ClassVar[bool] = True  # False for a parameter, whose layer may never be called
    with_kwargs = False  # whether the hook gets keyword arguments at an output
    holds_rate = False  # whether the module itself holds the present rate
    precedence = Precedence.ACTIVATIONS

    def __init__(self, site: LiveSite, local: str = "") -> None:
        self.site = site
        self.run = site.run
        self.local = local  # the name of the parameter or attribute in its module; "" for a layer

        regularizer = site.regularizer
        self.at_input = regularizer.at == "input"
        self.needs_calls = regularizer.needs_calls
        self.needs_input = regularizer.needs_input and not self.at_input
        self.with_kwargs = self.with_kwargs or self.needs_input
        # the type of the layer, if it can be trained; a test of it is faster than `is_quantized`
        self.layer_type: type[nn.Module] | None = None
        self.first = ""  # the name of the first argument of the layer
        # the input of this call before the layer runs: in eager code its id and its version, in
        # compiled code the tensor and a copy
        self.noted: tuple[int, int] | None = None
        self.copied: tuple[Tensor, Tensor] | None = None
        # True if the hook needs only the output, as a whole
        self.takes_output = not (
            self.at_input or regularizer.index is not None or regularizer.needs_input
        )
        # whether `__call__` may regularize it without `_act`; some subclasses set it to False
        self.direct = self.takes_output
        # the options with which compiled code drops blocks of the output in few steps, or ""
        self.block_options = site.block_options if self.direct and site.reader.sure else ""
        if self.precedence == Precedence.ACTIVATIONS:  # the subclass has no precedence of its own
            self.precedence = _precedence_of(regularizer)

    @classmethod
    def fitted(cls, target: Target, regularizer: Regularizer, index: Index) -> Regularizer:
        """Return the regularizer for a target, with the facts about this target."""
        return regularizer

    @classmethod
    def refusals(cls, target: Target, regularizer: Regularizer) -> Iterator[str | None]:
        """Yield the reasons why a regularizer can't work on a target. The first one is reported."""
        yield regularizer.refusal(target.module, None)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Run in every forward of the layer, also in evaluation. So this function is short.

        `rest` has the keyword arguments, if the hook was registered with them, and then the output.
        """
        site = self.site
        # the function is_compiling() would take longer
        if is_dynamo_compiling() or getattr(compiler, COMPILING, False):
            return self._compile(module, args, rest)
        training = module.training
        if training and type(module) is not self.layer_type:
            training = not is_quantized(module)
        if not site.enter(training):
            return None

        direct = self.direct
        # at rate 0 the call is only counted, unless torch.jit.trace records it, which `act` refuses
        if direct and site.idle and type(rest[-1]) is Tensor and not is_tracing():
            site.count_idle(rest[-1].numel(), training)
            return None

        callback = set_eval_frame(None)  # after a graph break, dynamo would compile what we call
        try:
            # `_act` also takes other outputs, or raises the error about them
            if direct and indexing.is_dense(rest[-1]):
                return self._regularize(args, rest[-1], training)
            return self._act(module, args, rest)
        finally:
            set_eval_frame(callback)

    def call_of(self, args: tuple[Any, ...], rest: tuple[Any, ...]) -> Call:
        """Name the arguments of `__call__`."""
        # the keyword arguments and, at an output, the output
        full_length = 1 if self.at_input else 2
        # quantization moves hooks, and registers them without keyword arguments
        kwargs = rest[0] if len(rest) == full_length else None
        return Call(args, kwargs, None if self.at_input else rest[-1])

    def install(self, module: nn.Module) -> None:
        """Put the hook on the module, behind the hooks that act before it."""
        self.layer_type = None if is_quantized(module) else type(module)
        hooks = forward_pre_hooks(module) if self.at_input else forward_hooks(module)
        later = [key for key, hook in hooks.items() if self._acts_before(ours(hook))]

        # torch calls the method faster than the object
        if self.at_input:
            module.register_forward_pre_hook(self.__call__, with_kwargs=True)
        else:
            module.register_forward_hook(self.__call__, with_kwargs=self.with_kwargs)
        for key in later:
            hooks[key] = hooks.pop(key)

        if self.needs_input:
            self.first = _first_argument(module)
            module.register_forward_pre_hook(self.note_input, with_kwargs=True)
        _move_back_pre_hooks(module)

    def _acts_before(self, other: "SiteHook | None") -> bool:
        """Return whether this hook must come before a hook that the layer has already.

        Activations are regularized in the order of the spec. A backward runs hooks in reverse
        order, so a hook of a gradient is put before the earlier hooks of gradients.
        """
        if other is None:
            return False
        if self.precedence == Precedence.GRADIENTS:
            return other.precedence >= self.precedence
        return other.precedence > self.precedence

    def restore(self, module: nn.Module) -> None:
        """Undo what `install` has changed in the module, besides its forward hooks."""

    def find(self, model: nn.Module) -> nn.Module | None:
        """Return the module that the hook is on.

        Other code may have moved the hook to another module. If no module has the hook, the module
        that now has the name of the layer is returned, or None.
        """
        named = find_module(model, self.site.owner)
        if named is not None and not self.lost(named):
            return named
        for module in model.modules():
            if not self.lost(module):
                return module
        return named

    def lost(self, module: nn.Module) -> bool:
        """Return whether the module does not have this hook."""
        return self not in hooks_on(module)

    def refresh(self, module: nn.Module) -> None:
        """Write the present rate to the module that holds it, or hook a new parameter.

        It runs after each change of the rates or the switches.
        """

    def read_layer(self, module: nn.Module, together: bool = False) -> None:
        """Read facts about the layer itself, for a report or for the next window.

        An observer may read its parameters or statistics here.

        Args:
            module: the module that the hook is on.
            together: whether all processes of a distributed training call this now.
        """
        self.site.read_layer(module, self.local or None, together)

    def pick(self, call: Call) -> tuple[Any, indexing.Key, Tensor]:
        """Return the value that holds the tensor, the index in it, and the tensor.

        Raises:
            SiteError: if there is no dense floating-point tensor.
        """
        index = self.site.regularizer.index
        value = call.output
        what = "the output"
        if self.at_input:
            what = "what the layer is given"
            by_keyword = isinstance(index, str) and call.kwargs is not None
            value = call.kwargs if by_keyword else call.args
            index = 0 if index is None else index
        try:
            return value, index, indexing.get(value, index)
        except ValueError as error:
            if self.at_input:
                self._check_arguments(self.site.regularizer.index, call.args, call.kwargs or {})
            raise self.site.error(f"{what} {error}") from None

    def _check_arguments(self, index: indexing.Key, args: Sequence[Any], kwargs: Any) -> None:
        """Raise SiteError if `index` is a place for a keyword argument, or the other way round."""
        if isinstance(index, str) and index not in kwargs and args:
            raise self.site.error(
                f"the layer was called without the keyword {index!r}: say the place of the "
                "argument, as in index=0"
            )
        if not isinstance(index, str) and not args and kwargs:
            keywords = ", ".join(map(repr, kwargs))
            raise self.site.error(
                f"the layer was called by keyword only: say which of them, {keywords}, as in "
                f"index={next(iter(kwargs))!r}"
            )

    def note_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        """Note the input before the layer runs, because the layer may change it in place.

        Compiled code has no version counter, so the input is cloned there. The compiler removes the
        clone of an input that does not change.
        """
        self.noted = None
        self.copied = None
        x = self._input_of(args, kwargs)
        if not isinstance(x, Tensor):
            return
        if is_compiling():
            # not `acts`, because compiled code itself reads whether the attachment is switched on
            if module.training or self.site.is_on(False):
                self.copied = x, x.clone()
        elif self.site.acts(module.training) and not x.is_inference():
            self.noted = id(x), x._version

    def _input_of(self, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the first argument of the layer; None if the call has no such argument."""
        return args[0] if args else (kwargs or {}).get(self.first)

    def _unchanged_input(self, module: nn.Module, call: Call, output: Tensor) -> Any:
        """Return the input from before the layer ran; SiteError if the layer has changed it."""
        site = self.site
        layer_input = self._input_of(call.args, call.kwargs)
        noted = self.noted
        copied = self.copied
        self.noted = None
        self.copied = None
        if layer_input is None:
            raise site.error(
                f"{site.regularizer.label} needs the input of the layer, and the layer was called "
                "without its first argument: put it on a layer that takes the input as its first "
                "argument"
            )
        if not isinstance(layer_input, Tensor):
            return layer_input

        if copied is not None and copied[0] is layer_input:
            # also in eager code, because a graph break may come between the layer and this hook
            return copied[1]
        if is_compiling():
            return layer_input
        if noted is not None and noted[0] == id(layer_input):
            changed = layer_input._version != noted[1]
        else:  # nothing was noted, as for tensors of inference_mode, which have no version counter
            changed = _gives_back(module, layer_input, output)
        if changed:
            raise site.error(
                "the layer has changed its input in place, or gives it back, and "
                f"{site.regularizer.label} needs the unchanged input: work out of place there "
                "(x = x + y for x += y, nn.ReLU() for nn.ReLU(inplace=True))"
            )
        return layer_input

    def _regularize(self, args: tuple[Any, ...], output: Tensor, training: bool) -> Tensor | None:
        """Regularize an output that is one tensor; return None if nothing changes."""
        y = act(self.site, output, args[0] if args else None, training)
        return None if y is output else y

    def _act(self, module: nn.Module, args: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
        """Regularize the tensor of a call; return the value for torch, or None if it stays."""
        call = self.call_of(args, rest)
        value, index, x = self.pick(call)
        if self.at_input:
            layer_input = x
        elif self.needs_input:
            layer_input = self._unchanged_input(module, call, x)
        else:
            layer_input = self._input_of(call.args, call.kwargs)

        regularize = self._in_compiled_code() if is_compiling() else act
        y = regularize(self.site, x, layer_input, module.training)
        if y is x:
            return None

        changed = y if index is None else indexing.replaced_at(value, index, y)
        if not self.at_input or call.kwargs is None:
            return changed
        if isinstance(index, str):
            return call.args, changed
        return changed, call.kwargs

    def _in_compiled_code(self) -> Callable[..., Tensor]:
        """Return the function that takes the place of `act` in compiled and exported code."""
        is_traced = self.site.traced and _traces_plainly()
        return compiled.regularize if is_traced else operator.regularize

    def _compile(self, module: nn.Module, args: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
        """Run while torch.compile or torch.export traces.

        A site that does not act in this mode of its layer adds no operation.

        Few functions are called here, because dynamo takes long for each of them.
        """
        site = self.site
        if self.block_options and self._takes_blocks(module, rest[-1]):
            return drop_and_count(
                rest[-1], site.cells, site.counts, training=True, options=self.block_options
            )
        if self.direct and site.traced and _traces_plainly():
            return self._compile_output(module, args, rest)
        return self._compile_any(module, args, rest)

    def _compile_output(
        self, module: nn.Module, args: tuple[Any, ...], rest: tuple[Any, ...]
    ) -> Any:
        """Run while torch.compile traces, if the hook needs only the output, as a whole."""
        site = self.site
        training = module.training and not type(module).__module__.startswith(_QUANTIZED)
        if not (training or site.is_on(False)):
            return None

        x = rest[-1]
        # the test of `indexing.is_dense`, for tensors that dynamo traces
        if isinstance(x, Tensor) and x.layout is torch.strided and x.is_floating_point():
            y = compiled.regularize(site, x, args[0] if args else None, training)
            return None if y is x else y
        return self._act(module, args, rest)

    def _takes_blocks(self, module: nn.Module, output: Any) -> bool:
        """Return whether compiled code drops blocks of this output in few steps."""
        if not (module.training and isinstance(output, Tensor)):
            return False
        return self._drops_plainly(
            type(module), output.device, output.dtype, output.layout, output.ndim
        )

    @constant_when_traced
    def _drops_plainly(
        self,
        layer_type: type[nn.Module],
        device: torch.device,
        dtype: torch.dtype,
        layout: torch.layout,
        ndim: int,
    ) -> bool:
        """Return whether the output needs no change of its axes before blocks are dropped.

        If so, the site takes its tensors on the board. Dynamo calls this as Python, because it
        would take long to trace these questions.
        """
        site = self.site
        view = site.reader.sure
        is_map = view is not None and ndim == len(view.layout)
        is_dense = layout is torch.strided and dtype.is_floating_point
        if not (is_map and is_dense and site.traced and _traces_plainly()):
            return False
        if layer_type.__module__.startswith(_QUANTIZED):
            return False
        site.use_board(device)
        return True

    def _compile_any(self, module: nn.Module, args: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
        """Run while torch.compile or torch.export traces, with any value of the layer."""
        if TOO_OLD or is_exporting():
            return self._export(module, args, rest)
        training = module.training and not type(module).__module__.startswith(_QUANTIZED)
        if not (training or self.site.is_on(False)):
            return None
        return self._act(module, args, rest)

    def _export(self, module: nn.Module, args: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
        """Run while torch.export traces, or for a version of torch that is too old to compile."""
        if TOO_OLD:
            refuse_version()
        if not self.site.acts(module.training):
            return None
        return self._act(module, args, rest)


class ObserveHook(SiteHook):
    """The hook of an observer, which sees the output of a layer and its gradient, or the input."""

    takes = Observer
    with_kwargs = True

    @classmethod
    def refusals(cls, target: Target, regularizer: Any) -> Iterator[str | None]:
        yield from super().refusals(target, regularizer)
        if sees_tensors(regularizer) and not target.kind.is_layer:
            noun = target.kind.noun
            yield f"it would measure calls of the layer, and {with_article(noun)} has none"

    def __init__(self, site: LiveSite, local: str = "") -> None:
        super().__init__(site, local)
        self.direct = False
        observer: Observer = site.regularizer  # type: ignore[assignment]  # by `takes`
        self.observer = observer
        self.always = observer.active == "always"
        self.reads_given = observer.reads_given
        # whether `_observe_output` takes an output that is one tensor
        self.sees_output = self.takes_output and not observer.keeps_graph

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Run in every forward of the layer. Most calls are not measured, and are only counted.

        `LiveSite.take_skipped` adds these calls to the other counts, before they are read.
        """
        # the function is_compiling() would take longer
        if is_dynamo_compiling() or getattr(compiler, COMPILING, False):
            return self._compile(module, args, rest)
        watch: Any = self.site.watch
        run = self.run
        pauses = watch.turn < watch.pause.end and run.enabled and run.installed
        is_plain = module.training and type(module) is self.layer_type
        if pauses and is_plain and graph_task() == NO_TASK:  # a recomputation is not counted
            watch.turn += 1
            return None
        return super().__call__(module, args, *rest)

    def _act(self, module: nn.Module, args: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
        recomputed = graph_task() != NO_TASK
        if not self._is_due(module, recomputed):
            return None

        call = self.call_of(args, rest)
        tensors, rebuild, nesting = self._observed(call)
        if not all(map(has_data, tensors)):
            tensors = []  # such tensors have no numbers, or must not be kept
        ticket = None
        if not recomputed:
            self.site.differentiable = any(map(may_get_grad, tensors))
            ticket = see(
                self.site,
                tensors,
                self._arguments(call),
                nesting=nesting,
                training=module.training,
                differentiable=self.site.differentiable,
            )
        if not self.observer.sees_gradients:
            return None

        awaited = self._awaited_gradient(recomputed)
        watched = [self.watched(x, at, ticket, awaited) for at, x in enumerate(tensors)]
        changed = any(new is not x for new, x in zip(watched, tensors, strict=True))
        return rebuild(watched) if changed else None

    def _awaited_gradient(self, recomputed: bool) -> Awaited | None:
        """Return the gradient of a call, to note whether it comes."""
        watch: Any = self.site.watch
        if not recomputed:
            return watch.await_gradient()  # type: ignore[no-any-return]
        # the forward of a reentrant checkpoint had no graph, so its gradient seemed lost
        watch.note_recomputation()
        return None

    def _is_due(self, module: nn.Module, recomputed: bool) -> bool:
        """Count an eager call, and return whether it is measured.

        A recomputation is measured if its forward was measured.
        """
        if recomputed:
            self.site.take_skipped()  # sets `was_due`
            watch: Any = self.site.watch
            return bool(watch.was_due)
        return is_due(self.site, module.training)

    def _compile(self, module: nn.Module, args: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
        training = module.training
        if not (training or self.always):
            return None

        output = rest[-1]
        is_simple = self.sees_output and self.site.traced and _traces_plainly()
        if is_simple and isinstance(output, Tensor):
            if not output.is_floating_point() or output.layout is not torch.strided:
                return None
            kwargs = rest[0] if len(rest) == 2 else None
            return self._observe_output(module, args, kwargs, output, training)
        if is_exporting():
            return None
        return self._observe_any(self.call_of(args, rest), training)

    def _observe_output(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        output: Tensor,
        training: bool,
    ) -> Tensor | None:
        """Observe an output that is one tensor. Dynamo traces this, so it calls few functions."""
        site = self.site
        is_unchanged = len(args) == 1 and args[0] is output
        if is_unchanged and site.guesses_channels and type(module) is nn.Identity:
            return None  # a `Watchdog` on the layer before it sees the same tensor

        arguments: list[Tensor] = []
        if self.reads_given:
            values = (*args, *kwargs.values()) if kwargs else args
            for x in values:
                if isinstance(x, Tensor) and x.is_floating_point():
                    arguments.append(x)

        watched = observe(site, [output], arguments, training)
        return watched[0] if watched else None

    def _observe_any(self, call: Call, training: bool) -> Any:
        """Observe a call in compiled code in the general case."""
        observer = self.observer
        if TOO_OLD:
            refuse_version()
        if observer.keeps_graph:
            raise self.site.error(
                "compiled code can't keep the autograd graph of a value: use detach=True, or call "
                "the model without torch.compile"
            )

        tensors, rebuild, nesting = self._observed(call)
        arguments = self._arguments(call)
        if self.site.traced and _traces_plainly():
            if not tensors:
                return None
            watched = observe(self.site, tensors, arguments, training)
            return rebuild(watched) if watched else None
        watched = operator.observe_and_watch(
            self.site.handle,
            tensors,
            arguments,
            operator.written(nesting()),
            training,
            observer.sees_gradients,
        )
        return rebuild(watched) if watched else None

    def _observed(self, call: Call) -> indexing.Flattened:
        """Return the observed tensors of a call, and how to rebuild the value with others."""
        observer = self.observer
        whole = (call.args, call.kwargs) if observer.at == "input" else call.output
        if not (observer.sees_values or observer.sees_gradients):
            whole = ()  # such an observer reads only parameters
        elif isinstance(whole, Tensor) or not observer.whole or observer.index is not None:
            value, index, x = self.pick(call)
            return indexing.Flattened(
                [x], lambda new: indexing.replaced_at(value, index, new[0]), lambda: 0
            )
        return indexing.flatten(whole)

    def _arguments(self, call: Call) -> list[Tensor]:
        """Return the tensors among the arguments of the layer, if the observer reads them."""
        if not self.observer.reads_given:
            return []
        arguments = [*call.args, *(call.kwargs or {}).values()]
        return [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]

    def watched(
        self, x: Tensor, at: int, ticket: int | None, awaited: Awaited | None = None
    ) -> Tensor:
        """Return the tensor, or a copy, whose gradient the observer will see."""
        see_gradient = partial(see_grad, self.site, at=at, ticket=ticket, awaited=awaited)
        return operator.watch_gradient(x, see_gradient)


@constant_when_traced
def _traces_plainly() -> bool:
    """Return whether torch.compile traces, without torch.export or a transform of torch.func.

    Dynamo calls this as Python, and its guards hold what this reads.
    """
    return not (TOO_OLD or is_exporting() or transforming())


def _move_back_pre_hooks(module: nn.Module) -> None:
    """Move hooks that note the input behind hooks that change it, and freezing hooks to the end.

    A hook that freezes the layer changes its mode, which the other hooks read.
    """
    hooks = forward_pre_hooks(module)
    for name in ("note_input", "freeze"):
        for key, hook in list(hooks.items()):
            if getattr(hook, "__name__", "") == name and ours(hook) is not None:
                hooks[key] = hooks.pop(key)


def _precedence_of(regularizer: Regularizer) -> Precedence:
    """Return the place of the hook of a regularizer among the hooks of its layer."""
    gradient = regularizer.acts_on == "gradient"
    if not isinstance(regularizer, Observer):
        return Precedence.GRADIENTS if gradient else Precedence.ACTIVATIONS
    if regularizer.when == "after":
        return Precedence.AFTER
    return Precedence.BEFORE if regularizer.sees_values and not gradient else Precedence.LAST


def is_quantized(module: nn.Module) -> bool:
    """Return whether a layer is for inference only, although it may be in training mode."""
    return type(module).__module__.startswith(_QUANTIZED)


def _first_argument(module: nn.Module) -> str:
    """Return the name of the first argument of a forward; "" if no argument has a keyword."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ""
    with_names = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [parameter.name for parameter in parameters if parameter.kind in with_names]
    return names[0] if names else ""


def _gives_back(module: nn.Module, layer_input: Tensor, output: Tensor) -> bool:
    """Return whether a layer returns the memory of its input. ``nn.Identity`` is allowed to."""
    if isinstance(module, nn.Identity):
        return False
    return output is layer_input or shares_memory(output, layer_input)


def ours(hook: Any) -> SiteHook | None:
    """Return the `SiteHook` behind a registered method; None for any other hook."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, SiteHook) else None


def hooks_on(module: nn.Module) -> list[SiteHook]:
    """Return the `SiteHook` objects on a module."""
    before = forward_pre_hooks(module).values()
    after = forward_hooks(module).values()
    hooks = dict.fromkeys(map(ours, (*before, *after)))
    return [hook for hook in hooks if hook is not None]


def remove_hooks(run: Run, module: nn.Module) -> None:
    """Remove the forward hooks of an attachment from a module."""
    for hooks in (forward_hooks(module), forward_pre_hooks(module)):
        for number, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", hook)
            if owner is run.grids or getattr(owner, "run", None) is run:
                remove_forward_hook(module, number)
