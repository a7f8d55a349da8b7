"""Base of regularizers that remember the norms of earlier updates.

At the step of the optimizer, ``sites.memories`` calls `WithMemory.judge`. The `Memory` of a site
keeps its row of numbers until the next step.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..functional.masks import wide_dtype
from ..functional.memory import Remembered, check_average, new_memory
from .base import Applied, Now
from .gradients import _OfParameters


@dataclass(frozen=True, repr=False)
class WithMemory(_OfParameters):
    """Base of regularizers that compare the norms of an update with the norms of earlier updates.

    The norms of all gradients of an entry are judged together, when the optimizer begins its step.

    Args:
        when: ``"accumulated"``; no other value is allowed.
        group: True takes one norm over all parameters of the entry, with one memory.
        decay: weight of the old values in a moving average, in [0, 1).
        warmup: number of the first updates, at least 1. Their bounds do not follow the average.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.
    """

    when: Literal["accumulated"] = field(default="accumulated", kw_only=True)
    group: bool = field(default=False, kw_only=True)
    decay: float = field(default=0.98, kw_only=True)
    warmup: int = field(default=100, kw_only=True)

    reads_grad_scale: ClassVar[bool] = True
    parts: ClassVar[Literal["", "rows", "any"]] = "any"
    clips: ClassVar[bool] = True  # False if it decides only whether there is an update
    # the function of `functional.memory`; its name tells `new_memory` the length of a row
    function: ClassVar[Callable[..., Remembered]]

    @abstractmethod
    def judge(self, norms: Tensor, memory: Tensor, now: Now) -> Remembered:
        """Return the bounds of the norms, or which updates to skip; and the new memory.

        All norms are in units of the unscaled loss.
        """

    def bind(self) -> "Memory":
        return Memory(self.function.__name__)

    def check_average(self) -> None:
        """Check the options of the moving average."""
        check_average(self.decay, self.warmup)


class Memory:
    """The numbers that a site remembers of the norms of earlier updates.

    With `group`, all sites of an entry hold the same numbers. Otherwise the numbers of these sites
    are rows of one tensor, so that an update needs no operator for each site.

    Attributes:
        rows: the numbers of several sites, see `functional.memory`; None before the first update.
        place: the row of this site.
        shape: the shape of the parameter.
    """

    def __init__(self, function: str) -> None:
        self.function = function
        self.rows: Tensor | None = None
        self.place = 0
        self.shape: tuple[int, ...] | None = None

    def __call__(self, x: Tensor, now: Now) -> Applied:
        raise TypeError("it acts at the steps of the optimizer: pass attach(..., optimizer=...)")

    @property
    def row(self) -> Tensor | None:
        """The numbers of this site; None before the first update."""
        return None if self.rows is None else self.rows[self.place]

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Store the shape of the parameter.

        Raises:
            ValueError: if the shape differs from the stored shape.
        """
        if self.shape is not None and self.shape != shape:
            raise ValueError(
                f"the parameter has the shape {shape}, and the memory belongs to the shape "
                f"{self.shape}: attach again, which begins a new memory"
            )
        self.shape = shape

    def read(self, device: torch.device) -> Tensor:
        """Return the row of the memory on a device."""
        row = self.row
        if row is None:
            rows = new_memory(self.function, 1, device)
            return rows[0]
        return row.to(device, wide_dtype(device))

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, which some trainers save as JSON; this waits for the device."""
        row = self.row
        shape = self.shape
        return {
            "row": None if row is None else row.tolist(),
            "shape": None if shape is None else list(shape),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, as a tensor with one row."""
        self.rows = None
        self.place = 0
        if state["row"] is not None:
            self.rows = torch.tensor([state["row"]], dtype=torch.float64)

        self.shape = None
        if state["shape"] is not None:
            self.shape = tuple(state["shape"])

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self.row is not None:
            # a copy takes no rows of other sites along
            state["rows"] = self.row.clone().unsqueeze(0)
        state["place"] = 0
        return state


def rows_of(memories: Sequence[Memory], device: torch.device) -> Tensor:
    """Return the rows of several memories on a device, as one tensor.

    If the last update was one of the same memories, they hold this tensor already.
    """
    rows = memories[0].rows
    if rows is not None and rows.device == device and _are_rows_of(rows, memories):
        return rows

    copies = [memory.read(device) for memory in memories]
    return torch.stack(copies)


def _are_rows_of(rows: Tensor, memories: Sequence[Memory]) -> bool:
    """Return whether a tensor has the rows of these memories, in their order, and no others."""
    if len(rows) != len(memories):
        return False
    for place, memory in enumerate(memories):
        if memory.rows is not rows or memory.place != place:
            return False
    return True
