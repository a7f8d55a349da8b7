"""The sites of an Attachment as a collection: in order, by key, by selector."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..regularizers.base import Regularizer
from ..selectors.select import Select
from ..sites.hooks import SiteHook
from ..sites.record import Record
from ..sites.shared import Control
from ..sites.site import Site
from .find import find


class SiteList:
    """What is installed on a model, site by site."""

    def __init__(
        self, base: nn.Module, control: Control, installed: list[tuple[nn.Module, SiteHook]]
    ) -> None:
        self._base = base
        self._control = control
        self._installed = installed

    @property
    def _hooks(self) -> list[SiteHook]:
        return [hook for _, hook in self._installed]

    @property
    def _records(self) -> list[Record]:
        """Of the model's forwards, and of each site."""
        return [self._control.record, *(site.record for site in self.sites)]

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites, in the order of the spec."""
        return tuple(hook.site for _, hook in self._installed)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self._installed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SiteList) and self._control is other._control

    def __hash__(self) -> int:
        return hash(id(self._control))

    def __getitem__(self, which: str | Select | type[Regularizer]) -> Site | tuple[Site, ...]:
        """One site by its key; a tuple of sites by a selector, or by a class of regularizers.

        Raises:
            KeyError: for what is neither, with the reason or the closest keys.
        """
        meant = find(which, self._base, self._hooks)
        return meant[0] if meant[0].key == which else meant
