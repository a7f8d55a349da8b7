"""``capture``: activations and gradients of layers in one call of a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from ..observers.capture import Record
from ..planning.dry_run import arguments_of
from ..quoting import listed
from ..selectors.index import Index
from ..selectors.select import Select
from .once import Once, call_once, main_tensor


def capture(
    model: nn.Module,
    x: Any,
    layers: str | Select | Sequence[str],
    *,
    gradients: bool = False,
    when: Literal["after", "before"] = "after",
    at: Literal["output", "input"] = "output",
    index: int | str | None = None,
    reduce: str | Callable[[Tensor], Tensor] | None = None,
    device: Any = None,
    dtype: Any = None,
    target: Callable[[Any], Tensor] | None = None,
) -> Any:
    """Call a model once, and return the activations of layers. No hook stays on the model.

    The unwrapped model runs eagerly and in its current mode: in training, BatchNorm updates its
    running statistics. The ``.grad`` of parameters does not change.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Flatten())
        >>> values, grads = capture(model, torch.ones(2, 3, 6, 6), "type:Conv2d", gradients=True)
        >>> {name: tuple(value.shape) for name, value in values.items()}
        {'0': (2, 8, 4, 4)}

    Args:
        model: any model, wrapped or not, attached or not.
        x: the argument of the model: a tensor, a tuple of arguments or a mapping of keywords.
        layers: a selector, or a list of names.
        gradients: also return the gradients of the values. A gradient is None where the loss does
            not depend on the value.
        when: ``"before"`` or ``"after"`` the regularizers of the layer.
        at: the ``"output"`` or the ``"input"`` of the layer.
        index: which element of a tuple, list or dict.
        reduce: keep less of each tensor; see `Capture`.
        device: the device of the values.
        dtype: the type of the values.
        target: a function of the output. The backward starts from the sum of its result. None takes
            the output itself, or its ``logits`` or ``out``.

    Returns:
        The values by layer, nested like the output of the layer. A layer that was called several
        times has a list of values. With ``gradients=True``, the pair ``(values, grads)``. With
        ``at="input"``, a value is the pair of the arguments and the keyword arguments.

    Raises:
        SpecError: if `layers` is no selector, or the model has no such layer.
        RuntimeError: if a layer was not called, or no gradient came.
        ValueError: if `layers` is empty, if `target` is given without `gradients`, or if gradients
            are asked for at an input.
        TypeError: with ``gradients=True``, if the output, or the result of `target`, is no tensor.
    """
    if target is not None and not gradients:
        raise ValueError("target needs gradients=True")
    if isinstance(layers, list | tuple):
        layers = Select(names=tuple(layers))

    options: dict[str, Any] = {"device": device, "dtype": dtype, "reduce": reduce}
    once = Once(gradients, keep=None, when=when, at=at, index=index, **options)
    model_index = Index(model)
    args, kwargs = arguments_of(x)

    def forward() -> Tensor | None:
        # the unwrapped model, because DistributedDataParallel would expect a backward of its own
        output = model_index.model(*args, **kwargs)
        return main_tensor(output, target) if gradients else None

    sites = call_once(model_index, layers, once, forward)
    records = {site.name or ".": site.bound.result() for site in sites}
    _check_called(records)
    values = _by_layer(records, "value")
    if not gradients:
        return values

    _check_gradients(records)
    return values, _by_layer(records, "grad")


def _check_called(records: dict[str, list[Record]]) -> None:
    """Raise RuntimeError if a layer was not called."""
    never = [name for name, calls in records.items() if not calls]
    if never:
        raise RuntimeError(
            f"never called in this forward: {listed(never, 5)}. Name the layers inside, if it is a "
            "container; its parent, which may read its weights; or leave it out by "
            "Select(..., exclude=...)"
        )


def _check_gradients(records: dict[str, list[Record]]) -> None:
    """Raise RuntimeError if no call of any layer got a gradient."""
    all_calls = itertools.chain.from_iterable(records.values())
    if all(call.grad is None for call in all_calls):
        raise RuntimeError(
            f"no gradient came to {listed(records, 5)}: does the loss depend on them? Gradients "
            "stop at no_grad(), inference_mode(), detach() and checkpoints with use_reentrant=True"
        )


def _by_layer(records: dict[str, list[Record]], field: str) -> dict[str, Any]:
    """Return the value of the only call of each layer, or the list of all calls."""
    values: dict[str, Any] = {}
    for name, calls in records.items():
        of_calls = [getattr(call, field) for call in calls]
        values[name] = of_calls[0] if len(of_calls) == 1 else of_calls
    return values
