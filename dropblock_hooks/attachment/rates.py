"""The rates of sites: their values at a time, and others in their place."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import as_number
from ..quoting import quote
from ..regularizers.base import Regularizer
from ..schedules.base import UNSAID, length_of, same_kind, within
from ..schedules.by_depth import spread_rate
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
    when = ""  # the values themselves say it
    try:
        values = regularizer.values(t)
        when = f" at t={t:g}"
        regularizer.check(values)
    except (TypeError, ValueError) as error:
        raise same_kind(error, f"{site.key}: {error}{when}") from error
    return values


def with_rates(sites: Sequence[Site], rates: Mapping[str, Any], run: Run) -> list[Regularizer]:
    """The regularizers of sites with other rates, checked at this time; errors name the site.

    A `ByDepth` is spread over the layers of each class of regularizers for itself.
    """
    if not rates:
        raise ValueError("set takes at least one rate: set(which, p=0.2)")
    if run.epochs is not None:
        rates = {name: within(rate, run.epochs) for name, rate in rates.items()}
    for rate in rates.values():
        if length_of(rate) is None:
            raise ValueError(f"{quote(rate)}: {UNSAID}")
    layers: dict[str, dict[str, int]] = {}
    for site in sites:
        known = layers.setdefault(site.regularizer.label, {})
        known.setdefault(site.name, len(known))
    changed = []
    for site in sites:
        known = layers[site.regularizer.label]
        at = known[site.name]
        new = {name: spread_rate(rate, at, len(known)) for name, rate in rates.items()}
        try:
            changed.append(site.regularizer.with_rates(**new))
        except (TypeError, ValueError) as error:
            raise same_kind(error, f"{site.key}: {error}") from error
        _values_of(site, changed[-1], run.epoch)
    return changed
