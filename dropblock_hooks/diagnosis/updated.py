"""Applies the rules of a `Watchdog` about updates without effect and uncleared gradients.

``rules`` calls both functions, with the layers that have these rules.
"""

from collections.abc import Iterator, Sequence

from .. import messages
from ..findings import Finding, Message
from ..quoting import listed
from .sights import Sight

_FEWEST = 3  # updates, because a warm-up may begin with a learning rate of 0
_MOST_LEFT_OUT = 0.25
"""If a larger share of the layers is left out of the optimizer, this is taken to be on purpose.

So with fewer than 4 layers `NOT_UPDATED` never comes, because one layer is a larger share.
"""


def find_no_update(sights: Sequence[Sight]) -> Iterator[Finding]:
    """Find layers that updates do not change, and layers that no optimizer updates."""
    layers = [sight for sight in sights if _gets_gradients(sight)]
    changed, unchanged = _by_change(layers)

    in_vain = [sight for sight in unchanged if _updates(sight) >= _FEWEST]
    if in_vain:
        fewest = min(map(_updates, in_vain))
        yield _finding(messages.UPDATED_BY_NOTHING, in_vain, layers, fewest)

    left_out = [sight for sight in unchanged if not _updates(sight)]
    most = max(map(_updates, changed), default=0)
    if not left_out or most < _FEWEST:
        return
    if not _is_on_purpose(left_out, changed, layers):
        yield _finding(messages.NOT_UPDATED, left_out, layers, most)


def find_accumulating(sights: Sequence[Sight]) -> Iterator[Finding]:
    """Find parameters whose gradients are never cleared; make one finding about the first layer."""
    layers = sorted(sights, key=_last_call)  # the finding is about the first one in the forward
    updates = _updates_of_uncleared(layers)
    names: dict[int, str] = {}
    first: Sight | None = None
    for sight in layers:
        for name, parameter in sight.module.named_parameters(sight.site.name, recurse=False):
            key = id(parameter)
            if updates.get(key, 0) >= _FEWEST:
                names.setdefault(key, name)
                first = first or sight
    if first is None:
        return

    yield first.finding(
        messages.ACCUMULATING,
        parameters=len(names),
        trained=len(updates),
        names=listed(list(names.values()), 5),
        updates=min(updates[key] for key in names),
    )


def _updates_of_uncleared(sights: Sequence[Sight]) -> dict[int, int]:
    """Return the updates of each parameter while its gradient was not cleared, by its identity.

    A parameter may belong to several layers, and activation checkpointing may add to its gradient
    before the backward of the next of them. So the smallest number that a layer saw is used.
    """
    fewest: dict[int, int] = {}
    for sight in sights:
        for gradient in sight.watched.updates.gradients:
            key = id(gradient.parameter)
            updates = gradient.updates_of_uncleared()
            fewest[key] = min(updates, fewest.get(key, updates))
    return fewest


def _by_change(layers: Sequence[Sight]) -> tuple[list[Sight], list[Sight]]:
    """Return the layers whose values have changed, and the others."""
    changed: list[Sight] = []
    unchanged: list[Sight] = []
    for sight in layers:
        group = unchanged if sight.watched.updates.unchanged() else changed
        group.append(sight)
    return changed, unchanged


def _last_call(sight: Sight) -> int:
    """Return the time of the last call of a layer."""
    return sight.watched.at


def _updates(sight: Sight) -> int:
    """Return the number of updates of a layer."""
    number: int = sight.watched.updates.updates
    return number


def _gets_gradients(sight: Sight) -> bool:
    """Return whether a layer has trained parameters and often gets gradients that are not 0."""
    watched = sight.watched
    often = sight.is_enough(watched.grads) and watched.norm > 0
    return often and bool(watched.updates.parameters)


def _is_on_purpose(
    left_out: list[Sight],
    changed: list[Sight],
    layers: list[Sight],
) -> bool:
    """Return whether many layers, or only the first ones, are left out of the optimizer."""
    are_many = len(left_out) > _MOST_LEFT_OUT * len(layers)
    last_left_out = max(sight.watched.at for sight in left_out)
    first_changed = min(sight.watched.at for sight in changed)
    return are_many or last_left_out < first_changed


def _finding(
    message: Message,
    sights: list[Sight],
    layers: list[Sight],
    updates: int,
) -> Finding:
    """Make one finding about the first of these layers, which names the others."""
    sights = sorted(sights, key=_last_call)
    names = [sight.site.name or "the model" for sight in sights]
    return sights[0].finding(
        message,
        updates=updates,
        layers=len(sights),
        trained=len(layers),
        names=listed(names, 5),
    )
