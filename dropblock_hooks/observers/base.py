"""The observer: an immutable description of what to see at a layer, and what one site has seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..checks import check_option
from ..functional import axes
from ..regularizers.base import Applied, Now, Regularizer
from ..tables import Columns


@dataclass(frozen=True, repr=False)
class Observer(Regularizer):
    """Base of what watches a layer and changes nothing. A subclass has fields and ``bind``.

    It stands in a spec as a regularizer does: the same selectors, keys and switches.

    Args:
        when: ``"after"`` the regularizers of its layer: it sees the activation that the next layer
            gets, and the gradient that this one gets. ``"before"``: the activation that the layer
            made, and the gradient as it arrived.
        at, index, layout, grid, prefix_tokens, active: as of every `Regularizer`.
    """

    when: Literal["after", "before"] = field(default="after", kw_only=True)

    random: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    """Whether it sees all tensors that the layer gives, however nested, where `index` is None."""
    needs_tensor: ClassVar[bool] = True
    """Whether it is an error that a layer gives no tensor at all."""
    sees_values: ClassVar[bool] = True
    """Whether it looks at what the layer gives."""
    sees_gradients: ClassVar[bool] = False
    """Whether it looks at the gradients that come back to it."""
    keeps_graph: ClassVar[bool] = False
    """Whether the tensors that it sees are those of the graph."""
    sees_given: ClassVar[bool] = False
    """Whether it looks at what the layer is called with as well, and what gradient goes there."""
    needs_calls: ClassVar[bool] = True
    """Whether it is a fault that its layer is never called."""

    def bind(self) -> Any:
        """A `Watch`: what one site has seen. It is asked for once for each site."""
        raise NotImplementedError(f"{type(self).__name__} must define bind()")

    def apply(self, x: Tensor, now: Now) -> Applied:
        """It changes nothing."""
        return x, None

    def headings(self) -> tuple[str, Columns[Any]]:
        """A line above its rows in the report, and the columns of what `Watch.read` gives."""
        return "", {}

    def check(self, values: Mapping[str, float]) -> None:
        check_option("when", self.when, ("after", "before"))

    def _stated(self) -> dict[str, Any]:
        """What a repr says: the fields that are not as usual, keywords last."""
        own_first = sorted(fields(self), key=lambda each: bool(each.kw_only))
        values = {each.name: (getattr(self, each.name), each.default) for each in own_first}
        return {name: value for name, (value, default) in values.items() if value != default}

    @property
    def kind(self) -> object:
        """What may be on a layer once: the class, at one place."""
        return type(self), self.at, self.when, self.index


class ChannelsFirst(Protocol):
    """See `Seen`."""

    def __call__(self, x: Tensor) -> Tensor | None: ...

    def form(self, x: Tensor) -> axes.Form | None:
        """How the axes of a tensor are read; None where its channels are not known."""


class Seen(NamedTuple):
    """One call of a layer.

    Attributes:
        module: the layer.
        tensors: what is watched, one tensor or several.
        nest: nests others, one for each of them, as the layer has nested these.
        given: what the layer was called with.
        training: its mode.
        epoch: the time.
        channels_first: a tensor as (N, C, ...), or None where its channels are not known; its
            method ``form`` tells how the axes are read.
        shared: what all sites of the Attachment share; each class keeps its own under its name.
    """

    module: nn.Module
    tensors: Sequence[Tensor]
    nest: Callable[[Sequence[Any]], Any]
    given: tuple[Any, ...]
    training: bool
    epoch: float
    channels_first: ChannelsFirst
    shared: dict[str, Any]


class Watch:
    """What one site has seen. Base of the state that an observer binds.

    In code that torch.compile traces (``torch.compiler.is_compiling()``), ``see`` and
    ``see_gradient`` may add into tensors in place, and must write no attribute, read no number, and
    not branch on one. The tensors are allocated before, when it is made or moved.

    Attributes:
        epoch: the time; code that is traced must not read it.
    """

    epoch: float = 0.0

    def join(self, shared: dict[str, Any]) -> None:
        """It is made: `shared` is what all sites of the Attachment share, as in `Seen`."""

    def give(self, tensors: Sequence[Tensor]) -> None:
        """A call of the layer begins, with these tensors; of an observer that `sees_given`."""

    def see(self, seen: Seen) -> Any:
        """A call of the layer. What is returned is given to `see_gradient`; tensors in it are of no
        graph. Not called again where a checkpoint repeats the call.
        """

    def see_gradient(self, grad: Tensor, at: int, scale: float | Tensor, ticket: Any) -> None:
        """The gradient of one of the tensors has come.

        Args:
            grad: the gradient, as autograd has it.
            at: which of the tensors.
            scale: what the loss was multiplied by (AMP).
            ticket: what `see` has returned for this call; None where that is not known.
        """

    def look(self, module: nn.Module, parameter: str | None) -> None:
        """Look at the layer itself: when it is attached, before a window closes, and before it is
        read.

        Args:
            module: the layer, or the owner of the parameter.
            parameter: its name, of a site that is for one.
        """

    def see_handed(self, grad: Tensor) -> None:
        """The gradient that the layer hands on to one of the tensors that it was given."""

    def to(self, device: torch.device) -> None:
        """Follow the activations to their device."""

    def close_window(self) -> None:
        """The whole part of the epoch changes: begin anew, and keep what was seen before."""

    def tensors(self) -> list[Tensor]:
        """What `read` needs of the device: it is read at once for all sites."""
        return []

    def read(self, numbers: Mapping[int, list[float]]) -> Any:
        """What was seen, as plain numbers: an object with ``plus``, which adds that of another
        rank, and with ``scalars`` where there is something to log; None where nothing was.

        Args:
            numbers: of each of its `tensors`, by identity.
        """
        return None

    def state_dict(self) -> dict[str, Tensor]:
        """What is saved with the Attachment: tensors by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what was saved."""
