"""What the sites of one Attachment share: the time, the switches, the loss scale."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..axes.grids import Grids
from ..functional.masks import wide_dtype
from .counter import Counter


class Control:
    """What the sites of one Attachment share: the time and the switches.

    Attributes:
        root: where names begin in the model.
        epoch: the time.
        always: whether what is random acts in evaluation too.
        stepped: whether anybody has called `Attachment.step`.
        fresh: whether nobody has since attaching or loading: no epoch has ended then.
        warned: whether it was told that nobody calls it.
        counter: the forwards of the model.
        looked: whether a training forward was looked at in this window.
        was_off: whether the regularizers were switched off at any time in this window.
        idled: whether a training forward met them switched off in this window.
        idled_before: the same of the window before.
        told: what was told already: keys of sites, each with a kind of fault.
        compared: whether the random states of ranks were compared.
        grad_scaler: what scales the loss; False where nothing does, None where nobody said.
        expects_scaler: whether one was given, which a loaded model has lost.
        scaler_sought: whether one was given, ruled out, or looked for.
        misses_scaler: whether a GradScaler was found that nobody gave us.
        epochs: how long the training is, if that was said.
        optimizers: those of the training loop, held weakly, each with what takes our hook off it.
        shared: what the sites of observers share, each class under its name.
    """

    def __init__(self, root: str = "", grad_scaler: Any = None, epochs: int | None = None) -> None:
        self.root = root
        self.epochs = epochs
        self.epoch = 0.0
        self.enabled = True
        self.installed = True
        self.always = False
        self.stepped = False
        self.fresh = True
        self.warned = False
        self.counter = Counter()
        self.looked = False
        self.was_off = self.idled = self.idled_before = False
        self.told: set[tuple[str, str]] = set()
        self.compared = False
        self.keys: tuple[str, ...] = ()
        self.use_scaler(grad_scaler)
        self.optimizers: list[tuple[weakref.ref[Any], RemovableHandle]] = []
        self.grids = Grids()
        self.shared: dict[str, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Control:
        copied = Control.__new__(Control)
        copied.__dict__.update(self.__dict__)  # the scaler stays the one of the training loop
        memo[id(self)] = copied  # which what was met leads back to
        copied.always = False  # nobody would end it
        copied.optimizers = []  # they update the original
        copied.counter, copied.told = copy.deepcopy(self.counter, memo), set(self.told)
        copied.grids = copy.deepcopy(self.grids, memo)
        copied.shared = copy.deepcopy(self.shared, memo)
        copied.told.add((".", "not_trained"))  # an average of the weights is never trained
        return copied

    def __getstate__(self) -> dict[str, Any]:
        told_none = self.grad_scaler is False  # a scaler is of the training loop
        of_loop = {
            "grad_scaler": False if told_none else None,
            "scaler_sought": told_none,
            "misses_scaler": False,
        }
        return {**self.__dict__, **of_loop, "optimizers": [], "always": False}

    def use_scaler(self, scaler: Any) -> None:
        """Take the GradScaler; False says that there is none, None says nothing."""
        self.grad_scaler = scaler
        self.expects_scaler = scaler is not None and scaler is not False
        self.scaler_sought, self.misses_scaler = scaler is not None, False

    def drop_optimizers(self) -> None:
        """Take our hooks off the optimizers."""
        for _, handle in self.optimizers:
            handle.remove()
        self.optimizers = []

    def switch(self, on: bool) -> None:
        """Switch the regularizers on or off."""
        self.enabled = on
        self.was_off |= not on

    @contextmanager
    def acting_always(self) -> Iterator[None]:
        """What is random acts in evaluation too within a ``with`` block."""
        before, self.always = self.always, True
        try:
            yield
        finally:
            self.always = before

    def open_window(self) -> None:
        """Begin a new window; its first training forward will be looked at."""
        self.looked = False
        self.idled_before, self.idled, self.was_off = self.idled, False, not self.enabled

    def grad_scale(self, device: torch.device) -> float | Tensor:
        """What the loss is multiplied by, read without waiting for the device."""
        scaler = self.grad_scaler
        if scaler is None or scaler is False or not is_enabled(scaler):
            return 1.0
        # torch.compile refuses the methods of torch's scaler, and a number would be compiled in
        scale = getattr(scaler, "_scale", None)
        if isinstance(scale, Tensor):
            # wide, so that bound * scale fits; a copy, since the scaler changes its own in place
            return scale.to(device, wide_dtype(device), copy=True, non_blocking=True)
        initial = getattr(scaler, "_init_scale", None)
        return float(scaler.get_scale() if initial is None else initial)


def is_enabled(scaler: Any) -> bool:
    """Whether a GradScaler is switched on."""
    enabled = getattr(scaler, "_enabled", None)
    return bool(getattr(scaler, "is_enabled", lambda: True)() if enabled is None else enabled)
