"""Windows: the counts of the model and of all sites in an epoch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .counter import Snapshot
from .run import Run


@dataclass(frozen=True)
class Window:
    """The counts of an epoch.

    Args:
        sites: the counts of each site, by its key.
        model: the forwards of the model. Compiled code does not count them.
        backward: False before the backward, when a gradient can't be missing yet.
    """

    sites: Mapping[str, Snapshot]
    model: Snapshot
    backward: bool = True

    def has(self, *names: str) -> bool:
        """Return whether the model or a site has any of these counts, such as ``"trained"``."""
        snapshots = (self.model, *self.sites.values())
        return any(getattr(snapshot, name) for name in names for snapshot in snapshots)


def windows(run: Run, hooks: Iterable[Any]) -> tuple[Window, Window]:
    """Return the open window, and the window that closed last."""
    run.take_counts()
    counters = {hook.site.key: hook.site.tally for hook in hooks}
    opened = {key: counter.window() for key, counter in counters.items()}
    closed = {key: counter.closed for key, counter in counters.items()}
    return Window(opened, run.counter.window()), Window(closed, run.counter.closed)
