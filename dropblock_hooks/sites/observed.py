"""Observers in compiled code: their state is a tensor that operators change.

`observe` is one operator for dynamo, which is quicker than to trace Python, and AOTAutograd traces
into it. It calls the operators of `functional.measures` in the forward and, by a hook of the
tensor, in the backward.
"""

import hashlib
import inspect
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..functional import measures
from ..functional.cells import CALLED
from ..functional.operators import count, define
from .operator import watch_gradient
from .site import Site, may_get_grad

# the caches of torch.compile on disk know an operator by its name and its arguments only
_CODE = hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:12]


def observe(site: Site, tensors: list[Tensor], given: list[Tensor], training: bool) -> list[Tensor]:
    """Observe a call; the tensors with watched gradients, or nothing without any."""
    observer: Any = site.regularizer
    state = site.watch.open  # type: ignore[union-attr]  # of an observer
    x = tensors[0]
    site.use_board(x.device)
    mapped = None
    if observer.sees_values:
        mapped = observer.compiled_map(state, x, _maps_of(site, x))
    batch = None
    if training and given:
        batch = observer.compiled_batch(state, given)
    channels = 0 if mapped is None else mapped.shape[1]
    site.use_observed(x.device, channels, batch is not None)
    observed = site.observed
    scale = site.run.scaler._scale if site.scaled else None
    found: list[Tensor] = observe_op(
        tensors,
        given,
        mapped,
        batch,
        scale,
        site.cells,
        site.counts,
        observed.state,
        observed.alive,
        observed.batches,
        training,
        observer.sees_gradients,
        observer.compiled_kind,
        observer.compiled_numbers(state),
        _CODE,
    )
    return found


def _maps_of(site: Site, x: Tensor) -> Tensor | None:
    if x.ndim < 2:
        return None
    view = site.form_or_none(x)
    return None if view is None else view.take(x)


@define(
    "observe_traced(Tensor[] tensors, Tensor[] given, Tensor? mapped, Tensor? batch, Tensor? scale, "
    "Tensor cells, Tensor(a!) counts, Tensor(b!) state, Tensor(c!)? alive, Tensor(d!)? batches, "
    "bool training, bool gradients, str kind, float[] numbers, str code) -> Tensor[]"
)
def observe_op(
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    mapped: Tensor | None,
    batch: Tensor | None,
    scale: Tensor | None,
    cells: Tensor,
    counts: Tensor,
    state: Tensor,
    alive: Tensor | None,
    batches: Tensor | None,
    training: bool,
    gradients: bool,
    kind: str,
    numbers: Sequence[float],
    code: str,
) -> list[Tensor]:
    """Call the operators of an observer; AOTAutograd traces this function.

    `kind` is ``"watchdog"``, ``"values"`` or ``"gradients"``. `numbers` are the bounds of a
    Watchdog; of statistics `every`, and then the edges. `code` is the hash of this module, by
    which caches on disk know it.
    """
    with torch.no_grad():
        seen = [x.detach() for x in tensors]
        if kind == "watchdog":
            arguments = [x.detach() for x in given]
            channels = None if mapped is None else mapped.detach()
            measures.add_watched(seen, arguments, channels, cells, training, numbers, state, alive)
        elif kind == "values":
            every = int(numbers[0])
            measures.add_statistics(
                seen[0],
                None if mapped is None else mapped.detach(),
                None if batch is None else batch.detach(),
                None,
                cells,
                training,
                True,
                every,
                numbers[1:],
                state,
                alive,
                batches,
            )
        else:
            count(counts, cells[int(training), 0, CALLED])
    if not (gradients and any(map(may_get_grad, tensors))):
        return []
    see = partial(_see_gradient, scale, cells, training, kind, numbers, state)
    return [watch_gradient(x, see) for x in tensors]


def _see_gradient(
    scale: Tensor | None,
    cells: Tensor,
    training: bool,
    kind: str,
    numbers: Sequence[float],
    state: Tensor,
    grad: Tensor | None,
) -> None:
    if grad is None:  # as of a tensor that nothing was made of
        return
    with torch.no_grad():
        if kind == "watchdog":
            measures.add_watched_gradient(grad, scale, cells, training, state)
            return
        every = int(numbers[0])
        measures.add_statistics(
            grad,
            None,
            None,
            scale,
            cells,
            training,
            False,
            every,
            numbers[1:],
            state,
            None,
            None,
        )
