"""The state that the sites of an attachment share: time, switches, loss scale; and windows."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed

from .._torch import scale_tensor
from ..axes.grids import Grids
from ..findings import Finding
from ..functional.masks import wide_dtype
from .board import Board
from .counter import Counter, Snapshot

_WRAPPED = ("_scaler", "scaler", "grad_scaler", "_precision", "precision_plugin", "accelerator")
"""Where timm's NativeScaler, Lightning's precision plugins and trainers, accelerate's Accelerator
and optimizers, Fabric and Transformers' Trainer keep theirs."""


def checked_scaler(given: Any) -> Any:
    """The scaler (an object with ``get_scale``) that is given or inside; False or None without."""
    if given is False or given is None or callable(getattr(given, "get_scale", None)):
        return given
    for name in _WRAPPED:
        if hasattr(given, name):
            return checked_scaler(getattr(given, name))
    raise TypeError(
        f"grad_scaler must have get_scale(), got {type(given).__name__}: give the GradScaler "
        "itself, or an object that holds it as .scaler; or False, if the loss is not scaled"
    )


def is_enabled(scaler: Any) -> bool:
    return bool(getattr(scaler, "is_enabled", lambda: True)())


def as_factor(scale: Any, device: torch.device) -> float | Tensor:
    """The scale of a loss for gradients on a device; None is 1."""
    if isinstance(scale, Tensor):
        # wide, so that bound * scale fits; a copy, since the scaler changes its own in place
        return scale.to(device, wide_dtype(device), copy=True, non_blocking=True).reshape(())
    return 1.0 if scale is None else float(scale)


@dataclass(eq=False)
class Run:
    """The state that the sites of an attachment share."""

    root: str = ""  # the submodule at which names begin
    epochs: int | None = None  # the length of the training
    scaler: Any = None  # the GradScaler; False if the loss is not scaled, None if nobody has said
    in_float16: bool = False  # whether the first forward of this window ran under float16 autocast
    epoch: float = 0.0  # the time
    enabled: bool = True  # whether the regularizers act; `Attachment.paused` switches them off
    installed: bool = True  # whether the attachment has not been removed
    always: bool = False  # whether random regularizers of activations act in evaluation too
    switched: bool = False  # whether somebody has used `always`, `paused` or `enabled`
    stepped: bool = False  # whether somebody has called `Attachment.step`
    fresh: bool = True  # whether no step was made since attaching or loading: no epoch has ended
    looked: bool = False  # whether the first training forward of this window was looked at
    compiled: bool = False  # whether compiled code has called a site: not all calls are counted
    compiled_time: int = 0  # the times of calls in compiled code begin here
    first_calls: dict[str, int] = field(default_factory=dict)  # in the first forward, by site
    no_batch: list[Finding] = field(default_factory=list)  # of the first forward of this window
    comparison: int | None = None  # its number, once the other ranks can read the random seed
    compared: bool = False  # whether it was compared with those of all other ranks
    counter: Counter = field(default_factory=Counter)  # of the forwards of the model
    keys: tuple[str, ...] = ()  # of all sites
    told: set[tuple[str, str]] = field(default_factory=set)  # reported findings: site and kind
    optimizers: list[Any] = field(default_factory=list)  # the `StepHooks` of each
    grids: Grids = field(default_factory=Grids)  # the sizes of the maps behind rows of tokens
    shared: dict[str, Any] = field(default_factory=dict)  # the state that observers share
    sites: tuple[Any, ...] = ()  # all sites, in the order of the spec
    model_hook: Any = None  # the hook of the model, which leaves a compiled model
    ticker: Any = None  # the clock of a Watchdog whose model is compiled with its hooks
    boards: dict[torch.device, Board] = field(default_factory=dict)  # once there is compiled code

    def __getstate__(self) -> dict[str, Any]:
        scaler = False if self.scaler is False else None  # a GradScaler is not saved
        told = {*self.told, (".", "not_trained")}  # an average of the weights is never trained
        own: dict[str, Any] = {"scaler": scaler, "optimizers": [], "always": False, "boards": {}}
        own["ticker"] = None
        return {**self.__dict__, **own, "told": told}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Run":
        copied = memo[id(self)] = Run()
        # the copy is trained with the GradScaler of the training loop
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo), scaler=self.scaler)
        return copied

    def board_on(self, device: torch.device) -> Board:
        """The board on a device, which is made for the first compiled code there."""
        if device not in self.boards:
            self.boards[device] = Board(self.sites, device)
        return self.boards[device]

    def counts_on_meta(self) -> bool:
        """Whether compiled code counts in tensors without numbers, so that calls are not known."""
        observed = [site.observed for site in self.sites if site.observed is not None]
        return torch.device("meta") in self.boards or any(each.state.is_meta for each in observed)

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
        """Move what compiled code has counted to the counters of all sites, or of one."""
        if not self.compiled:
            return
        for board in self.boards.values():
            board.take(only)
        if only is None or only.observed is not None:
            self._take_observed()

    def _take_observed(self) -> None:
        """Move what compiled code has counted for observers to their states."""
        observing = [site for site in self.sites if site.observed is not None]
        places = _order_of_returns([site.name for site in observing])
        calls = 0
        for site, place in zip(observing, places, strict=True):
            counted = site.observed.take(place, len(observing), self.compiled_time)
            if counted is None:
                continue
            _, _, trained, evaluated, off, seen, *_ = counted.values
            site.tally.trained += round(trained)
            site.tally.evaluated += round(evaluated)
            site.tally.off += round(off)
            site.tally.active += site.watch.take(counted, site.observed.state.device)
            calls = max(calls, round(seen))
        self.compiled_time += (calls + 1) * 2 * (len(observing) + 1)

    def check_installed(self) -> None:
        if not self.installed:
            raise RuntimeError("the attachment was removed, so nothing acts: attach again")

    def close_window(self, sites: Iterable[Any]) -> None:
        """Close the window of the model and of all sites, and begin the next one."""
        self.counter.close_window()
        for site in sites:
            site.tally.close_window()
            if site.watch is not None:
                site.watch.close_window()
        self.looked = False

    def loss_scale(self, device: torch.device) -> float | Tensor:
        """Return the number that the loss is multiplied by, without waiting for the device."""
        if not self.scaler or not is_enabled(self.scaler):
            return 1.0
        scale = scale_tensor(self.scaler)
        return as_factor(self.scaler.get_scale() if scale is None else scale, device)


def _order_of_returns(names: Sequence[str]) -> list[int]:
    """The place of each layer in the order in which layers return: those inside one before it.

    The names are in the order of ``named_modules``, in which a layer comes before those inside it.
    """
    inside = [f"{name}." if name else "" for name in names]
    last = [max(j for j, other in enumerate(inside) if other.startswith(own)) for own in inside]
    order = sorted(range(len(names)), key=lambda i: (last[i], -i))
    places = [0] * len(names)
    for place, i in enumerate(order):
        places[i] = place
    return places


def world_size() -> int:
    has_group = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if has_group else 0


def gathered(local: Any) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks."""
    if not world_size():
        raise RuntimeError(
            "distributed=True needs a process group: call torch.distributed.init_process_group "
            "first, or leave distributed= out"
        )
    objects: list[Any] = [None] * world_size()
    distributed.all_gather_object(objects, local)
    return objects


@dataclass(frozen=True)
class Window:
    sites: Mapping[str, Snapshot]  # the counts of each site, by its key
    model: Snapshot  # the forwards of the model; none if it was compiled
    backward: bool = True  # False before a backward, when no gradient can be missing yet

    def has(self, *names: str) -> bool:
        """Whether the model or a site has any of these counts: ``"trained"``, say."""
        every = (self.model, *self.sites.values())
        return any(getattr(each, name) for name in names for each in every)


def windows(run: Run, hooks: Iterable[Any]) -> tuple[Window, Window]:
    """The open window, and the one that closed last."""
    run.take_counts()
    counters = {hook.site.key: hook.site.tally for hook in hooks}
    opened = {key: counter.window() for key, counter in counters.items()}
    closed = {key: counter.closed for key, counter in counters.items()}
    return Window(opened, run.counter.window()), Window(closed, run.counter.closed)
