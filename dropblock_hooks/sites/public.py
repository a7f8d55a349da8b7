"""`Site`: what a user reads of a site."""

from __future__ import annotations

from ..regularizers.base import Regularizer
from .counter import Norms
from .site import LiveSite


class Site:
    """One regularizer on one layer.

    Example:
        >>> model = nn.Sequential(nn.ReLU())
        >>> site = attach(model, {"0": Dropout(0.5)})["0/Dropout"]
        >>> y = model(torch.ones(8, 1000))
        >>> site.calls, round(site.realized_rate, 1)
        (1, 0.5)
    """

    def __init__(self, live: LiveSite) -> None:
        self._live = live

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Site) and other._live is self._live

    def __hash__(self) -> int:
        return hash(self._live)

    def __repr__(self) -> str:
        return f"Site({self.key!r}, {self.regularizer!r})"

    @property
    def key(self) -> str:
        """Its name in the Attachment: ``layer4.0/DropBlock2d``."""
        return self._live.key

    @property
    def name(self) -> str:
        """The layer (or parameter), as the bare model names it."""
        return self._live.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names of the same, shared, module."""
        return self._live.aliases

    @property
    def module_type(self) -> str:
        """Class name of the layer."""
        return self._live.module_type

    @property
    def at(self) -> str:
        """``"output"`` or ``"input"``; of no layer ``"parameter"`` or ``"attribute"``."""
        return self._live.at

    @property
    def regularizer(self) -> Regularizer:
        """The regularizer or observer."""
        return self._live.regularizer

    @property
    def rate(self) -> float | None:
        """The first of the rates now; None without rates."""
        return self._live.rate

    @property
    def layout(self) -> str | None:
        """The axes of the last tensor, ``"NHWC"`` say; None before the first eager call."""
        return self._live.layout

    @property
    def map_size(self) -> tuple[int, ...] | None:
        """Spatial size of the last tensor; None without a map."""
        return self._live.map_size

    @property
    def block_size(self) -> tuple[int, ...] | None:
        """The block in force on that map, clipped to it."""
        return self._live.block_size

    @property
    def calls(self) -> int:
        """Forward calls of the layer since attaching; in compiled code, those in which it acts."""
        return self._live.calls

    @property
    def active_calls(self) -> int:
        """Calls in which it was on; of a gradient regularizer, the gradients that it has seen."""
        return self._live.active_calls

    @property
    def realized_rate(self) -> float | None:
        """Share of the elements dropped or changed since the epoch began.

        The window closes when the whole part of the epoch changes; an empty window shows the one
        that closed then. Attaching, `Attachment.set` and loading a state begin one that shows
        nothing. Reading it waits for the device.
        """
        return self._live.counter.read().shown().share()

    @property
    def expected_rate(self) -> float | None:
        """The mean nominal rate over the same window as `realized_rate`."""
        shown = self._live.counter.read().shown()
        return shown.expected / shown.total if shown.total else None

    @property
    def total_realized_rate(self) -> float | None:
        """The same as `realized_rate`, since attaching."""
        return self._live.counter.read().life().share()

    @property
    def norms(self) -> Norms | None:
        """The norms of gradients before the bound, over the same window; None without norms."""
        norms = self._live.counter.read().shown().norms
        return norms if norms.count else None
