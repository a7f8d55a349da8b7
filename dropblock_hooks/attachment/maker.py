"""The layer that made NaN or Inf, told apart from those that have passed them on.

Every site of a `Watchdog` has the time of its first bad values and bad gradients. A layer has made
what it gave or handed on, if what it got was finite. Where no layer has made the first bad value,
code between layers has: that of the innermost layer around them that got finite values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ..observers.watched import Numbers
from ..sites.site import Site


class Sight(NamedTuple):
    """What was read of the site of a `Watchdog`.

    Attributes:
        site: the site.
        module: its layer.
        kept: its numbers.
        peaks: of each channel, the largest magnitude.
    """

    site: Site
    module: nn.Module
    kept: Numbers
    peaks: list[float]


class Maker(NamedTuple):
    """Who made the first bad values: `made` is False where they came from outside."""

    sight: Sight
    made: bool
    backward: bool


def find_maker(sights: Sequence[Sight], backward: bool) -> Maker | None:
    """Who made the first value that is not finite; None where all are.

    Args:
        sights: of all sites.
        backward: whether bad gradients count.
    """
    forward = min(sights, key=lambda s: s.kept.bad, default=None)
    first = math.inf if forward is None else forward.kept.bad
    if backward:
        found = _in_backward(sights, math.inf if forward is None else forward.kept.after)
        if found is not None:
            return found
    if forward is None or first == math.inf:
        return None
    if forward.kept.made == first:
        return Maker(forward, True, False)
    around = [s for s in _around(forward, sights) if s.kept.made == s.kept.bad < math.inf]
    return Maker(around[0], True, False) if around else Maker(forward, False, False)


def _in_backward(sights: Sequence[Sight], before: float) -> Maker | None:
    """Who made the first bad gradient, if one had come by this time of backwards."""
    events = [(s.kept.handed_bad, s) for s in sights]
    events += [(s.kept.grad_bad, s) for s in sights]
    time, first = min(events, key=lambda event: event[0], default=(math.inf, None))
    if first is None or math.isinf(time) or time > before:
        return None
    # a backward pre-hook of the layer changes what comes before it is seen
    if first.kept.grad_bad > time or first.module._backward_pre_hooks:
        return Maker(first, True, True)
    around = [s for s in _around(first, sights) if s.kept.grads and s.kept.grad_bad > time]
    good = [s for s in around if not s.kept.handed_bad < time]
    return Maker(good[0], True, True) if good else Maker(first, False, True)


def _around(sight: Sight, sights: Sequence[Sight]) -> list[Sight]:
    """The layers that hold this one, the innermost first."""
    names = (sight.site.name, *sight.site.aliases)
    outer = [s for s in sights if any(_holds(s.site.name, name) for name in names)]
    return sorted(outer, key=lambda s: -len(s.site.name))


def _holds(outer: str, inner: str) -> bool:
    return outer != inner and (not outer or inner.startswith(f"{outer}."))
