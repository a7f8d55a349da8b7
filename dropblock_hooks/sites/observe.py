"""The hook of an observer: it sees what a layer returns, or takes, and the gradient of its output.

Eager code calls the `Watch` of the site directly, compiled code through `observe_operator`. Both
run the same Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map

from ..axes.view import View
from ..checkpointing import NO_TASK, graph_task
from ..handles import new_handle
from ..observers.base import Observer, Seen, Watch
from ..warn import warn
from . import indexing
from .act import has_data, is_exported, is_exporting
from .hooks import SiteHook, Turn, put_on
from .identity import may_get_gradient
from .nested import Nested
from .observe_operator import observe, watch_gradient
from .site import Site


class ObserveHook(SiteHook):
    """Forward hook, or forward pre-hook at an input, that observes and changes nothing.

    Attributes:
        handle: names the hook in compiled code.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        observer: Observer = site.regularizer  # type: ignore[assignment]  # `make_hook` has asked
        self.observer = observer
        self.turn = Turn.BEFORE if observer.when == "before" else Turn.AFTER
        if observer.when == "before" and not observer.sees_values:
            self.turn = Turn.LAST  # the first that a gradient meets
        self.handle = new_handle(self)
        self.watch.join(site.control.shared)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.handle = new_handle(self)  # a copy is another hook

    @property
    def watch(self) -> Watch:
        """The state of its site."""
        watch: Watch = self.site.bound
        return watch

    def install(self, module: nn.Module) -> None:
        put_on(module, self, at_input=self.site.at == "input", with_kwargs=True)

    def _act(self, module: nn.Module, *given: Any) -> Any:
        if is_exported():
            return None
        found = self._found(given)
        if found is not None and not all(map(has_data, found.tensors)):
            found = None
        ticket = None
        if graph_task() == NO_TASK:
            ticket = self._see(
                [] if found is None else self._detached(found.tensors),
                self._given(given),
                None if found is None else found.nest,
                module.training,
                found is not None and any(map(may_get_gradient, found.tensors)),
            )
        return None if found is None else self._watch_gradients(found, ticket)

    def _compile(self, module: nn.Module, *given: Any) -> Any:
        observer = self.observer
        if is_exporting() or not (module.training or observer.active == "always"):
            return None
        if torch._C._are_functorch_transforms_active():
            return None
        if observer.keeps_graph:
            raise self.site.error(
                "compiled code can't keep the autograd graph of a value: use detach=True, or call "
                "the model without torch.compile"
            )
        found = self._found(given)
        tensors = [] if found is None else found.tensors
        ticket = observe(
            self.handle,
            [x.detach() for x in tensors],
            self._given(given),
            "" if found is None else found.written(),
            module.training,
            any(may_get_gradient(x) for x in tensors),
        )
        return None if found is None else self._watch_gradients(found, ticket)

    def see_compiled(
        self,
        tensors: Sequence[Tensor],
        given: Sequence[Tensor],
        nesting: str,
        training: bool,
        differentiable: bool,
    ) -> int | None:
        """Add one call of compiled code; the arguments are those of ``observe``."""
        if graph_task() != NO_TASK or not self.site.enter(training):
            return None
        nest = partial(_nested, nesting) if nesting else None
        ticket: int | None = self._see(tensors, given, nest, training, differentiable)
        return ticket

    def _see(
        self,
        tensors: Sequence[Tensor],
        given: Sequence[Tensor],
        nest: Callable[[Sequence[Any]], Any] | None,
        training: bool,
        differentiable: bool,
    ) -> Any:
        """Count one call of the layer and add it to the watch; return its ticket."""
        site, observer, watch = self.site, self.observer, self.watch
        if observer.sees_values or not observer.sees_gradients:
            site.record.add_active(None, 0, 0.0)
        if nest is None or not observer.sees_values:
            return None
        forms: list[View | None] = [None] * len(tensors)
        if watch.reads_channels:
            forms = [self._form(x) for x in tensors]
        control = site.control
        epoch, shared = control.epoch, control.shared
        try:
            return watch.see(
                Seen(tensors, nest, given, forms, training, differentiable, epoch, shared)
            )
        except (TypeError, ValueError) as error:
            raise site.error(error) from error

    def _form(self, x: Tensor) -> View | None:
        """How the axes of a tensor are read; None if its channels are not known."""
        if x.ndim < 2:
            return None
        try:
            return self.site.reader.view(x)
        except ValueError:
            return None  # the report says so

    def _found(self, given: tuple[Any, ...]) -> _Found | None:
        """Return the observed tensors; None of a layer without tensors where that is no error.

        `given` is what torch calls the hook with: arguments, keywords and output.

        Raises:
            SiteError: if there is no tensor.
        """
        observer = self.observer
        if not (observer.sees_values or observer.sees_gradients):
            return None
        at_input, index = self.site.at == "input", observer.index
        value: Any = given if at_input else given[-1]
        if index is None and observer.whole:
            if isinstance(value, Tensor) and value.is_floating_point():
                return _Found([value], _first)
            nested = Nested(value)
            if nested.tensors:
                return _Found(nested.tensors, nested, nested)
            if not observer.needs_tensor:
                return None
            if isinstance(value, list | tuple | dict) and not at_input:
                raise self.site.error("the output holds no floating-point tensor")
        if at_input:
            index = 0 if index is None else index
            value = given[1] if isinstance(index, str) else given[0]
        try:
            x = indexing.get(value, index)
        except ValueError as error:
            what = "what the layer is given" if at_input else "the output"
            raise self.site.error(f"{what} {error}") from None
        return _Found([x], _first if index is None else _Element(value, index))

    def _given(self, given: tuple[Any, ...]) -> list[Tensor]:
        """Return the tensors among the layer's arguments, where the watch reads them."""
        if not self.watch.reads_given:
            return []
        return [x.detach() for x in Nested(given[:2]).tensors]

    def _detached(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x if self.observer.keeps_graph else x.detach() for x in tensors]

    def _watch_gradients(self, found: _Found, ticket: Any) -> Any:
        """Watch the gradients of what was found; return what the hook returns."""
        if not self.observer.sees_gradients:
            return None
        new = [self.watched(x, at, ticket) for at, x in enumerate(found.tensors)]
        changed = any(a is not b for a, b in zip(new, found.tensors, strict=True))
        return found.put(new) if changed else None

    def watched(self, x: Tensor, at: int, ticket: Any) -> Tensor:
        """Return the tensor with its gradient watched: a copy, where a hook could be passed by."""
        if not may_get_gradient(x):
            return x
        if is_compiling():
            return watch_gradient(x, ticket, at)
        if x._is_view() or x.is_leaf:  # work in place loses the hook; a parameter would keep it
            x = x.clone()
        x.register_hook(_Seer(self, at, ticket))  # type: ignore[no-untyped-call]  # torch's
        return x

    def see_gradient(self, grad: Tensor, at: int, ticket: Any) -> None:
        """Add the gradient of one tensor, and count it if the observer sees gradients only."""
        control, watch = self.site.control, self.watch
        if not (has_data(grad) and control.installed and control.enabled):
            return
        if ticket is None and watch.by_call:
            self._tell_reentrant()
            return
        watch.see_gradient(grad.detach(), at, control.grad_scale(grad.device), ticket)
        if not self.observer.sees_values:
            self.site.record.add_active(None, 0, 0.0)

    def _tell_reentrant(self) -> None:
        """Warn once that a gradient belongs to no known call."""
        key = (self.site.key, "reentrant_checkpoint")
        if key not in self.site.control.told:
            self.site.control.told.add(key)
            warn(
                f"{self.site.key}: a gradient was not kept, because the layer is in a reentrant "
                "checkpoint, where gradients can't be matched with calls: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )


class _Seer:
    """Tensor hook that hands a gradient to an observer. It holds no tensor of the graph."""

    def __init__(self, hook: ObserveHook, at: int, ticket: Any) -> None:
        self.hook, self.at, self.ticket = hook, at, ticket

    def __call__(self, grad: Tensor | None) -> None:
        if grad is not None:
            self.hook.see_gradient(grad, self.at, self.ticket)


class _Found(NamedTuple):
    """The observed tensors of one call.

    Attributes:
        tensors: one or several.
        put: puts others in their place; returns the new output.
        nested: the nested output that they were found in; None for a single tensor.
    """

    tensors: list[Tensor]
    put: Callable[[Sequence[Any]], Any]
    nested: Nested | None = None

    @property
    def nest(self) -> Callable[[Sequence[Any]], Any]:
        """Puts one object for each tensor into the nested structure."""
        return _first if self.nested is None else self.nested

    def written(self) -> str:
        """Return the nested structure as text, with a number for each tensor."""
        if self.nested is None:
            return "0"
        return _written(self.nested([_Place(at) for at in range(len(self.tensors))]))


class _Place:
    """Stands in the place of a tensor."""

    def __init__(self, at: int) -> None:
        self.at = at


class _Element:
    """Puts another tensor in the place of one element; returns the new output."""

    def __init__(self, value: Any, index: indexing.Index) -> None:
        self.value, self.index = value, index

    def __call__(self, new: Sequence[Any]) -> Any:
        return indexing.put(self.value, self.index, new[0])


def _first(new: Sequence[Any]) -> Any:
    return new[0]


def _written(value: Any) -> str:
    """Return a nested structure as a Python literal; what is no tensor becomes None."""
    if isinstance(value, _Place):
        return str(value.at)
    if isinstance(value, dict):
        return "{" + "".join([f"{key!r}: {_written(each)}, " for key, each in value.items()]) + "}"
    if isinstance(value, list | tuple):
        inside = "".join([f"{_written(each)}, " for each in value])
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return "None"


def _nested(nesting: str, new: Sequence[Any]) -> Any:
    """The inverse of `_written`, with other objects in the places."""
    return tree_map(lambda at: None if at is None else new[at], ast.literal_eval(nesting))
