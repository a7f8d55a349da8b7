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
from ..registry import register, store
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
    """A call that is kept.

    Attributes:
        record: the call, without gradients.
        nesting: the structure of the output, with indices in place of tensors.
        views: the axes of each tensor, by which gradients are reduced as the values are.
        grads: the gradients that have come, by index.
    """

    record: Record
    nesting: Any
    views: list[View | None]
    grads: dict[int, Tensor]

    def with_gradients(self) -> Record:
        """Return the record of the call, with the gradients that have come."""
        if not self.grads:
            return self.record
        return self.record._replace(grad=tree_map(self.grads.get, self.nesting))


@register
class Capture(Observer):
    """Keeps the last activations of a layer, and their gradients: read ``attached.captured()``.

    It keeps copies, so later in-place operations do not change them. Every call of the layer counts
    except calls that activation checkpointing recomputes. Use it in a training; `capture` makes a
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
        reduce: keep less of each tensor. ``"mean"`` and ``"norm"`` reduce all axes but the first.
            ``"channels"`` keeps the mean of each channel, a tensor (N, C). A function of the tensor
            keeps its result, but can't be written to a file.
        device: the device of the kept tensors; None moves no tensor.
        dtype: the type of the kept tensors, such as ``"float16"``; None keeps their type.
        detach: False keeps the autograd graph of the values, which compiled code refuses.
        at: observe the layer's ``"output"`` or its ``"input"``, where no gradients are seen.
            At the input, without `index`, the value is ``(arguments, keywords)``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: see the activation ``"after"`` the regularizers of the layer, or ``"before"`` them. An
            observer of gradients alone sees them after, or before, the gradient regularizers.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type; in a call, if `reduce`
            returns no tensor.
        ValueError: if a value is not allowed, or nothing is kept; in a call, if the
            channels are unknown.
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

    whole: ClassVar[bool] = True  # it gets all tensors of a nested output
    by_epoch: ClassVar[bool] = False  # the records outlive the epoch, and are not in the report

    def __post_init__(self) -> None:
        super().__post_init__()
        # store names, because a spec file can't hold objects of torch
        if self.device is not None:
            store(self, device=_name_of_device(self.device))
        if self.dtype is not None:
            name = str(self.dtype).removeprefix("torch.")
            check_option("dtype", name, _TYPES)
            store(self, dtype=name)

    @property
    def sees_gradients(self) -> bool:  # type: ignore[override]  # objects of a class may differ
        return self.gradients

    @property
    def keeps_graph(self) -> bool:  # type: ignore[override]
        return not self.detach

    @property
    def channelwise(self) -> bool:  # type: ignore[override]
        return self.reduce == "channels"

    def check(self, values: Mapping[str, float]) -> None:
        super().check(values)
        as_count("every", self.every)
        if self.keep is not None:
            as_count("keep", self.keep)
        if not callable(self.reduce):
            check_option("reduce", self.reduce, (None, "mean", "norm", "channels"))
        if not (self.gradients or self.activations):
            raise ValueError("activations=False keeps nothing without gradients=True")

    def start(self) -> State:
        return {"kept": Unsaved()}

    def update(self, state: State, seen: Seen) -> None:
        calls: dict[int, _Call] = state["kept"]
        if seen.gradient:
            self._keep_gradient(calls, seen)
            return

        is_due = state["calls"] % self.every == 0
        # without activations, a call that gets no gradient has nothing to keep
        if is_due and (self.activations or seen.differentiable):
            self._keep_call(calls, state["calls"], seen)

    def _keep_call(self, calls: dict[int, _Call], number: int, seen: Seen) -> None:
        """Keep a call of the layer, and remove the oldest one if there are too many."""
        if self.channelwise:
            views = [seen.view(x) for x in seen.tensors]
        else:
            views = [None] * len(seen.tensors)

        nesting = seen.nesting()
        value = None
        if self.activations:
            copies = map(self._copy, seen.tensors, views)
            by_index = dict(enumerate(copies))
            value = tree_map(by_index.get, nesting)

        record = Record(seen.epoch, number, value, None, seen.training)
        calls[number] = _Call(record, nesting, views, {})
        if self.keep is not None and len(calls) > self.keep:
            oldest = next(iter(calls))
            del calls[oldest]

    def _keep_gradient(self, calls: dict[int, _Call], seen: Seen) -> None:
        """Keep a gradient with its call, if the call is kept."""
        # a checkpoint has recomputed the call, see `Seen.ticket`
        if seen.ticket is None or seen.ticket < 0:
            raise ValueError(
                "gradients can't be matched with calls in a reentrant or compiled checkpoint: "
                "take use_reentrant=False without torch.compile, or keep no gradients"
            )
        call = calls.get(seen.ticket)
        if call is not None:
            call.grads[seen.at] = self._copy(seen.tensor, call.views[seen.at])

    def compute(self, state: State) -> list[Record]:
        calls: list[_Call] = list(state["kept"].values())
        return [call.with_gradients() for call in calls]

    def _copy(self, x: Tensor, view: View | None) -> Tensor:
        """Return the part of a tensor that is kept."""
        reduced = self._reduced(x, view)
        device = self.device or reduced.device
        dtype = getattr(torch, self.dtype) if self.dtype else reduced.dtype
        return reduced.to(device, dtype, copy=True)

    def _reduced(self, x: Tensor, view: View | None) -> Tensor:
        """Return the reduced tensor, by the option `reduce`, or `x` itself."""
        if callable(self.reduce):
            result = self.reduce(x)
            if not isinstance(result, Tensor):
                raise TypeError(f"reduce must return a tensor, got {kind_of(result)}")
            return result

        has_only_samples = x.ndim <= 1  # no reduction touches axis 0
        if self.reduce is None or has_only_samples:
            return x

        if self.reduce == "channels":
            if view is None:
                raise ValueError(
                    f"reduce='channels' can't tell the channels of a tensor of shape "
                    f"{tuple(x.shape)}: give layout, 'NCHW' or 'NHWC' say"
                )
            maps = view.to_maps(x)
            positions = maps.unsqueeze(-1).flatten(2)  # (N, C) has one position
            return positions.mean(2)

        rows = x.flatten(1)
        if self.reduce == "mean":
            return rows.mean(1)
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms


def _name_of_device(device: Any) -> str:
    try:
        return str(torch.device(device))
    except (RuntimeError, TypeError):
        text = f"device must be one of torch's, such as 'cpu', got {quote(device)}"
        raise ValueError(text) from None
