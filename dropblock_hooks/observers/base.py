"""The observer: an immutable description of what to measure, and the state of one site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..axes.view import View
from ..checks import check_option
from ..regularizers.base import Applied, Now, Regularizer
from ..tables import Columns


@dataclass(frozen=True, repr=False)
class Observer(Regularizer):
    """Base of the classes that measure a layer and change nothing. A subclass defines ``bind``.

    Specs treat observers like regularizers: the same selectors, keys and switches.

    Args:
        when: where an observer of activations stands among the regularizers of its layer.
            ``"after"``: it sees the activation that the next layer gets. ``"before"``: it sees the
            activation that the layer computed. An observer of gradients alone sees the gradient
            after the gradient regularizers of its layer, or (``"before"``) as it arrived.
        at, index, layout, grid, prefix_tokens, active: as for every `Regularizer`. At the
            ``"input"`` an observer sees values, but no gradients.
    """

    when: Literal["after", "before"] = field(default="after", kw_only=True)

    random: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    """Whether it sees all tensors of a nested output where `index` is None."""
    needs_tensor: ClassVar[bool] = True
    """Whether an output without any tensor is an error."""
    sees_values: ClassVar[bool] = True
    """Whether it sees activations."""
    sees_gradients: ClassVar[bool] = False
    """Whether it sees gradients."""
    keeps_graph: ClassVar[bool] = False
    """Whether the tensors that it sees are attached to the autograd graph."""
    needs_calls: ClassVar[bool] = True
    """Whether it is a fault that its layer is never called."""

    def bind(self) -> Any:
        """Return a new `Watch`: the state of one site."""
        raise NotImplementedError(f"{type(self).__name__} must define bind()")

    def apply(self, x: Tensor, now: Now) -> Applied:
        """Return the tensor unchanged."""
        return x, None

    def headings(self) -> tuple[str, Columns[Any]]:
        """Return a line above its rows in the report, and the columns of `Watch.read`'s result."""
        return "", {}

    def check(self, values: Mapping[str, float]) -> None:
        check_option("when", self.when, ("after", "before"))
        if self.at == "input" and self.sees_gradients:
            raise ValueError(
                f"{self.label} can't see gradients at at='input': observe the output of the layer "
                "before, whose gradient is the same"
            )

    def _stated(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, keyword-only fields last."""
        own_first = sorted(fields(self), key=lambda each: bool(each.kw_only))
        values = {each.name: (getattr(self, each.name), each.default) for each in own_first}
        return {name: value for name, (value, default) in values.items() if value != default}

    @property
    def kind(self) -> object:
        """What may be on a layer only once: the class, at one place."""
        return type(self), self.at, self.when, self.index


class Seen(NamedTuple):
    """One call of a layer.

    Attributes:
        tensors: the observed tensors, detached unless the observer `keeps_graph`.
        nest: puts one object for each tensor into the nested structure of the output.
        given: the floating-point tensors among the layer's arguments, where `Watch.reads_given`.
        forms: how the axes of each tensor are read, where `Watch.reads_channels`; None for a
            tensor whose channels are not known.
        training: whether the layer was in training mode.
        differentiable: whether a gradient may come to one of the tensors.
        epoch: the time.
        shared: a dict that all sites of the attachment share. Each class uses its own key.
    """

    tensors: Sequence[Tensor]
    nest: Callable[[Sequence[Any]], Any]
    given: Sequence[Tensor]
    forms: Sequence[View | None]
    training: bool
    differentiable: bool
    epoch: float
    shared: dict[str, Any]

    def channels_first(self, at: int = 0) -> Tensor | None:
        """Return a view of a tensor as (N, C, ...), or None if its channels are not known."""
        form = self.forms[at]
        return None if form is None else form.take(self.tensors[at])


class Watch:
    """The state of one site of an observer.

    Its methods always run as ordinary Python, also where torch.compile has compiled the model. They
    may run while the device is still busy, so they should not read numbers from it.

    Attributes:
        epoch: the time.
        reads_channels: whether it needs `Seen.forms`. `look` may set it.
        reads_given: whether it needs `Seen.given`. `look` may set it.
        by_call: whether each gradient must be matched with its call.
    """

    epoch: float = 0.0
    reads_channels: bool = False
    reads_given: bool = False
    by_call: ClassVar[bool] = False

    def join(self, shared: dict[str, Any]) -> None:
        """Take what all sites of the attachment share, as in `Seen`. Called once, at first."""

    def see(self, seen: Seen) -> Any:
        """Add one call of the layer, and return its number if `by_call`.

        It is not called when activation checkpointing recomputes the forward.
        """

    def see_gradient(self, grad: Tensor, at: int, scale: float | Tensor, ticket: Any) -> None:
        """Add the gradient of one tensor.

        Args:
            grad: the gradient, as autograd has it.
            at: the index of the tensor.
            scale: the factor of the loss (AMP).
            ticket: what `see` returned for this call; -1 where compiled code recomputes the call.
        """

    def look(self, module: nn.Module, parameter: str | None) -> None:
        """Look at the layer itself.

        Called after attaching, before a window closes and before a report.

        Args:
            module: the layer, or the owner of the parameter.
            parameter: the name of the parameter, for a site of a parameter.
        """

    def close_window(self) -> None:
        """Keep what was seen as the last window, and begin a new one."""

    def tensors(self) -> list[Tensor]:
        """Return what `read` needs from the device. The tensors of all sites are read at once."""
        return []

    def read(self, numbers: Mapping[int, list[float]]) -> Any:
        """Return what was seen as plain numbers, or None where nothing was.

        Args:
            numbers: the values of each of its `tensors`, by ``id``.

        Returns:
            An object with ``plus``, which merges the result of another rank, and with ``scalars``
            if it can be logged.
        """
        return None

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors by name, to be saved with the attachment."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""


def new_zeros(*shape: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros on the device of `like` that can be added to outside inference mode as well."""
    with torch.inference_mode(False):
        return torch.zeros(*shape, dtype=dtype, device=like.device)
