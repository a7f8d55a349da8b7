"""Reads the layers that a `Watchdog` watches, with their numbers.

The module ``alerts`` gives them to the rules. Its `new_alerts` does this when a `Watchdog` is due,
mostly after a forward of the model, and then begins new counts: this is a *look*. `alerts_now`, for
`Attachment.alerts` and `verify`, changes no counts. The callbacks of trainers call both.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from ..findings import Finding, Kind, Message
from ..observers.watchdog import Watchdog, Watched, read_together
from ..selectors.wrappers import find_module
from ..sites.hooks import SiteHook
from ..sites.site import LiveSite


class Sight(NamedTuple):
    """A `Watchdog` site with its layer, its observer and its numbers."""

    site: LiveSite
    module: nn.Module
    dog: Watchdog
    watched: Watched

    @property
    def has_numbers(self) -> bool:
        """Whether there are numbers since the last look."""
        watched = self.watched
        numbers = (watched.measured, watched.grads, watched.bad_calls)
        return any(numbers)

    @property
    def judged(self) -> bool:
        """Whether the layer was called often enough to judge statistics."""
        return self.is_enough(self.watched.measured)

    def is_enough(self, number: int) -> bool:
        """Return whether this number of measured calls, or gradients, allows a judgment."""
        was_called_enough = self.watched.calls >= self.dog.min_calls
        return was_called_enough and number >= self.dog.enough

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters of the layer itself that are trainable."""
        parameters = self.module.parameters(recurse=False)
        return [p for p in parameters if p.requires_grad]

    def finding(self, message: Message, **values: Any) -> Finding:
        """Make a finding about the layer."""
        return message.finding(
            self.site.key,
            epoch=self.site.run.epoch,
            **values,
        )


def sights_of(base: nn.Module, hooks: Sequence[SiteHook]) -> list[Sight]:
    """Read all sites of a `Watchdog`. This waits for the device."""
    sights = []
    for hook in hooks:
        site = hook.site
        dog = site.regularizer
        if not isinstance(dog, Watchdog):
            continue
        module = find_module(base, site.name)
        if module is not None:  # the layer may have left the model
            watched = site.bound.open["watched"]
            sight = Sight(site, module, dog, watched)
            sights.append(sight)

    all_watched = [sight.watched for sight in sights]
    read_together(all_watched)
    return sights


def with_rule(kind: Kind, sights: Sequence[Sight]) -> list[Sight]:
    """Return the sites whose `Watchdog` has the rule for this kind."""
    return [sight for sight in sights if kind in sight.dog.names]
