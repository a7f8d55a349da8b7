"""`Site`: the public interface to a site.

An `Attachment` returns a `Site` in place of the `LiveSite`.
"""

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
        """The name of the site in the Attachment, such as ``layer4.0/DropBlock2d``."""
        return self._live.key

    @property
    def name(self) -> str:
        """The name of the layer or parameter in the model without wrappers."""
        return self._live.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names of a shared module."""
        return self._live.aliases

    @property
    def module_type(self) -> str:
        """The class name of the layer."""
        return self._live.module_type

    @property
    def at(self) -> str:
        """``"output"`` or ``"input"`` of a layer, or another target, such as ``"parameter"``."""
        return self._live.at

    @property
    def regularizer(self) -> Regularizer:
        """The regularizer or observer."""
        return self._live.regularizer

    @property
    def rate(self) -> float | None:
        """The present value of the first rate; None without rates."""
        return self._live.rate

    @property
    def layout(self) -> str | None:
        """The axes of the last tensor, such as ``"NHWC"``; None before the first eager call."""
        return self._live.layout

    @property
    def map_size(self) -> tuple[int, ...] | None:
        """The spatial size of the last tensor; None without a map."""
        return self._live.map_size

    @property
    def block_size(self) -> tuple[int, ...] | None:
        """The size of the blocks on the last map, clipped to the map; None without blocks."""
        return self._live.block_size

    @property
    def calls(self) -> int:
        """Forward calls of the layer since attaching.

        Compiled code counts the calls in training mode, and others only if the site acts in them.
        The calls before a loaded state are included.
        """
        return self._live.calls

    @property
    def active_calls(self) -> int:
        """Calls in which the site was on; for regularizers of gradients, the gradients it saw."""
        return self._live.active_calls

    @property
    def realized_rate(self) -> float | None:
        """The share of the elements that were dropped or changed since the epoch began.

        The window of an epoch closes when the whole part of the time changes. While a new window is
        empty, the rate of the last window is shown. After attaching, `Attachment.set` or loading a
        state, an empty window shows None. Reading the rate waits for the device.
        """
        return self._live.counter.read().shown().share()

    @property
    def expected_rate(self) -> float | None:
        """The mean nominal rate over the elements of the window of `realized_rate`.

        Compare both only if the rate is the share of the elements that are dropped.
        """
        shown = self._live.counter.read().shown()
        return shown.expected / shown.total if shown.total else None

    @property
    def total_realized_rate(self) -> float | None:
        """The share of the elements that were dropped or changed since attaching.

        The elements before a loaded state are included.
        """
        return self._live.counter.read().life().share()

    @property
    def norms(self) -> Norms | None:
        """How large gradients or penalties were, in the same window; None without any.

        `ClipGradNorm` has the norms of gradients, samples or channels before the bound. `ClampGrad`
        has the largest magnitude of each gradient. Penalties have their values.
        """
        norms = self._live.counter.read().shown().norms
        return norms if norms.count else None
