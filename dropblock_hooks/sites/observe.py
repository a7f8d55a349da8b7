"""The hook of an observer: it sees what a layer returns, or takes, and the gradient of its output.

Eager code calls the `Watch` of the site directly, compiled code through `observe_operator`. Both
run the same Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..axes.view import View
from ..checkpointing import NO_TASK, graph_task
from ..handles import check_version, is_exporting, new_handle
from ..observers.base import Observer, Seen, Watch
from . import indexing
from .act import has_data, may_get_gradient
from .hooks import SiteHook, Turn, put_on
from .observe_operator import Place, observe_and_watch, watch_gradient, written
from .site import Site

_Nest = Callable[[Sequence[Any]], Any]


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
        self.sees_gradients = observer.sees_gradients
        self.sees_nothing = not (observer.sees_values or observer.sees_gradients)
        self.reads_given = False
        self.beyond_training = observer.active == "always"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.handle = new_handle(self)  # a copy is another hook

    def install(self, module: nn.Module) -> None:
        self.reads_given = self.observer.reads_given(module)
        put_on(module, self, at_input=self.site.at == "input", with_kwargs=True)

    def _act(self, module: nn.Module, *given: Any) -> Any:
        if torch._C._is_tracing():  # a traced program has nowhere to keep what is seen
            return None
        tensors, put, nest = self._found(given)
        if not all(map(has_data, tensors)):
            tensors = []
        ticket = None
        if graph_task() == NO_TASK:
            differentiable = any(map(may_get_gradient, tensors))
            ticket = self.see(tensors, self._given(given), nest, module.training, differentiable)
        if not self.sees_gradients:
            return None
        new = [self.watched(x, at, ticket) for at, x in enumerate(tensors)]
        changed = any(a is not b for a, b in zip(new, tensors, strict=True))
        return put(new) if changed else None

    def _compile(self, module: nn.Module, *given: Any) -> Any:
        if not (module.training or self.beyond_training) or is_exporting():
            return None
        check_version()
        if self.observer.keeps_graph:
            raise self.site.error(
                "compiled code can't keep the autograd graph of a value: use detach=True, or call "
                "the model without torch.compile"
            )
        tensors, put, nest = self._found(given)
        nesting = "0"
        if nest is not _first:
            nesting = written(nest([Place(i) for i in range(len(tensors))]))
        taken, training = self._given(given), module.training
        new = observe_and_watch(self.handle, tensors, taken, nesting, training, self.sees_gradients)
        return put(new) if new else None

    def see(
        self,
        tensors: Sequence[Tensor],
        given: Sequence[Tensor],
        nest: _Nest,
        training: bool,
        differentiable: bool,
    ) -> int | None:
        """Count one call of the layer and add it to the watch; return its ticket."""
        site, observer = self.site, self.observer
        if observer.sees_values or not observer.sees_gradients:
            site.counter.add(None, 0, 0.0)
        if not tensors or not observer.sees_values:
            return None
        seen = Seen(
            tensors if observer.keeps_graph else [x.detach() for x in tensors],
            site.run.epoch,
            site.run.shared,
            training=training,
            differentiable=differentiable,
            nest=nest,
            given=[x.detach() for x in given],
            form=self._form,
        )
        watch: Watch = site.bound
        try:
            return watch.update(seen)
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

        `given` is what torch calls the hook with: arguments, keywords and output. There may be no
        tensor, unless the observer `needs_tensor`.

        Raises:
            SiteError: if there is no tensor.
        """
        observer, index = self.observer, self.observer.index
        if self.sees_nothing:
            return [], _first, _first
        value: Any = given
        if observer.at == "output":
            value = given[-1]
            if index is None and isinstance(value, Tensor) and value.is_floating_point():
                return [value], _first, _first
        elif index is not None or not observer.whole:
            value = given[1] if isinstance(index, str) else given[0]
            index = 0 if index is None else index
        if index is None and observer.whole:
            nested = indexing.Nested(value)
            if nested.tensors or not observer.needs_tensor:
                return nested.tensors, nested, nested
            if isinstance(value, (list, tuple, dict)):
                raise self.site.error("the output holds no floating-point tensor")
        try:
            x = indexing.get(value, index)
        except ValueError as error:
            what = "what the layer is given" if observer.at == "input" else "the output"
            raise self.site.error(f"{what} {error}") from None
        return [x], lambda new: indexing.put(value, index, new[0]), _first

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
        return watch_gradient(x, partial(self.see_gradient, at=at, ticket=ticket))

    def see_gradient(self, grad: Tensor | None, at: int, ticket: Any) -> None:
        """Add the gradient of one tensor, and count it if the observer sees gradients only."""
        run, observer = self.site.run, self.observer
        if grad is None or not (has_data(grad) and run.installed and run.enabled):
            return
        if ticket is None and observer.by_call:
            raise self.site.error(
                "gradients can't be matched with calls in a reentrant checkpoint: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or keep no gradients"
            )
        seen = Seen(
            [grad.detach()],
            run.epoch,
            run.shared,
            gradient=True,
            at=at,
            scale=run.scale.value(grad.device),
            ticket=ticket,
        )
        self.site.bound.update(seen)
        if not observer.sees_values:
            self.site.counter.add(None, 0, 0.0)


def _first(new: Sequence[Any]) -> Any:
    return new[0]
