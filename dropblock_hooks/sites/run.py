"""The state that the sites of an attachment share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import distributed
from torch.utils.hooks import RemovableHandle

from ..axes.grids import Grids
from .counter import Counter, Snapshot
from .grad_scaler import LossScale


@dataclass(eq=False)
class Run:
    """The state that the sites of an attachment share."""

    root: str = ""  # the submodule at which names begin
    epochs: int | None = None  # the length of the training
    scale: LossScale = field(default_factory=LossScale)
    epoch: float = 0.0  # the time
    enabled: bool = True  # whether the regularizers act; `Attachment.paused` switches them off
    installed: bool = True  # whether the attachment has not been removed
    always: bool = False  # whether random regularizers of activations act in evaluation too
    stepped: bool = False  # whether somebody has called `Attachment.step`
    fresh: bool = True  # whether no step was made since attaching or loading: no epoch has ended
    looked: bool = False  # whether the first training forward of this window was looked at
    compiled: bool = False  # whether compiled code has called a site: not all calls are counted
    compared: bool = False  # whether the random seeds were compared with the other ranks
    counter: Counter = field(default_factory=Counter)  # of the forwards of the model
    told: set[tuple[str, str]] = field(default_factory=set)  # what was reported: site and kind
    optimizers: list[tuple[weakref.ref[Any], RemovableHandle]] = field(default_factory=list)
    grids: Grids = field(default_factory=Grids)  # the sizes of the maps behind rows of tokens
    shared: dict[str, Any] = field(default_factory=dict)  # the state that observers share

    def __getstate__(self) -> dict[str, Any]:
        told = {*self.told, (".", "not_trained")}  # an average of the weights is never trained
        return {**self.__dict__, "optimizers": [], "always": False, "told": told}

    def check_installed(self) -> None:
        if not self.installed:
            raise RuntimeError("the attachment was removed, so nothing acts: attach again")

    def drop_optimizers(self) -> None:
        for _, handle in self.optimizers:
            handle.remove()
        self.optimizers = []

    def close_window(self, sites: Iterable[Any]) -> None:
        """Close the window of the model and of all sites, and begin the next one."""
        self.counter.close_window()
        for site in sites:
            site.counter.close_window()
            if site.watch is not None:
                site.watch.close_window()
        self.looked = False


def world_size() -> int:
    """The number of processes; 0 without a process group."""
    has_group = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if has_group else 0


@dataclass(frozen=True)
class Window:
    """The calls in a window."""

    sites: Mapping[str, Snapshot]  # the counts of each site, by its key
    layers: Mapping[str, int]  # the calls of each layer with a site, by its name
    model: Snapshot  # the forwards of the model; none if it was compiled
    backward: bool = True  # False before a backward, when no gradient can be missing yet

    def has(self, *names: str) -> bool:
        """Whether the model or a site has any of these counts: ``"trained"``, say."""
        every = (self.model, *self.sites.values())
        return any(getattr(each, name) for name in names for each in every)


def windows(run: Run, hooks: Iterable[Any]) -> tuple[Window, Window]:
    """The open window of the sites of these hooks, and the one before."""
    sites = [hook.site for hook in hooks]

    def window(which: Callable[[Counter], Snapshot]) -> Window:
        counts = {site.key: which(site.counter) for site in sites}
        layers = {site.name: counts[site.key].calls for site in sites}
        return Window(counts, layers, which(run.counter))

    return window(Counter.window), window(Counter.closed)
