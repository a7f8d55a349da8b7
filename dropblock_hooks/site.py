"""A site: one regularizer on one layer, its state and what it has counted."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import layouts
from .regularizer import Now, Regularizer

_CALLS_WITHOUT_STEP = 1000


class SiteError(ValueError):
    """A regularizer met a tensor that it can't work on; the message names the site."""


class HookWarning(UserWarning):
    """Something about attached regularizers that is likely not what was meant."""


class Control:
    """What the sites of one Attachment share: the time and the switches."""

    def __init__(self, root: str = "", grad_scaler: Any = None) -> None:
        self.root = root
        self.epoch = 0.0
        self.enabled = True
        self.installed = True
        self.stepped = False
        self.warned = False
        self.forwards = 0
        self.compiled = False
        self.proved = False
        self.told: frozenset[str] = frozenset()
        self.expects_scaler = grad_scaler is not None
        self.grad_scaler = grad_scaler

    def __deepcopy__(self, memo: dict[int, Any]) -> Control:
        copied = Control.__new__(Control)
        copied.__dict__.update(self.__dict__)  # the scaler stays the one of the training loop
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "grad_scaler": None}  # belongs to the training loop

    def grad_scale(self, device: torch.device) -> float | Tensor:
        """What the loss is multiplied by, read without waiting for the device."""
        scaler = self.grad_scaler
        if scaler is None or not getattr(scaler, "is_enabled", lambda: True)():
            return 1.0
        scale = getattr(scaler, "_scale", None)
        if isinstance(scale, Tensor):
            wide = torch.float32 if device.type == "mps" else torch.float64  # bound * scale fits
            return scale.to(device, wide, non_blocking=True)
        return float(scaler.get_scale())


@dataclass
class Tally:
    """How many elements passed, and how many were dropped or changed."""

    affected: Tensor | int = 0
    total: int = 0
    expected: float = 0.0

    def add(self, affected: Tensor | int, total: int, expected: float) -> None:
        """Count more; a tensor is not read."""
        if isinstance(affected, Tensor):
            affected = affected.detach()
            if isinstance(self.affected, Tensor):
                self.affected = self.affected.to(affected.device)  # after the model has moved
        self.affected = self.affected + affected
        self.total += total
        self.expected += expected

    def share(self) -> float | None:
        """The share affected; None where nothing was counted."""
        return int(self.affected) / self.total if self.total else None

    def expected_share(self) -> float | None:
        """The mean of the nominal rates, by elements; None where nothing was counted."""
        return self.expected / self.total if self.total else None


class Site:
    """One regularizer on one layer.

    Attributes:
        key: its name in the Attachment: ``layer4.0/DropBlock2d``.
        name: the layer (or parameter), as the bare model names it.
        aliases: other names of the same, shared, module.
        module_type: class name of the layer.
        regularizer: what is done here.
        values: the rates now, by field.
        calls: forward calls of the layer since it was attached.
        active_calls: calls in which the regularizer was on; of a gradient regularizer, the
            gradients that it has seen.
    """

    def __init__(
        self,
        key: str,
        name: str,
        module_type: str,
        regularizer: Regularizer,
        control: Control,
        aliases: tuple[str, ...] = (),
        layout: str | None = None,
    ) -> None:
        self.key = key
        self.name = name
        self.aliases = aliases
        self.module_type = module_type
        self.control = control
        self.layout = layout or layouts.resolve(regularizer.layout, regularizer.spatial)
        self.order = 0
        self.calls = self.active_calls = 0
        self.window, self.closed, self.before = Tally(), Tally(), Tally()
        self._maps: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._waiting = self._evaluated = False
        self.set_regularizer(regularizer)

    def set_regularizer(self, regularizer: Regularizer) -> None:
        """Put another one of the same class in place, with the values of the present epoch."""
        self.values = regularizer.values(self.control.epoch)
        self.regularizer = regularizer
        self._apply = regularizer.bind()
        self._waiting = regularizer.moving

    def __repr__(self) -> str:
        return f"Site({self.key!r}, {self.regularizer!r})"

    @property
    def at(self) -> str:
        """``"output"``, ``"input"`` or, for gradients of parameters, ``"parameter"``."""
        return "parameter" if self.layout == layouts.PARAMETER else self.regularizer.at

    @property
    def rate(self) -> float | None:
        """The main rate now: the first one of the regularizer."""
        return next(iter(self.values.values()), None)

    @property
    def realized_rate(self) -> float | None:
        """Share of the elements dropped or changed since the epoch began.

        The window closes when the whole part of the epoch changes; an empty window shows the last
        one. Reading it waits for the device.
        """
        return (self.window if self.window.total else self.closed).share()

    @property
    def expected_rate(self) -> float | None:
        """The mean nominal rate over the same window as `realized_rate`."""
        return (self.window if self.window.total else self.closed).expected_share()

    @property
    def total_realized_rate(self) -> float | None:
        """The same as `realized_rate`, since attaching."""
        return self.total_tally().share()

    @property
    def map_size(self) -> tuple[int | tuple[int, int], ...] | None:
        """Spatial size of the tensors seen, per axis; (smallest, largest) where it varies."""
        return None if self._maps is None else _merge(*self._maps)

    @property
    def block_size(self) -> tuple[int | tuple[int, int], ...] | None:
        """The block in force on these maps, clipped where it is larger."""
        if self._maps is None:
            return None
        low, high = (self.regularizer.block_in_force(size) for size in self._maps)
        return None if low is None or high is None else _merge(low, high)

    def total_tally(self) -> Tally:
        """All that was counted since attaching."""
        total = Tally(self.before.affected, self.before.total, self.before.expected)
        total.add(self.window.affected, self.window.total, self.window.expected)
        return total

    def close_window(self) -> None:
        """Begin a new window of `realized_rate`."""
        if self.window.total:
            self.before, self.closed, self.window = self.total_tally(), self.window, Tally()

    def enter(self, module: nn.Module) -> bool:
        """Count a forward call; whether the regularizer is to be run in it."""
        control, training = self.control, module.training
        if control.installed and not _recomputing():
            self.calls += 1
            if self._waiting and not control.stepped:
                self._watch_time(training)
        return self.acts(training)

    def acts(self, training: bool) -> bool:
        """Whether the regularizer is to be run in this mode of its layer."""
        control = self.control
        on = self.is_on(training) or self.regularizer.follows_host
        return control.installed and control.enabled and on

    def is_on(self, training: bool) -> bool:
        """Whether the regularizer is active in this mode of its layer."""
        return training or self.regularizer.active == "always"

    def regularize(self, x: Tensor, layer_input: Any, training: bool) -> Tensor:
        """The activation, regularized and counted."""
        on = self.is_on(training)
        y, affected = self._run(x, input=layer_input, training=on, grad_scale=1.0)
        if on and not _recomputing():
            self.active_calls += 1
            if affected is not None and not _transformed(affected):
                self.window.add(affected, x.numel(), (self.rate or 0.0) * x.numel())
        return y

    def regularize_grad(self, grad: Tensor) -> Tensor:
        """The gradient, regularized and counted."""
        scale = self.control.grad_scale(grad.device)
        y, affected = self._run(grad, input=None, training=True, grad_scale=scale)
        self.active_calls += 1
        if affected is not None and not _transformed(affected):
            self.window.add(affected, grad.numel(), 0.0)
        return y

    def _run(self, x: Tensor, **state: Any) -> tuple[Tensor, Tensor | int | None]:
        spatial = self.regularizer.spatial
        try:
            if spatial is None:
                return self._call(x, Now(**self.values, layout=self.layout, **state))
            layouts.check_rank(x, self.layout)
            first = layouts.channels_first(x, self.layout)
            self._see_map(tuple(first.shape[2:]))
            y, affected = self._call(first, Now(**self.values, layout=self.layout, **state))
            return (x if y is first else layouts.channels_back(y, self.layout)), affected
        except (TypeError, ValueError) as error:
            raise self.error(error) from error

    def _call(self, x: Tensor, now: Now) -> tuple[Tensor, Tensor | int | None]:
        result = self._apply(x, now)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
            raise TypeError(f"apply must return (tensor, count or None), got {_shown(result)}")
        if result[0].shape != x.shape:
            raise ValueError(f"must keep the shape {tuple(x.shape)}, got {tuple(result[0].shape)}")
        return result

    def error(self, cause: object) -> SiteError:
        """An error that names the site."""
        where = f" at its {self.at}" if self.at == "input" else ""
        return SiteError(f"{self.key} on {self.module_type} '{self.name or '.'}'{where}: {cause}")

    def _see_map(self, size: tuple[int, ...]) -> None:
        if self._maps is None:
            self._maps = size, size
        elif self._maps != (size, size):
            low, high = self._maps
            self._maps = (
                tuple(map(min, low, size)),
                tuple(map(max, high, size)),
            )

    def _watch_time(self, training: bool) -> None:
        """Warn, once, when a schedule stands still because nobody calls ``step``."""
        if not training:
            self._evaluated = self.active_calls > 0
            return
        if (self._evaluated or self.calls > _CALLS_WITHOUT_STEP) and not self.control.warned:
            self.control.warned = True
            warnings.warn(
                f"{self.key}: rate still {self.rate} after {self.calls - 1} calls of the layer: "
                "call attached.step(epoch) at the start of each epoch, or step() at its end",
                HookWarning,
                stacklevel=2,
            )


def _transformed(affected: Tensor | int) -> bool:
    """Whether a count lives inside a function transform (vmap), which it must not outlive."""
    return isinstance(affected, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(
        affected
    )


def _recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _shown(result: object) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(item).__name__ for item in result)})"
    return type(result).__name__


def _merge(low: tuple[int, ...], high: tuple[int, ...]) -> tuple[int | tuple[int, int], ...]:
    return tuple(a if a == b else (a, b) for a, b in zip(low, high, strict=True))
