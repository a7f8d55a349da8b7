"""Finds sites of an attachment by key, selector or class. Returns their rates and captures.

`suggestions` proposes bounds for gradients.

The methods of `Attachment` call these functions: `Attachment.select`, `Attachment.set`,
`Attachment.captured`, `Attachment.suggest` and, for the rates at a time, `Attachment.step`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

from torch import nn

from ..checks import Range, as_number, closest
from ..observers.capture import Capture, Record
from ..quoting import listed, quote, with_article
from ..regularizers.base import Regularizer
from ..schedules import rates_at_depth, same_kind
from ..selectors.index import Index, NoMatchError
from ..selectors.select import ROOT, Select, match
from ..sites.run import Run
from ..sites.site import LiveSite
from ..tables import Columns, Section, Table

Which: TypeAlias = str | Select | type[Regularizer]

_SEVERAL = "attached.select(...) finds several, by a selector or a class"


def site_at(key: str | int, sites: Sequence[LiveSite]) -> LiveSite:
    """Find the one site with this key, on the layer of this name, or at this position.

    Raises:
        KeyError: if there is no such site, or several.
        IndexError: if the number is too large.
        TypeError: if `key` has another type.
    """
    if isinstance(key, int) and not isinstance(key, bool):
        return sites[key]
    if not isinstance(key, str):
        raise TypeError(
            "attached[...] takes the key of a site, the name of its layer or its number, got "
            f"{quote(key)}: {_SEVERAL}"
        )

    by_key = {site.key: site for site in sites}
    if key in by_key:
        return by_key[key]

    name = "" if key == ROOT else key
    on_layer = [site for site in sites if name in (site.name, *site.aliases)]
    if not on_layer:
        reason = f"no site has this key or is on a layer of this name ({_SEVERAL})"
        raise _no_site(key, reason, list(by_key))
    if len(on_layer) > 1:
        keys = listed([site.key for site in on_layer], 3)
        raise KeyError(f"{quote(key)} has {len(on_layer)} sites: {keys}; take one, or {_SEVERAL}")
    return on_layer[0]


def find(which: Which, base: nn.Module, sites: Sequence[LiveSite]) -> tuple[LiveSite, ...]:
    """Find all sites of a key, a selector or a class, in model order.

    Raises:
        KeyError: if there is no such site. The message has the reason.
        TypeError: if `which` has another type.
    """
    by_key = {site.key: site for site in sites}
    if isinstance(which, str) and which in by_key:
        return (by_key[which],)

    index = Index(base)

    if isinstance(which, type) and issubclass(which, Regularizer):
        matching = [site for site in sites if isinstance(site.regularizer, which)]
        reason = f"no site has {with_article(which.__name__)}"
    elif isinstance(which, str | Select):
        names, reason = _matched_names(which, index)
        matching = [site for site in sites if site.name in names]
    else:
        raise TypeError(
            f"a site is found by its key, a selector or a class of regularizers, got {quote(which)}"
        )

    if not matching:
        raise _no_site(which, reason, list(by_key))
    return in_model_order(matching, index)


def _no_site(which: Which, reason: str, keys: Sequence[str]) -> KeyError:
    """Make the error about a missing site, with the closest key."""
    similar = closest(str(which), keys)  # such as " (closest: fc/Dropout)"
    sites = f"sites{similar}" if similar else f"sites: {listed(keys, 5)}"
    return KeyError(f"no site is {quote(which)}: {reason}; {sites}")


def _matched_names(selector: str | Select, index: Index) -> tuple[set[str], str]:
    """Return the names that a selector matches, and the text of an error if no site has them."""
    try:
        names = {target.name for target in match(selector, index)}
    except NoMatchError as error:
        return set(), str(error)
    return names, f"nothing is attached to its layers: {listed(sorted(names), 3)}"


def in_model_order(sites: Sequence[LiveSite], index: Index) -> tuple[LiveSite, ...]:
    """Sort sites by their layers. Sites whose layers are gone from the model come last."""
    positions = {name: position for position, name in enumerate(index.modules)}

    def position_of(site: LiveSite) -> int:
        return positions.get(site.owner, len(positions))

    return tuple(sorted(sites, key=position_of))


def captures(which: Any, selected: Sequence[LiveSite]) -> dict[str, list[Record]]:
    """Return the records of every `Capture` among sites, by layer, or by key if a layer has more.

    Args:
        which: the argument of the user, for messages.
        selected: the sites of this key or selector.

    Raises:
        KeyError: if none of these sites has a `Capture`.
        RuntimeError: if nothing was captured.
    """
    sites = [site for site in selected if isinstance(site.regularizer, Capture)]
    if not sites:
        keys = listed([site.key for site in selected], 3)
        raise KeyError(f"no Capture is attached there; {quote(which)} has {keys}")

    captures_at = Counter(site.name for site in sites)
    records = {}
    for site in sites:
        name = site.name or "."
        key = name if captures_at[site.name] == 1 else site.key
        records[key] = site.bound.result()
    if not any(records.values()):
        raise RuntimeError(
            f"nothing was captured at {listed(records, 3)}. The causes may be: no forward since "
            "attaching, copying or loading; a paused attachment; a layer in evaluation mode (use "
            "active='always'); an output without floating-point tensors; no_grad()"
        )
    return records


def values_at(sites: Sequence[LiveSite], t: float) -> list[dict[str, float]]:
    """Return the checked values of sites at a time. Errors name the site."""
    values_of_sites = []
    for site in sites:
        try:
            values = site.regularizer.values(t)
            site.regularizer.check(values)
        except (TypeError, ValueError) as error:
            raise same_kind(error, f"{site.key}: {error}") from error
        values_of_sites.append(values)
    return values_of_sites


def with_rates(sites: Sequence[LiveSite], rates: Mapping[str, Any], run: Run) -> list[Regularizer]:
    """Return the regularizers of sites with other, checked rates. Errors name the site."""
    if not rates:
        raise ValueError("set takes at least one rate: set(which, p=0.2)")

    names = dict.fromkeys(site.name for site in sites)
    depths = {name: depth for depth, name in enumerate(names)}
    regularizers = []
    for site in sites:
        try:
            new_rates = rates_at_depth(rates, run.epochs, depths[site.name], len(depths))
            regularizer = site.regularizer.with_rates(**new_rates)
            regularizer.check(regularizer.values(run.epoch))
        except (TypeError, ValueError) as error:
            raise same_kind(error, f"{site.key}: {error}") from error
        regularizers.append(regularizer)
    return regularizers


@dataclass(frozen=True)
class Suggestion:
    """One bound of a site, with a proposal for it."""

    site: str  # the key of the site
    field: str  # the name of the rate, such as "max_norm" or "clip_factor"
    bound: float  # the present bound
    changed: float | None  # the share of the values that the bound changed in the last window
    proposed: float | None  # the bound that the wanted share exceeds; None with a `reason`
    seen: int  # the number of norms; for ClampGrad, of gradients
    over: str  # "window", or "life" if the last window has no norms
    call: str  # the call that sets the bounds of the site or its group; "" with a `reason`
    reason: str  # why nothing is proposed, or ""


def suggestions(sites: Sequence[LiveSite], share: float) -> Table[Suggestion]:
    """Propose a bound for each site with a bound, so that this share of the norms exceeds it.

    Raises:
        ValueError: if the share is out of range, or no site has a bound.
    """
    share = as_number("share", share, allowed=Range(0, 1, open_low=True, open_high=True))
    rows: list[Suggestion] = []
    for site in sites:
        rows.extend(_suggested(site, share))
    if not rows:
        raise ValueError(
            "there is nothing to suggest: no site here has a fixed bound on gradients, as "
            "ClipGradNorm and ClampGrad have"
        )

    names = ("site", "field", "bound", "changed", "proposed", "seen", "over")
    columns: Columns[Suggestion] = {name: attrgetter(name) for name in names}
    selectors = {site.key: site.selector for site in sites}

    def entry(row: Suggestion) -> str:
        """Return the selector and the end of the key, by which the table joins equal lines."""
        return f"{selectors[row.site]}/{row.site.rpartition('/')[2]}"

    title = f"bounds that would have clipped {100 * share:.4g} % of the measured gradients"
    title += " (ClampGrad: by their largest magnitudes)"
    sections = [Section(rows, columns, entry=entry)]
    calls = list(dict.fromkeys(row.call or f"# {row.site}: {row.reason}" for row in rows))
    return Table(rows, columns, title, sections=sections, notes={"": calls})


def _suggested(site: LiveSite, share: float) -> Iterator[Suggestion]:
    """Propose the bounds of a site, or say why there is nothing to propose."""
    window = site.counter.read().shown()
    over = "window"
    norms = window.norms
    if not norms.count:
        over = "life"
        norms = site.counter.life().norms

    bound = norms.quantile(1 - share)
    reason = ""
    if bound is None:
        reason = "no gradient with a finite norm was seen yet: train a step first"
    elif not 0.0 < bound < float("inf"):
        reason = f"no bound has this share beyond it: {1 - share:.4g} of the norms are 0"

    rounded = float(f"{bound or 0.0:.4g}")
    proposals = {}
    for name, sign in site.regularizer.bounds.items():  # the sign of a lower bound is -1
        if name in site.values:
            proposals[name] = sign * rounded
    arguments = ", ".join(f"{name}={value!r}" for name, value in proposals.items())
    call = f"attached.set({_members(site)}, {arguments})"
    for name, value in proposals.items():
        yield Suggestion(
            site=site.key,
            field=name,
            bound=site.values[name],
            changed=window.share(),
            proposed=None if reason else value,
            seen=norms.count,
            over=over,
            call="" if reason else call,
            reason=reason,
        )


def _members(site: LiveSite) -> str:
    """Return what `Attachment.set` takes for a site, or for all sites that share its norm.

    The parameters of a group have one norm, so they need one bound.
    """
    if not getattr(site.regularizer, "group", False):
        return repr(site.key)

    # the sites of the same regularizer in the same entry
    members = [other for other in site.run.sites if other.position == site.position]
    names = {member.name for member in members}
    on_their_layers = [other for other in site.run.sites if other.name in names]
    of_their_class = [
        other for other in site.run.sites if isinstance(other.regularizer, type(site.regularizer))
    ]
    # `set` changes all sites of a selector or a class, so there must be no others
    if len(on_their_layers) == len(members):
        return site.selector if site.selector.startswith("Select(") else repr(site.selector)
    if len(of_their_class) == len(members):
        return type(site.regularizer).__name__
    return repr(site.key)
