"""``capture``: activations and gradients of layers in one call of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from ..planning.dry_run import arguments_of
from ..quoting import kind_of, listed, shown
from ..selectors.select import Select
from ..selectors.wrappers import unwrap
from .once import Once, call_once, main_tensor, same_function

Layers = str | Select | Sequence[str]


def capture(
    model: nn.Module,
    x: Any,
    layers: Layers,
    *,
    gradients: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    when: Literal["after", "before"] = "after",
    at: Literal["output", "input"] = "output",
    index: int | str | None = None,
    reduce: str | Callable[[Tensor], Tensor] | None = None,
    device: Any = None,
    dtype: Any = None,
    target: Callable[[Any], Tensor] | None = None,
) -> Any:
    """Call a model once, and return the activations of layers; nothing stays on the model.

    The unwrapped model runs eagerly and in its current mode: in training mode, BatchNorm updates
    its running statistics. The ``.grad`` of parameters does not change.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Flatten())
        >>> values, grads = capture(model, torch.ones(2, 3, 6, 6), "type:Conv2d", gradients=True)
        >>> {name: tuple(value.shape) for name, value in values.items()}
        {'0': (2, 8, 4, 4)}

    Args:
        model: any model, wrapped or not, attached or not.
        x: the argument of the model: a tensor, a tuple of arguments or a mapping of keywords.
        layers: a selector, or a list of names.
        gradients: also return the gradients of the values; None if the loss does not depend on one.
        loss: another name of `target`.
        when: ``"before"`` or ``"after"`` the regularizers of the layer.
        at: the ``"output"`` or the ``"input"`` of the layer.
        index: which element of a tuple, list or dict.
        reduce: keep less of each tensor; see `Capture`.
        device: the device of the values.
        dtype: the type of the values.
        target: a function of the output that returns a scalar, from which the backward starts; by
            default the sum of the output, or of its ``logits`` or ``out``.

    Returns:
        The values by name of the layer, nested like its output; a list of them if the layer was
        called several times. With ``gradients=True`` the pair ``(values, grads)``.

    Raises:
        SpecError: if the model has no such layer.
        RuntimeError: if a layer was not called, or no gradient came.
        TypeError, ValueError: if `layers` is no selector, or `target` returns no scalar.
    """
    loss = same_function(target, "loss", loss)
    if loss is not None and not gradients:
        raise ValueError(f"target (or loss) needs gradients=True, got {shown(gradients)}")
    if isinstance(layers, list | tuple) and layers:
        layers = Select(names=tuple(layers))
    if not isinstance(layers, str | Select):
        raise TypeError(f"layers must be a selector or a list of names, got {shown(layers)}")
    options: dict[str, Any] = {"when": when, "at": at, "index": index, "reduce": reduce}
    once = Once(gradients, keep=None, device=device, dtype=dtype, **options)
    base = unwrap(model)  # DistributedDataParallel would wait for its own backward
    args, kwargs = arguments_of(x)
    scalar = partial(_scalar, loss) if gradients else None
    sites = call_once(base, layers, once, lambda: base(*args, **kwargs), scalar)
    records = {site.name or ".": site.bound.result() for site in sites}
    never = [name for name, calls in records.items() if not calls]
    if never:
        raise RuntimeError(
            f"never called in this forward: {listed(never, 5)}. Name the layers inside a container "
            "that the model loops over, the parent of a layer whose weights it reads, or leave the "
            "layer out by Select(..., exclude=...)"
        )
    if gradients and all(call.grad is None for calls in records.values() for call in calls):
        raise RuntimeError(
            f"no gradient came to {listed(records, 5)}: does the loss depend on them? Gradients "
            "stop at torch.no_grad(), torch.inference_mode() and detach(), and at checkpoints with "
            "use_reentrant=True"
        )
    values, grads = (
        {name: _single([getattr(call, field) for call in calls]) for name, calls in records.items()}
        for field in ("value", "grad")
    )
    return (values, grads) if gradients else values


def _scalar(loss: Callable[[Any], Tensor] | None, output: Any) -> Tensor:
    """The number that the backward starts from."""
    scalar: Any = main_tensor(output).sum() if loss is None else loss(output)
    if not isinstance(scalar, Tensor) or scalar.numel() != 1:
        got = f"shape {tuple(scalar.shape)}" if isinstance(scalar, Tensor) else kind_of(scalar)
        raise ValueError(f"target (or loss) must return a tensor with one number, got {got}")
    return scalar


def _single(calls: list[Any]) -> Any:
    """The value of the only call, or the list of all calls."""
    return calls[0] if len(calls) == 1 else calls
