"""The state that the sites of an attachment share, such as the time and the switches.

``attach`` makes a `Run`. The `Attachment`, the sites and their hooks all hold it.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..axes.grids import Grids
from ..findings import Finding
from ..functional.measures import CALLS, EVALUATED, OFF, TRAINED
from .board import Board
from .counter import Counter
from .history import Recorder
from .scaler import loss_scale
from .seeds import Seeds


@dataclass(eq=False)
class Run:
    """The state that the sites of an attachment share."""

    root: str = ""  # the submodule at which names begin
    epochs: int | None = None  # the length of the training
    scaler: Any = None  # the GradScaler; False if the loss is not scaled, None if unknown
    in_float16: bool = False  # whether a bound has met a forward under autocast to float16
    epoch: float = 0.0  # the time
    enabled: bool = True  # whether the regularizers act; `Attachment.paused` switches them off
    installed: bool = True  # whether the attachment has not been removed
    always: bool = False  # whether random regularizers of activations act in evaluation too
    switched: bool = False  # whether `always`, `paused` or `enabled` was used
    stepped: bool = False  # whether `Attachment.step` was called
    fresh: bool = True  # whether `step` was not called since attaching or loading
    early: int = 0  # the training calls before the first `step`, if that was ``step(0)``
    # the finding that `step` is called after each epoch instead of before it, if there is one
    late: list[Finding] = field(default_factory=list)
    checked: bool = False  # whether the first training forward of this window was checked
    # how often each parameter, by its identity, had been written before the first training forward
    # of this window, and of the window before
    writes: dict[int, int] | None = None
    last_writes: dict[int, int] | None = None
    # whether torch.compile has traced a site: then counts wait on the boards, and calls of sites
    # that are off are not counted
    compiled: bool = False
    compiled_time: int = 0  # the time at which the calls of compiled code since the last read begin
    # the training calls at each site in the first training forward of this window, by key
    first_calls: dict[str, int] = field(default_factory=dict)
    # findings of the first training forward of this window about an axis 0 that is not the batch
    no_batch: list[Finding] = field(default_factory=list)
    seed_comparison: int | None = None  # under this number, other ranks can read the seed
    seeds_compared: bool = False  # whether the seeds of all other ranks were read
    counter: Counter = field(default_factory=Counter)  # counts the forwards of the model
    keys: tuple[str, ...] = ()  # the keys of all sites
    told: set[tuple[str, str]] = field(default_factory=set)  # reported findings: site and kind
    optimizers: list[Any] = field(default_factory=list)  # the `StepHooks` of each optimizer
    grids: Grids = field(default_factory=Grids)  # the sizes of the maps behind rows of tokens
    seeds: Seeds | None = None  # the seeds of masks, after a use of `Attachment.same_masks`
    shared: dict[str, Any] = field(default_factory=dict)  # the state that observers share
    history: Recorder = field(default_factory=Recorder)  # of the epochs that have ended
    sites: tuple[Any, ...] = ()  # all sites, in the order of the spec
    # the `ModelHook`, which removes itself from a compiled model after its checks
    model_hook: Any = None
    ticker: Any = None  # the `Ticker`, which says when a `Watchdog` looks at compiled code
    boards: dict[torch.device, Board] = field(default_factory=dict)  # the boards of compiled code

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a file. A copy may be an average of weights.

        An average is never trained, so it does not warn of that.
        """
        return {
            **self.__dict__,
            "scaler": False if self.scaler is False else None,  # a GradScaler is not saved
            "told": {*self.told, (".", "not_trained")},
            "optimizers": [],
            "writes": None,
            "last_writes": None,
            "always": False,
            "boards": {},
            "seeds": None,
            "ticker": None,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> "Run":
        copied = Run()
        memo[id(self)] = copied
        for name, value in self.__getstate__().items():
            setattr(copied, name, copy.deepcopy(value, memo))
        copied.scaler = self.scaler  # the training loop of the copy has the same GradScaler
        return copied

    def board_on(self, device: torch.device) -> Board:
        """Return the board on a device. The first call makes it."""
        if device not in self.boards:
            self.boards[device] = Board(self.sites, device)
        return self.boards[device]

    def counts_on_meta(self) -> bool:
        """Return whether compiled code counts on the meta device, where counts are unknown."""
        states = [site.observed.state for site in self.sites if site.observed is not None]
        has_board = torch.device("meta") in self.boards
        return has_board or any(state.is_meta for state in states)

    def write(self) -> None:
        """Write the present rates and switches to the boards, where compiled code reads them."""
        if not self.compiled:
            return
        for board in self.boards.values():
            board.write()
        for site in self.sites:
            if site.observed is not None:
                site.observed.write()

    def take_counts(self, only: Any = None) -> None:
        """Move counts to the counters of all sites, or of the site `only`.

        These are the calls that hooks have only counted, and the counts of compiled code.
        """
        for site in self.sites if only is None else (only,):
            site.take_skipped()
        if not self.compiled:
            return
        for board in self.boards.values():
            board.move_counts(only)
        if only is None or only.observed is not None:
            self._take_observed()  # of all observers, because they share `compiled_time`

    def was_trained(self) -> bool:
        """Return whether a site had a call in training mode, or a gradient, in the open window."""
        self.take_counts()
        return any(site.tally.was_trained for site in self.sites)

    def _take_observed(self) -> None:
        """Move the counts of compiled code for observers to their states."""
        observing = [site for site in self.sites if site.observed is not None]
        observing.sort(key=lambda site: site.layer_number)
        places = _order_of_returns([site.name for site in observing])
        times_of_step = 2 * (len(observing) + 1)  # of a forward and its backward
        calls = 0
        for site, place in zip(observing, places, strict=True):
            counted = site.observed.pop_counts(place, times_of_step, self.compiled_time)
            if counted is None:
                continue
            values = counted.values
            site.tally.trained += round(values[TRAINED])
            site.tally.evaluated += round(values[EVALUATED])
            site.tally.off += round(values[OFF])
            site.tally.active += site.watch.add_compiled(counted, site.observed.state.device)
            calls = max(calls, round(values[CALLS]))
        # one step more, because the backward of an earlier call may have been counted as well
        self.compiled_time += (calls + 1) * times_of_step

    def check_installed(self) -> None:
        """Raise RuntimeError if the attachment was removed."""
        if not self.installed:
            raise RuntimeError("the attachment was removed, so nothing acts: attach again")

    def close_window(self, sites: Iterable[Any]) -> None:
        """Close the window of the model and of all sites, and begin the next one."""
        sites = list(sites)
        self.counter.close_window()
        for site in sites:
            site.tally.close_window()
            if site.watch is not None:
                site.watch.close_window()
            if site.observed is not None:
                site.observed.begin_epoch()
        self.history.close(sites, [site.tally.closed for site in sites])
        self.checked = False
        self.last_writes = self.writes
        self.writes = None

    def loss_scale(self, device: torch.device) -> float | Tensor:
        """Return the factor of the loss, without waiting for the device."""
        return loss_scale(self.scaler, device) if self.scaler else 1.0


def _order_of_returns(names: Sequence[str]) -> list[int]:
    """Return the place of each layer in the order in which the layers return.

    A layer returns after all layers inside it. The names are in the order of the model, so a layer
    comes before the layers inside it.
    """
    prefixes = [f"{name}." if name else "" for name in names]
    last_inside = [_last_that_starts_with(prefix, prefixes) for prefix in prefixes]
    # of layers that end with the same layer, the inner one returns first
    order = sorted(range(len(names)), key=lambda i: (last_inside[i], -i))

    places = [0] * len(names)
    for place, i in enumerate(order):
        places[i] = place
    return places


def _last_that_starts_with(prefix: str, names: Sequence[str]) -> int:
    """Return the position of the last name that starts with a prefix."""
    return max(i for i, name in enumerate(names) if name.startswith(prefix))
