"""Windows: the counts of the model and of all sites in an epoch.

``diagnosis`` reads a `Window` to find faults.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from .._torch import version_of
from .counter import Snapshot
from .run import Run
from .updates import updated_by

_COUNTS = ("calls", "trained", "active", "off")  # those that `Window.has` finds


@dataclass(frozen=True)
class Window:
    """The counts of an epoch.

    The facts about all sites are cached, because each site that did nothing asks for them.

    Args:
        sites: the counts of each site, by its key.
        model: the forwards of the model. Compiled code does not count them.
        writes: how often each parameter, by its identity, had been written before the first
            training forward; None if unknown.
        optimizers: the `StepHooks` of the optimizers that the user has given.
        once_per_update: the keys of the sites that regularize accumulated gradients.
        backward: False before the backward, when a gradient can't be missing yet.
    """

    sites: Mapping[str, Snapshot]
    model: Snapshot
    writes: Mapping[int, int] | None = None
    optimizers: Sequence[Any] = ()
    once_per_update: Sequence[str] = ()
    backward: bool = True

    @property
    def failed(self) -> bool:
        """Whether training forwards raised an error and none came to its end.

        Then it is unknown which layers a forward calls.
        """
        return bool(self.model.failed) and not self.model.trained

    def has(self, *names: str) -> bool:
        """Return whether the model or a site has any of these counts, such as ``"trained"``."""
        return not self._present.isdisjoint(names)

    @cached_property
    def _present(self) -> set[str]:
        """The names of the counts that the model or a site has."""
        snapshots = (self.model, *self.sites.values())
        return {name for name in _COUNTS if any(getattr(each, name) for each in snapshots)}

    @cached_property
    def held(self) -> list[set[int]]:
        """The parameters that each optimizer holds, by their identities."""
        optimizers = [step.optimizer for step in self.optimizers]
        return [set() if each is None else updated_by(each) for each in optimizers]

    @cached_property
    def unchanged(self) -> list[bool]:
        """Whether no parameter of an optimizer was written after the first training forward.

        There is one value for each optimizer. It is False if the writes before this forward are
        unknown, or if the optimizer is gone.
        """
        optimizers = [step.optimizer for step in self.optimizers]
        return [each is not None and self._has_unchanged(each) for each in optimizers]

    def _has_unchanged(self, optimizer: Any) -> bool:
        """Return whether no parameter of an optimizer was written."""
        if self.writes is None:
            return False
        parameters: list[Tensor] = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        for parameter in parameters:
            version = version_of(parameter)
            # a parameter without a known number counts as unchanged
            if version != self.writes.get(id(parameter), version):
                return False
        return True

    @cached_property
    def had_update(self) -> bool:
        """Whether a site has regularized accumulated gradients."""
        return any(self.sites[key].active for key in self.once_per_update)


def windows(run: Run, hooks: Iterable[Any]) -> tuple[Window, Window]:
    """Return the open window, and the window that closed last."""
    run.take_counts()
    counters = {hook.site.key: hook.site.tally for hook in hooks}
    opened = {key: counter.window() for key, counter in counters.items()}
    closed = {key: counter.closed for key, counter in counters.items()}
    once_per_update = [site.key for site in run.sites if site.regularizer.accumulates]
    shared: dict[str, Any] = {"optimizers": run.optimizers, "once_per_update": once_per_update}
    open_window = Window(opened, run.counter.window(), run.writes, **shared)
    last_window = Window(closed, run.counter.closed, run.last_writes, **shared)
    return open_window, last_window
