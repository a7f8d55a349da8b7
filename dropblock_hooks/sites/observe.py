"""The hook of an observer: it sees the output of a layer and its gradient, or the input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpointing import NO_TASK, graph_task
from ..handles import check_version, is_exporting
from ..observers.base import Observer
from . import indexing
from .act import has_data, may_get_gradient, see, see_gradient
from .hooks import SiteHook
from .operator import observe_and_watch, watch_gradient, written
from .site import Site


class ObserveHook(SiteHook):
    """Forward hook, or forward pre-hook at an input, that observes and changes nothing."""

    takes = Observer
    with_kwargs = True

    def __init__(self, site: Site, local: str = "") -> None:
        super().__init__(site, local)
        self.observer: Observer = site.regularizer  # type: ignore[assignment]  # by `takes`

    def _act(self, module: nn.Module, *given: Any) -> Any:
        if torch._C._is_tracing():  # a traced program has no place for the state
            return None
        tensors, put, nesting = self._found(given)
        if not all(map(has_data, tensors)):
            tensors = []
        ticket = None
        if graph_task() == NO_TASK:
            differentiable = any(map(may_get_gradient, tensors))
            taken, training = self._given(given), module.training
            ticket = see(self.site, tensors, taken, nesting, training, differentiable)
        if not self.observer.sees_gradients:
            return None
        new = [self.watched(x, at, ticket) for at, x in enumerate(tensors)]
        changed = any(a is not b for a, b in zip(new, tensors, strict=True))
        return put(new) if changed else None

    def _compile(self, module: nn.Module, *given: Any) -> Any:
        observer, training = self.observer, module.training
        if not (training or observer.active == "always") or is_exporting():
            return None
        check_version()
        if observer.keeps_graph:
            raise self.site.error(
                "compiled code can't keep the autograd graph of a value: use detach=True, or call "
                "the model without torch.compile"
            )
        tensors, put, nesting = self._found(given)
        taken, literal = self._given(given), written(nesting())
        gradients = observer.sees_gradients
        new = observe_and_watch(self.site.handle, tensors, taken, literal, training, gradients)
        return put(new) if new else None

    def _found(
        self, given: tuple[Any, ...]
    ) -> tuple[list[Tensor], Callable[..., Any], Callable[[], Any]]:
        """Return the observed tensors, what puts others in place, and their `Seen.nesting`."""
        observer, whole = self.observer, given[-1]
        if observer.at == "input":
            whole = given
        if not (observer.sees_values or observer.sees_gradients):
            whole = ()
        elif isinstance(whole, Tensor) or not observer.whole or observer.index is not None:
            value, index, x = self.pick(given)
            return [x], lambda new: indexing.put(value, index, new[0]), lambda: 0
        return indexing.flat(whole)

    def _given(self, given: tuple[Any, ...]) -> list[Tensor]:
        taken = [*given[0], *given[1].values()] if self.observer.reads_given else []
        return [x for x in taken if isinstance(x, Tensor) and x.is_floating_point()]

    def watched(self, x: Tensor, at: int, ticket: int | None) -> Tensor:
        """Return the tensor with its gradient watched: a copy, where a hook could be passed by."""
        if not may_get_gradient(x):
            return x
        return watch_gradient(x, partial(see_gradient, self.site, at=at, ticket=ticket))
