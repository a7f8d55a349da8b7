"""The hook of an observer: it sees what a layer gives, or takes, and what gradient comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..checkpointing import NO_TASK, graph_task
from ..functional import axes
from ..observers.base import Observer, Seen, Watch
from . import indexing
from .act import has_data, is_exported, scale_in_graph
from .given import GivenHook, put_first
from .hooks import SiteHook, Turn, put_on, take_off
from .identity import GradIdentityTraced, may_get_gradient
from .nested import Nested
from .site import Site


class ObserveHook(SiteHook):
    """Forward hook, or forward pre-hook at an input, that watches; the values stay what they are.

    Of a layer that is watched before what acts on it, gradients are seen by a second hook, which
    stands last: it is the first that a gradient meets.

    Attributes:
        ticket: what was seen in the last call, for gradients that a second hook sees.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        observer: Observer = site.regularizer  # type: ignore[assignment]  # `make_hook` has asked
        self.observer = observer
        self.turn = Turn.BEFORE if observer.when == "before" else Turn.AFTER
        split = observer.sees_gradients and observer.when == "before"
        self.last = LastHook(self) if split and observer.sees_values else None
        if split and not observer.sees_values:
            self.turn = Turn.LAST
        self.given = GivenHook(self) if observer.sees_given else None
        self.ticket: Any = None
        self.watch.join(site.control.shared)

    @property
    def watch(self) -> Watch:
        """What its site has seen."""
        watch: Watch = self.site.bound
        return watch

    def install(self, module: nn.Module) -> None:
        for hook in (self, self.last):
            if hook is not None:
                put_on(module, hook, at_input=self.site.at == "input")
        if self.given is not None:
            module.register_forward_pre_hook(self.given.__call__, with_kwargs=True)
            put_first(module._forward_pre_hooks)

    def remove(self, module: nn.Module) -> None:
        super().remove(module)
        for hook in (self.last, self.given):
            if hook is not None:
                take_off(hook, module)

    def _compile(self, module: nn.Module, *given: Any) -> Any:
        return None if is_exported() else super()._compile(module, *given)

    def _act(self, module: nn.Module, *given: Any) -> Any:
        site, observer, compiling = self.site, self.observer, is_compiling()
        if is_exported():
            return None
        if not (observer.sees_values or observer.sees_gradients):
            if compiling:
                site.record.meter.add_call()
            return self._count()
        found = self.found(given)
        if compiling:
            site.record.meter.add_call()
        ticket = None
        if observer.sees_values and (compiling or graph_task() == NO_TASK):
            self._count()
            if found is not None and found.readable:
                ticket = self._see(module, found, given)
        if not compiling:
            self.ticket = ticket  # none of a repetition
        if found is None or not observer.sees_gradients or self.last is not None:
            return None
        return self.hand_on(found, ticket)

    def found(self, given: tuple[Any, ...]) -> _Found | None:
        """What is watched; None of a layer without tensors, where that is no error.

        Raises:
            SiteError: where there is no tensor.
        """
        found = self._find(given)
        if found is None:
            return None
        if is_compiling():
            readable = not torch._C._are_functorch_transforms_active()
        else:
            readable = all(map(has_data, found.tensors))
        return found._replace(readable=readable)

    def _find(self, given: tuple[Any, ...]) -> _Found | None:
        at_input, index = self.site.at == "input", self.observer.index
        if index is None and self.observer.whole:
            value: Any = given if at_input else given[-1]
            nested = Nested(value)
            if nested.tensors:
                return _Found(nested.tensors, nested, whole=True)
            if not self.observer.needs_tensor:
                return None
            if isinstance(value, list | tuple | Mapping) and not at_input:
                raise self.site.error("the output holds no floating-point tensor")
        index = 0 if index is None and at_input else index
        value = given[-1] if not at_input or isinstance(index, str) else given[0]
        try:
            x = indexing.get(value, index)
        except ValueError as error:
            what = "what the layer is given" if at_input else "the output"
            raise self.site.error(f"{what} {error}") from None
        return _Found([x], _Element(given, index, at_input))

    def hand_on(self, found: _Found, ticket: Any) -> Any:
        """Watch the gradients of what was found; what the hook is to return."""
        if not found.readable:
            return None
        new = [self.watched(x, i, ticket) for i, x in enumerate(found.tensors)]
        changed = any(a is not b for a, b in zip(new, found.tensors, strict=True))
        return found.put(new) if changed else None

    def watched(self, x: Tensor, at: int, ticket: Any) -> Tensor:
        """The tensor, its gradient watched: a copy where its own hook could be passed by."""
        if not may_get_gradient(x):
            return x
        if is_compiling():
            given = [scale_in_graph(self.site, x.device)]
            if isinstance(ticket, Tensor):  # the backward takes none but those of the forward
                given.append(ticket)
                ticket = None
            traced: Tensor = GradIdentityTraced.apply(x, _TracedSeer(self, at, ticket), *given)
            return traced
        if x._is_view() or x.is_leaf:  # work in place loses the hook; a parameter would keep it
            x = x.clone()
        x.register_hook(Seer(self, at, ticket))  # type: ignore[no-untyped-call]  # torch's
        if self.given is not None:  # as it arrives, before what the layer's own hooks do to it
            put_first(x._backward_hooks)
        return x

    def _see(self, module: nn.Module, found: _Found, given: tuple[Any, ...]) -> Any:
        try:
            return self.watch.see(self._seen(module, found, given))
        except (TypeError, ValueError) as error:
            raise self.site.error(error) from error

    def _seen(self, module: nn.Module, found: _Found, given: tuple[Any, ...]) -> Seen:
        control, at_input = self.site.control, self.site.at == "input"
        return Seen(
            module=module,
            tensors=[x if self.observer.keeps_graph else x.detach() for x in found.tensors],
            nest=found.put if found.whole else itemgetter(0),
            given=given if at_input else given[:-1],
            training=module.training,
            epoch=control.epoch,
            channels_first=_ChannelsFirst(self.site, given),
            shared=control.shared,
        )

    def _count(self) -> None:
        """Count something that was seen."""
        record = self.site.record
        (record.meter if is_compiling() else record).add_active(None, 0, 0.0)

    def see_gradient(self, grad: Tensor, at: int, scale: float | Tensor, ticket: Any) -> None:
        """A gradient has come back."""
        self.watch.see_gradient(grad.detach(), at, scale, ticket)
        if not self.observer.sees_values:
            self._count()


class LastHook:
    """The second hook of an observer: it sees gradients as they arrive."""

    turn = Turn.LAST

    def __init__(self, first: ObserveHook) -> None:
        self.first = first

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        first = self.first
        if is_exported() or not first.site.acts(module.training):
            return None
        found = first.found(given)
        return found and first.hand_on(found, None if is_compiling() else first.ticket)


class Seer:
    """Tensor hook: sees a gradient. It holds no tensor of the graph."""

    def __init__(self, hook: ObserveHook, at: int, ticket: Any) -> None:
        self.hook, self.at, self.ticket = hook, at, ticket

    def __call__(self, grad: Tensor | None) -> None:
        control = self.hook.site.control
        if grad is not None and has_data(grad) and control.installed and control.enabled:
            self.hook.see_gradient(grad, self.at, control.grad_scale(grad.device), self.ticket)


class _TracedSeer(Seer):
    """The same in compiled code, which is given the scale, and a ticket that is one, as tensors."""

    def __call__(self, grad: Tensor, *given: Tensor) -> Tensor:  # type: ignore[override]
        ticket = given[1] if len(given) > 1 else self.ticket
        self.hook.see_gradient(grad, self.at, given[0], ticket)
        return grad


class _ChannelsFirst:
    """A tensor as (N, C, ...); None where its channels are not known."""

    def __init__(self, site: Site, told: tuple[Any, ...]) -> None:
        self.site, self.told = site, told

    def __call__(self, x: Tensor) -> Tensor | None:
        form = self.form(x)
        return None if form is None else axes.as_map(x, form)

    def form(self, x: Tensor) -> axes.Form | None:
        """How the axes of a tensor are read; None where its channels are not known."""
        if x.ndim < 2:
            return None
        try:
            return self.site.forms.of(x, self.told)
        except ValueError:
            return None  # what needs them says so in the report


class _Found(NamedTuple):
    """What is watched.

    Attributes:
        tensors: one or several.
        put: puts others in their place: what a hook is to return.
        whole: whether they are all that the layer gives.
        readable: whether they have data, outside of function transforms.
    """

    tensors: list[Tensor]
    put: Callable[[Sequence[Any]], Any]
    whole: bool = False
    readable: bool = True


class _Element:
    """Puts another in the place of one tensor; returns what a hook is to return."""

    def __init__(self, given: tuple[Any, ...], index: indexing.Index, at_input: bool) -> None:
        self.given, self.index, self.at_input = given, index, at_input

    def __call__(self, new: Sequence[Any]) -> Any:
        if not self.at_input:
            return indexing.put(self.given[-1], self.index, new[0])
        args, kwargs = self.given
        if isinstance(self.index, str):
            return args, indexing.put(kwargs, self.index, new[0])
        return indexing.put(args, self.index, new[0]), kwargs
