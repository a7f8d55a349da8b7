"""The hook of an observer: it sees what a layer returns, or takes, and the gradient of its output.

Eager code calls the `Watch` of the site directly, compiled code through `observe_operator`. Both
run the same Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map

from ..axes.view import View
from ..checkpointing import NO_TASK, graph_task
from ..handles import check_version, is_exporting, new_handle
from ..observers.base import Observer, Seen, Watch
from . import indexing
from .act import has_data, is_exported, may_get_gradient
from .hooks import SiteHook, Turn, put_on
from .observe_operator import observe_and_watch
from .site import Site

_Nest = Callable[[Sequence[Any]], Any]


class ObserveHook(SiteHook):
    """Forward hook, or forward pre-hook at an input, that observes and changes nothing.

    Attributes:
        handle: names the hook in compiled code.
        is_plain: whether it sees the output of its layer as it is, where that is a tensor.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        observer: Observer = site.regularizer  # type: ignore[assignment]  # `make_hook` has asked
        self.observer = observer
        self.turn = Turn.BEFORE if observer.when == "before" else Turn.AFTER
        if observer.when == "before" and not observer.sees_values:
            self.turn = Turn.LAST  # the first that a gradient meets
        self.handle = new_handle(self)
        self.sees_gradients = observer.sees_gradients
        self.sees_nothing = not (observer.sees_values or observer.sees_gradients)
        self.reads_given = False
        self.beyond_training = observer.active == "always"
        self.is_plain = (
            observer.at == "output"
            and observer.index is None
            and not (observer.keeps_graph or self.sees_nothing)
        )

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
        self.reads_given = self.observer.reads_given(module)
        put_on(module, self, at_input=self.site.at == "input", with_kwargs=True)

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if is_compiling():  # what follows is traced, so it is short
            return self._compile(module, *given)
        return super().__call__(module, *given)

    def _act(self, module: nn.Module, *given: Any) -> Any:
        if is_exported():
            return None
        tensors, put, nest = self._found(given)
        if not all(map(has_data, tensors)):
            tensors = []
        ticket = None
        if graph_task() == NO_TASK:
            seen = [x if self.observer.keeps_graph else x.detach() for x in tensors]
            taken = [x.detach() for x in self._given(given)]
            differentiable = any(map(may_get_gradient, tensors))
            ticket = self._see(seen, taken, nest, module.training, differentiable)
        if not self.sees_gradients:
            return None
        new = [self.watched(x, at, ticket) for at, x in enumerate(tensors)]
        changed = any(a is not b for a, b in zip(new, tensors, strict=True))
        return put(new) if changed else None

    def _compile(self, module: nn.Module, *given: Any) -> Any:
        if not (module.training or self.beyond_training) or is_exporting():
            return None
        check_version()
        output = given[-1]
        if self.is_plain and isinstance(output, Tensor) and output.is_floating_point():
            taken = self._given(given) if self.reads_given else []
            new = observe_and_watch(
                self.handle, [output], taken, "0", module.training, self.sees_gradients
            )
            return new[0] if new else None
        if self.observer.keeps_graph:
            raise self.site.error(
                "compiled code can't keep the autograd graph of a value: use detach=True, or call "
                "the model without torch.compile"
            )
        tensors, put, nest = self._found(given)
        nesting = (
            "0" if nest is _first else _written(nest([_Place(i) for i in range(len(tensors))]))
        )
        new = observe_and_watch(
            self.handle,
            tensors,
            self._given(given),
            nesting,
            module.training,
            self.sees_gradients,
        )
        return put(new) if new else None

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
        nest = partial(_nested, nesting)
        ticket: int | None = self._see(tensors, given, nest, training, differentiable)
        return ticket

    def _see(
        self,
        tensors: Sequence[Tensor],
        given: Sequence[Tensor],
        nest: _Nest,
        training: bool,
        differentiable: bool,
    ) -> Any:
        """Count one call of the layer and add it to the watch; return its ticket."""
        site, observer = self.site, self.observer
        if observer.sees_values or not observer.sees_gradients:
            site.counter.add(None, 0, 0.0)
        if not tensors or not observer.sees_values:
            return None
        run = site.run
        try:
            return self.watch.update(
                Seen(
                    tensors,
                    run.epoch,
                    run.shared,
                    training=training,
                    differentiable=differentiable,
                    nest=nest,
                    given=given,
                    form=self._form,
                )
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

    def _found(self, given: tuple[Any, ...]) -> tuple[list[Tensor], _Nest, _Nest]:
        """Return the observed tensors, what puts others in their place, and what nests objects.

        `given` is what torch calls the hook with: arguments, keywords and output. A layer may have
        no tensors, where that is no error.

        Raises:
            SiteError: if there is no tensor.
        """
        observer = self.observer
        index = observer.index
        if self.site.at == "output":
            value: Any = given[-1]
            if index is None and isinstance(value, Tensor) and value.is_floating_point():
                return ([] if self.sees_nothing else [value]), _first, _first
        else:
            value = given if index is None and observer.whole else given[0]
            if isinstance(index, str):
                value = given[1]
            elif index is None and not observer.whole:
                index = 0
        if self.sees_nothing:
            return [], _first, _first
        if index is None and observer.whole:
            nested = indexing.Nested(value)
            if nested.tensors or not observer.needs_tensor:
                return nested.tensors, nested, nested
            if isinstance(value, (list, tuple, dict)):
                raise self.site.error("the output holds no floating-point tensor")
        try:
            x = indexing.get(value, index)
        except ValueError as error:
            what = "what the layer is given" if self.site.at == "input" else "the output"
            raise self.site.error(f"{what} {error}") from None
        return [x], _Element(value, index), _first

    def _given(self, given: tuple[Any, ...]) -> list[Tensor]:
        """Return the tensors that are arguments of the layer, where the watch reads them."""
        if not self.reads_given:
            return []
        taken = [*given[0], *given[1].values()]
        return [x for x in taken if isinstance(x, Tensor) and x.is_floating_point()]

    def watched(self, x: Tensor, at: int, ticket: Any) -> Tensor:
        """Return the tensor with its gradient watched: a copy, where a hook could be passed by."""
        if not may_get_gradient(x):
            return x
        if x._is_view() or x.is_leaf:  # work in place loses the hook; a parameter would keep it
            x = x.clone()
        x.register_hook(_Seer(self, at, ticket))  # type: ignore[no-untyped-call]  # torch's
        return x

    def see_gradient(self, grad: Tensor, at: int, ticket: Any) -> None:
        """Add the gradient of one tensor, and count it if the observer sees gradients only."""
        run, observer = self.site.run, self.observer
        if not (has_data(grad) and run.installed and run.enabled):
            return
        if ticket is None and observer.by_call:
            raise self.site.error(
                "gradients can't be matched with calls in a reentrant checkpoint: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or keep no gradients"
            )
        self.watch.update(
            Seen(
                [grad.detach()],
                run.epoch,
                run.shared,
                gradient=True,
                at=at,
                scale=run.scale.value(grad.device),
                ticket=ticket,
            )
        )
        if not observer.sees_values:
            self.site.counter.add(None, 0, 0.0)


class _Seer:
    """Tensor hook that hands a gradient to an observer. It holds no tensor of the graph."""

    def __init__(self, hook: ObserveHook, at: int, ticket: Any) -> None:
        self.hook, self.at, self.ticket = hook, at, ticket

    def __call__(self, grad: Tensor | None) -> None:
        if grad is not None:
            self.hook.see_gradient(grad, self.at, self.ticket)


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
    if isinstance(value, (list, tuple)):
        inside = "".join([f"{_written(each)}, " for each in value])
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return "None"


def _nested(nesting: str, new: Sequence[Any]) -> Any:
    """The inverse of `_written`, with other objects in the places."""
    return tree_map(lambda at: None if at is None else new[at], ast.literal_eval(nesting))
