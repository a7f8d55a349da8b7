"""``Capture``: the activations and gradients of a layer, kept in a training run."""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from .._torch import tree_map
from ..axes.view import View
from ..checks import as_count, check_option
from ..quoting import kind_of, quote
from ..registry import register
from .base import Observer, Seen, State, Unsaved

_TYPES = ("float16", "bfloat16", "float32", "float64")


class Record(NamedTuple):
    """One call of a layer.

    Example:
        >>> model = nn.Sequential(nn.ReLU())
        >>> attached = attach(model, {"0": Capture()})
        >>> y = model(torch.ones(1, 2))
        >>> attached.captured()["0"][0].value
        tensor([[1., 1.]])

    Attributes:
        epoch: the time of the call.
        call: the number of the call, counted from 0.
        value: the output of the layer with its nesting; None in place of objects other than
            floating-point tensors, and where activations are not kept.
        grad: the gradients of these tensors, with the same nesting; None before a backward.
        training: whether the layer was in training mode.
    """

    epoch: float
    call: int
    value: Any
    grad: Any
    training: bool


class _Call(NamedTuple):
    """A call that is kept, without its gradients, and these by their index in `nesting`."""

    record: Record
    nesting: Any
    forms: list[View | None]  # the axes, by which gradients are reduced as the values are
    grads: dict[int, Tensor]


@register
class Capture(Observer):
    """Keeps the last activations of a layer, and their gradients: read ``attached.captured()``.

    Copies are kept, which later in-place operations do not change. Every call of the layer counts,
    but those that activation checkpointing recomputes. Use it in a training; `capture` makes a
    single forward.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True))
        >>> attached = attach(model, {"0": Capture(gradients=True, keep=2)})
        >>> for _ in range(5):
        ...     model(torch.ones(8, 4)).sum().backward()
        >>> [(r.call, r.value.shape, r.grad.shape) for r in attached.captured("0")["0"]]
        [(3, torch.Size([8, 3]), torch.Size([8, 3])), (4, torch.Size([8, 3]), torch.Size([8, 3]))]

    Args:
        gradients: True keeps the gradients of the values; under AMP, of the scaled loss. They come
            after the gradient regularizers of this layer, also with ``when="before"``. Reentrant
            checkpoints, and checkpoints in compiled code, are refused.
        activations: False keeps no values, which needs ``gradients=True``.
        every: keep each n-th call of the layer, at least 1; the first one is included.
        keep: the number of records, the last ones, at least 1; None keeps all, and memory grows.
        reduce: keep the ``"mean"`` or ``"norm"`` of each tensor over all axes but the first, the
            mean of each channel (``"channels"``, a tensor (N, C)), or the result of a function of
            the tensor, which can't be written to a file.
        device: the device of the kept tensors; by default their own.
        dtype: the type of the kept tensors, such as ``"float16"``; by default their own.
        detach: False keeps the autograd graph of the values, which compiled code refuses.
        at: observe the layer's ``"output"`` or its ``"input"``, where no gradients are seen.
            At the input, without `index`, the value is ``(arguments, keywords)``.
    """

    gradients: bool = False
    activations: bool = True
    every: int = 1
    keep: int | None = 1
    reduce: str | Callable[[Tensor], Tensor] | None = None
    device: Any = None
    dtype: Any = None
    detach: bool = True
    active: Literal["train", "always"] = field(default="always", kw_only=True)

    whole: ClassVar[bool] = True
    by_epoch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        vars(self).update(sees_gradients=self.gradients, keeps_graph=not self.detach)
        super().__post_init__()

    @property
    def channelwise(self) -> bool:  # type: ignore[override]  # of each object, not of the class
        return self.reduce == "channels"

    def check(self, values: Mapping[str, float]) -> None:
        super().check(values)
        as_count("every", self.every)
        as_count("keep", 1 if self.keep is None else self.keep)
        if not callable(self.reduce):
            check_option("reduce", self.reduce, (None, "mean", "norm", "channels"))
        if not (self.gradients or self.activations):
            raise ValueError("activations=False keeps nothing without gradients=True")
        if self.device is not None:  # its name, which a file can hold
            try:
                vars(self)["device"] = str(torch.device(self.device))
            except (RuntimeError, TypeError):
                text = f"device must be one of torch's, such as 'cpu', got {quote(self.device)}"
                raise ValueError(text) from None
        if self.dtype is not None:
            vars(self)["dtype"] = str(self.dtype).removeprefix("torch.")
            check_option("dtype", self.dtype, _TYPES)

    def start(self) -> State:
        return {"kept": Unsaved()}

    def update(self, state: State, seen: Seen) -> None:
        kept: dict[int, _Call] = state["kept"]
        if seen.gradient:
            if seen.ticket is None or seen.ticket < 0:
                raise ValueError(
                    "gradients can't be matched with calls in a reentrant or compiled checkpoint: "
                    "take use_reentrant=False without torch.compile, or keep no gradients"
                )
            call = kept.get(seen.ticket)
            if call is not None:
                call.grads[seen.at] = self._copy(seen.tensor, call.forms[seen.at])
        elif state["calls"] % self.every == 0 and (self.activations or seen.differentiable):
            forms = [seen.form(x) if self.channelwise else None for x in seen.tensors]
            value, nesting = None, seen.nesting()
            if self.activations:
                copies = dict(enumerate(map(self._copy, seen.tensors, forms)))
                value = tree_map(copies.get, nesting)
            record = Record(seen.epoch, state["calls"], value, None, seen.training)
            kept[record.call] = _Call(record, nesting, forms, {})
            if self.keep is not None and len(kept) > self.keep:
                del kept[next(iter(kept))]

    def compute(self, state: State) -> list[Record]:
        return [
            record._replace(grad=tree_map(grads.get, nesting)) if grads else record
            for record, nesting, _, grads in list(state["kept"].values())
        ]

    def _copy(self, x: Tensor, form: View | None) -> Tensor:
        """Return the part of a tensor that is kept."""
        if callable(self.reduce):
            x = self.reduce(x)
            if not isinstance(x, Tensor):
                raise TypeError(f"reduce must return a tensor, got {kind_of(x)}")
        elif self.reduce == "channels" and x.ndim > 1:
            if form is None:
                text = f"can't tell the channels of a tensor of shape {tuple(x.shape)}"
                raise ValueError(f"reduce='channels' {text}: give layout, 'NCHW' or 'NHWC' say")
            x = form.take(x).unsqueeze(-1).flatten(2).mean(2)
        elif self.reduce is not None and x.ndim > 1:
            rows = x.flatten(1)
            x = rows.mean(1) if self.reduce == "mean" else torch.linalg.vector_norm(rows, dim=1)
        dtype = getattr(torch, self.dtype) if self.dtype else x.dtype
        return x.to(self.device or x.device, dtype, copy=True)
