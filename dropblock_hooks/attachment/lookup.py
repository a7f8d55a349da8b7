"""Sites of an attachment, found by key, selector or class; their rates and captures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from ..checks import closest
from ..observers.capture import Capture, Record
from ..quoting import listed, quote
from ..regularizers.base import Regularizer
from ..schedules.base import UNSAID, length_of, same_kind, spread_rate, within
from ..selectors.index import Index, NoMatchError
from ..selectors.select import Select, match
from ..selectors.wrappers import named_modules
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.site import Site

Which: TypeAlias = str | Select | type[Regularizer]


def find(which: Which, base: nn.Module, hooks: Sequence[SiteHook]) -> tuple[Site, ...]:
    """The sites of these hooks that `which` means, in model order.

    Raises:
        KeyError: if it means none, with the reason.
        TypeError: for objects that cannot mean a site.
    """
    sites = {hook.site.key: hook.site for hook in hooks}
    if isinstance(which, type) and issubclass(which, Regularizer):
        order = {name: i for i, (name, _) in enumerate(named_modules(base))}
        found = [site for site in sites.values() if isinstance(site.regularizer, which)]
        if not found:
            there = listed((site.regularizer.label for site in sites.values()), 5)
            raise KeyError(f"no site has a {which.__name__} (there are: {there})")
        return tuple(sorted(found, key=lambda site: order.get(site.owner, len(order))))
    if not isinstance(which, str | Select):
        raise TypeError(
            "a site is found by its key or a selector, and sites by a class of "
            f"regularizers, got {quote(which)}"
        )
    if isinstance(which, str) and which in sites:
        return (sites[which],)
    try:
        order = {target.name: i for i, target in enumerate(match(which, Index(base)))}
        reason = f"it means layers that have none: {listed(order, 3)}"
    except NoMatchError as error:
        order, reason = {}, str(error)
    found = [site for site in sites.values() if site.name in order]
    if not found:
        known = dict.fromkeys([*sites, *(site.name for site in sites.values())])
        hint = closest(which, known) if isinstance(which, str) else ""
        raise KeyError(
            f"no site is {quote(which)}: {reason}; sites{hint or f': {listed(sites, 5)}'}"
        )
    return tuple(sorted(found, key=lambda site: order[site.name]))


def captures(which: Any, meant: Sequence[Site]) -> dict[str, list[Record]]:
    """The records of every `Capture` among sites; see `Attachment.captured`."""
    sites = [site for site in meant if isinstance(site.regularizer, Capture)]
    if not sites:
        have = listed([site.key for site in meant], 3)
        raise KeyError(f"no Capture is attached there; {quote(which)} has {have}")
    times = Counter(site.name for site in sites)
    keys = [(site.name or ".") if times[site.name] == 1 else site.key for site in sites]
    found = {key: site.bound.result() for key, site in zip(keys, sites, strict=True)}
    if not any(found.values()):
        raise RuntimeError(
            f"nothing was captured at {listed(found, 3)}. The causes may be: no forward since "
            "attaching; a paused attachment; a layer in evaluation mode (active='always' "
            "captures there); an output without floating-point tensors; gradients alone under "
            "no_grad(); a copied, saved or loaded model, which has no records of its own"
        )
    return found


def values_at(sites: Sequence[Site], t: float) -> list[dict[str, float]]:
    """The values of sites at a time, each checked for its range; errors name the site."""
    return [_values_of(site, site.regularizer, t) for site in sites]


def _values_of(site: Site, regularizer: Regularizer, t: float) -> dict[str, float]:
    when = ""  # errors of the values themselves say it
    try:
        values = regularizer.values(t)
        when = f" at t={t:g}"
        regularizer.check(values)
    except (TypeError, ValueError) as error:
        raise same_kind(error, f"{site.key}: {error}{when}") from error
    return values


def with_rates(sites: Sequence[Site], rates: Mapping[str, Any], run: Run) -> list[Regularizer]:
    """The regularizers of sites with other rates, checked at this time; errors name the site.

    A `ByDepth` is spread over the layers of each class of regularizers separately.
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
        new = {name: spread_rate(x, known[site.name], len(known)) for name, x in rates.items()}
        try:
            changed.append(site.regularizer.with_rates(**new))
        except (TypeError, ValueError) as error:
            raise same_kind(error, f"{site.key}: {error}") from error
        _values_of(site, changed[-1], run.epoch)
    return changed
