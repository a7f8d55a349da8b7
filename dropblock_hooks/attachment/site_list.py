"""The sites of an attachment as a collection: found by key, selector or class, and set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from torch import nn

from ..checks import closest
from ..observers.capture import Capture
from ..observers.capture import Record as Call
from ..quoting import listed, quote
from ..regularizers.base import Regularizer
from ..selectors.index import Index, NoMatchError
from ..selectors.select import Select, match
from ..selectors.wrappers import named_modules
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.site import Site
from .rates import with_rates

Which: TypeAlias = str | Select | type[Regularizer]


class SiteList:
    """The sites that are installed on a model, in the order of the spec."""

    def __init__(
        self, base: nn.Module, run: Run, installed: list[tuple[nn.Module, SiteHook]]
    ) -> None:
        self._base = base
        self._run = run
        self._installed = installed

    @property
    def _hooks(self) -> list[SiteHook]:
        return [hook for _, hook in self._installed]

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites, in the order of the spec."""
        return tuple(hook.site for _, hook in self._installed)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self._installed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SiteList) and self._run is other._run

    def __hash__(self) -> int:
        return hash(id(self._run))

    def __getitem__(self, which: Which) -> Site | tuple[Site, ...]:
        """One site by its key; a tuple of sites by a selector, or by a class of regularizers.

        Raises:
            KeyError: where no site is meant, with the reason or the closest keys.
        """
        meant = find(which, self._base, self._hooks)
        return meant[0] if meant[0].key == which else meant

    @property
    def rates(self) -> dict[str, dict[str, float]]:
        """The values now, by site key and field."""
        return {site.key: dict(site.values) for site in self.sites}

    def set(self, which: Which, **rates: Any) -> None:
        """Give sites another rate or schedule; all or none. Their realized rates begin anew.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
            >>> attached = attach(model, {"1": Dropout2d(p=0.1)})
            >>> attached.set("1/Dropout2d", p=0.3)
            >>> attached.rates
            {'1/Dropout2d': {'p': 0.3}}

        Args:
            which: a site key, a selector, or a class of regularizers: the sites that have one.
            rates: rate fields by name, numbers or schedules; a `ByDepth` is spread over the layers
                of each class of regularizers for itself.

        Raises:
            KeyError: where no site is meant, with the reason.
            RuntimeError: after `remove`.
            TypeError, ValueError: for a field that is no rate of theirs, or a bad value.
        """
        self._check_installed()
        sites = find(which, self._base, self._hooks)
        for site, regularizer in zip(sites, with_rates(sites, rates, self._run), strict=True):
            site.set_regularizer(regularizer)
            site.counter.forget_elements()
        self.put()

    def put(self) -> None:
        """Put rates that a model holds in place, and hook parameters that are other objects now."""
        for module, hook in self._installed:
            hook.put(module)

    def _look(self) -> None:
        """Let observers look at their layers, before they are read."""
        for module, hook in self._installed:
            hook.look(module)

    def _check_installed(self) -> None:
        if not self._run.installed:
            raise RuntimeError("the attachment was removed, so nothing acts: attach again")

    def captured(self, which: str | Select | None = None) -> dict[str, list[Call]]:
        """The calls that `Capture` has kept, oldest first, by the name of the layer.

        Where a layer has several sites, they are under their keys.

        Args:
            which: a site key or a selector; None means every `Capture`.

        Raises:
            KeyError: where no site that is meant is a `Capture`.
            RuntimeError: where all of them have kept nothing, with the cause.
        """
        meant = find(Capture if which is None else which, self._base, self._hooks)
        sites = [site for site in meant if isinstance(site.regularizer, Capture)]
        if not sites:
            have = listed([site.key for site in meant], 3)
            raise KeyError(f"no Capture is attached there; {quote(which)} has {have}")
        times = Counter(site.name for site in sites)
        found = {
            (site.name or ".") if times[site.name] == 1 else site.key: site.bound.result()
            for site in sites
        }
        if not any(found.values()):
            raise RuntimeError(
                f"nothing was captured at {listed(found, 3)}. The causes may be: no forward since "
                "attaching; a paused attachment; a layer in evaluation mode (active='always' "
                "captures there); an output without floating-point tensors; gradients alone under "
                "no_grad(); a copied, saved or loaded model, which has no records of its own"
            )
        return found


def find(which: Which, base: nn.Module, hooks: Sequence[SiteHook]) -> tuple[Site, ...]:
    """The sites that are meant, among those of these hooks; more than one in model order.

    Raises:
        KeyError: where none is meant, with the reason.
        TypeError: for what can mean none.
    """
    if isinstance(which, type) and issubclass(which, Regularizer):
        order = {name: i for i, (name, _) in enumerate(named_modules(base))}
        meant = [hook for hook in hooks if isinstance(hook.site.regularizer, which)]
        if not meant:
            there = listed((hook.site.regularizer.label for hook in hooks), 5)
            raise KeyError(f"no site has a {which.__name__} (there are: {there})")
        meant.sort(key=lambda hook: order.get(hook.owner_name, len(order)))
        return tuple(hook.site for hook in meant)
    if not isinstance(which, str | Select):
        raise TypeError(
            "a site is found by its key or a selector, and sites by a class of "
            f"regularizers, got {quote(which)}"
        )
    sites = {hook.site.key: hook.site for hook in hooks}
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
