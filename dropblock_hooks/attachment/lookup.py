"""Sites of an attachment, found by key, selector or class; their rates, captures and bounds."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

from torch import nn

from ..checks import Range, as_number, closest
from ..observers.capture import Capture, Record
from ..quoting import listed, quote
from ..regularizers.base import Regularizer
from ..schedules import placed, same_kind
from ..selectors.index import Index, NoMatchError
from ..selectors.select import Select, match
from ..selectors.wrappers import named_modules
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.site import Site
from ..tables import Columns, Table

Which: TypeAlias = str | Select | type[Regularizer]


def find(which: Which, base: nn.Module, hooks: Sequence[SiteHook]) -> tuple[Site, ...]:
    """The sites of these hooks that `which` means, in model order; KeyError with the reason."""
    sites = {hook.site.key: hook.site for hook in hooks}
    if isinstance(which, str) and which in sites:
        return (sites[which],)
    if isinstance(which, type) and issubclass(which, Regularizer):
        found = [site for site in sites.values() if isinstance(site.regularizer, which)]
        reason = f"no site has a {which.__name__}"
    elif isinstance(which, str | Select):
        try:
            names = {target.name for target in match(which, Index(base))}
            reason = f"it means layers that have none: {listed(sorted(names), 3)}"
        except NoMatchError as error:
            names, reason = set(), str(error)
        found = [site for site in sites.values() if site.name in names]
    else:
        raise TypeError(
            f"a site is found by its key, a selector or a class of regularizers, got {quote(which)}"
        )
    if not found:
        known = closest(str(which), sites) or f": {listed(sites, 5)}"
        raise KeyError(f"no site is {quote(which)}: {reason}; sites{known}")
    order = {name: i for i, (name, _) in enumerate(named_modules(base))}
    return tuple(sorted(found, key=lambda site: order.get(site.owner, len(order))))


def captures(which: Any, meant: Sequence[Site]) -> dict[str, list[Record]]:
    """The records of every `Capture` among sites, by layer; of several of a layer, by key."""
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
            "attaching, copying or loading; a paused attachment; a layer in evaluation mode (use "
            "active='always'); an output without floating-point tensors; no_grad()"
        )
    return found


def values_at(sites: Sequence[Site], t: float) -> list[dict[str, float]]:
    """The values of sites at a time, checked; errors name the site."""
    values = []
    for site in sites:
        try:
            values.append(site.regularizer.values(t))
            site.regularizer.check(values[-1])
        except (TypeError, ValueError) as error:
            raise same_kind(error, f"{site.key}: {error}") from error
    return values


def with_rates(sites: Sequence[Site], rates: Mapping[str, Any], run: Run) -> list[Regularizer]:
    """The regularizers of sites with other rates, checked at this time; errors name the site."""
    if not rates:
        raise ValueError("set takes at least one rate: set(which, p=0.2)")
    layers = {name: i for i, name in enumerate(dict.fromkeys(site.name for site in sites))}
    changed = []
    for site in sites:
        try:
            new = placed(rates, run.epochs, layers[site.name], len(layers))
            changed.append(site.regularizer.with_rates(**new))
            changed[-1].check(changed[-1].values(run.epoch))
        except (TypeError, ValueError) as error:
            raise same_kind(error, f"{site.key}: {error}") from error
    return changed


@dataclass(frozen=True)
class Suggestion:
    """One bound of a site, and the proposal."""

    site: str  # its key
    field: str  # "max_norm", "min" or "max"
    bound: float  # its value now
    changed: float | None  # share of the values that it has changed in the last window
    proposed: float | None  # the bound that the wanted share exceeds; None with a reason
    seen: int  # the number of norms; for ClampGrad, of gradients
    over: str  # "window", or "life" where the last window has no norms
    call: str  # the call that sets the bounds of the site; "" with a reason
    reason: str  # why nothing is proposed, or ""


def suggestions(sites: Sequence[Site], share: float) -> Table[Suggestion]:
    """A bound for each site that has one, which this share of the norms exceeds."""
    share = as_number("share", share, allowed=Range(0, 1, open_low=True, open_high=True))
    rows = [row for site in sites for row in _suggested(site, share)]
    if not rows:
        raise ValueError(
            "there is nothing to suggest: no site here has a bound on gradients, as ClipGradNorm "
            "and ClampGrad have"
        )
    names = ("site", "field", "bound", "changed", "proposed", "seen", "over")
    columns: Columns[Suggestion] = {name: attrgetter(name) for name in names}
    title = f"bounds that {share:.4g} of the norms (ClampGrad: largest magnitudes) lie beyond"
    calls = list(dict.fromkeys(row.call or f"# {row.site}: {row.reason}" for row in rows))
    return Table(rows, columns, title, notes={"": calls})


def _suggested(site: Site, share: float) -> Iterator[Suggestion]:
    window, life = site.counter.read().shown(), site.counter.life()
    norms, over = (window.norms, "window") if window.norms.count else (life.norms, "life")
    bound, reason = norms.quantile(1 - share), ""
    if bound is None:
        reason = "no gradient was seen yet: train a step first"
    elif not 0.0 < bound < float("inf"):
        reason = f"no bound has this share beyond it: {1 - share:.4g} of the norms are 0"
    rounded = float(f"{bound or 0.0:.4g}")
    bounds = site.regularizer.bounds.items()
    wanted = {name: sign * rounded for name, sign in bounds if name in site.values}
    given = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
    call = "" if reason else f"attached.set({site.key!r}, {given})"
    for name, value in wanted.items():
        now, changed, proposed = site.values[name], window.share(), None if reason else value
        yield Suggestion(site.key, name, now, changed, proposed, norms.count, over, call, reason)
