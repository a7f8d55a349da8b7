"""The rates of sites: their values at a time, and others in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import as_number
from ..regularizers.base import Regularizer
from ..schedules import same_kind, spread_rate
from ..sites.site import Site


def as_time(t: float) -> float:
    """A time, checked: a number >= 0."""
    t = as_number("t", t)
    if t < 0:
        raise ValueError(f"t must be >= 0, got {t:g}")
    return t


def values_of(site: Site, regularizer: Regularizer, t: float) -> dict[str, float]:
    """The values at a time of what is, or is to be, at a site; errors name the site."""
    try:
        values = regularizer.values(t)
    except (TypeError, ValueError) as error:  # which tells the time
        raise same_kind(error, f"{site.key}: {error}") from error
    try:
        regularizer.check(values)
    except (TypeError, ValueError) as error:
        raise same_kind(error, f"{site.key} at t={t:g}: {error}") from error
    return values


def with_rates(sites: Sequence[Site], rates: Mapping[str, Any], t: float) -> list[Regularizer]:
    """The regularizers of sites with other rates, checked at a time; errors name the site.

    A `ByDepth` is spread over the layers of each class of regularizers for itself.
    """
    layers: dict[str, dict[str, int]] = {}
    for site in sites:
        known = layers.setdefault(site.regularizer.label, {})
        known.setdefault(site.name, len(known))
    changed = []
    for site in sites:
        known = layers[site.regularizer.label]
        spread = {
            name: spread_rate(rate, known[site.name], len(known)) for name, rate in rates.items()
        }
        try:
            changed.append(site.regularizer.with_rates(**spread))
        except (TypeError, ValueError) as error:
            raise same_kind(error, f"{site.key}: {error}") from error
    for site, regularizer in zip(sites, changed, strict=True):
        values_of(site, regularizer, t)
    return changed
