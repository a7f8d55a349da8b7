"""The rates of sites: their values at a time, and others in their place."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..checks import as_number
from ..quoting import quote
from ..regularizers.base import Regularizer
from ..schedules import UNSAID, length_of, same_kind, spread_rate, within
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.site import Site


def as_time(t: float) -> float:
    """A time, checked: a number >= 0."""
    t = as_number("t", t)
    if t < 0:
        raise ValueError(f"t must be >= 0, got {t:g}")
    return t


def values_at(sites: Sequence[Site], t: float) -> list[dict[str, float]]:
    """The values of all sites at a time, each within its range; errors name the site."""
    return [_values_of(site, site.regularizer, t) for site in sites]


def _values_of(site: Site, regularizer: Regularizer, t: float) -> dict[str, float]:
    try:
        values = regularizer.values(t)
    except (TypeError, ValueError) as error:  # which tells the time
        raise same_kind(error, f"{site.key}: {error}") from error
    try:
        regularizer.check(values)
    except (TypeError, ValueError) as error:
        raise same_kind(error, f"{site.key} at t={t:g}: {error}") from error
    return values


def move(
    base: nn.Module,
    run: Run,
    installed: Sequence[tuple[nn.Module, SiteHook]],
    t: float,
    values: Sequence[dict[str, float]],
) -> None:
    """Put the values of a time in place; windows close where its whole part is another."""
    moved = []
    try:
        for (module, hook), new in zip(installed, values, strict=True):
            moved.append((module, hook, hook.site.values))
            hook.site.move(new)
            hook.put(module)
    except BaseException:  # of a layer that does not take its rate: all go back
        for _, hook, old in moved:
            hook.site.move(old)
        for module, hook, _ in moved[:-1]:
            hook.put(module)
        raise
    if math.floor(t) != math.floor(run.epoch):
        look(installed)
        run.close_window(hook.site for _, hook in installed)
        look(installed)
    run.epoch = t


def look(installed: Sequence[tuple[nn.Module, SiteHook]]) -> None:
    """Let observers look at their layers, before they are read."""
    for module, hook in installed:
        hook.look(module)


def check_installed(run: Run, what: str) -> None:
    """Raise RuntimeError where there are no hooks any more, to do this."""
    if not run.installed:
        raise RuntimeError(
            f"the attachment was removed, so there is nothing to {what}: attach again"
        )


def with_rates(sites: Sequence[Site], rates: Mapping[str, Any], run: Run) -> list[Regularizer]:
    """The regularizers of sites with other rates, checked at this time; errors name the site.

    A `ByDepth` is spread over the layers of each class of regularizers for itself.
    """
    if not rates:
        raise ValueError("set takes at least one rate: set(which, p=0.2)")
    if run.epochs is not None:
        rates = {name: within(rate, run.epochs) for name, rate in rates.items()}
    unsaid = [rate for rate in rates.values() if length_of(rate) is None]
    if unsaid:
        raise ValueError(f"{quote(unsaid[0])}: {UNSAID}")
    layers: dict[str, dict[str, int]] = {}
    for site in sites:
        known = layers.setdefault(site.regularizer.label, {})
        known.setdefault(site.name, len(known))
    changed = []
    for site in sites:
        at = layers[site.regularizer.label]
        new = {name: spread_rate(rate, at[site.name], len(at)) for name, rate in rates.items()}
        try:
            changed.append(site.regularizer.with_rates(**new))
        except (TypeError, ValueError) as error:
            raise same_kind(error, f"{site.key}: {error}") from error
    for site, regularizer in zip(sites, changed, strict=True):
        _values_of(site, regularizer, run.epoch)
    return changed
