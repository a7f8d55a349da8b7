"""The sites of an attachment as a collection: found by key, selector or class, and set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

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
from .rates import check_installed, with_rates


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

    def __getitem__(self, which: str | Select | type[Regularizer]) -> Site | tuple[Site, ...]:
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

    def set(self, which: str | Select | type[Regularizer], **rates: Any) -> None:
        """Give sites another rate or schedule; all or none. Their realized rates begin anew.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
            >>> attached = attach(model, {"1": Dropout2d(p=0.1)})
            >>> attached.set("1/Dropout2d", p=0.3)
            >>> attached.rates
            {'1/Dropout2d': {'p': 0.3}}
            >>> attached.set(Dropout2d, p=0.2)

        Args:
            which: a site key, a selector, or a class of regularizers: the sites that have one.
            rates: rate fields by name, numbers or schedules; a `ByDepth` is spread over the layers
                of each class of regularizers for itself.

        Raises:
            KeyError: where no site is meant, with the reason.
            RuntimeError: after `remove`.
            TypeError, ValueError: for a field that is no rate of theirs, or a bad value.
        """
        check_installed(self._run, "set")
        sites = find(which, self._base, self._hooks)
        changed = with_rates(sites, rates, self._run)
        for site, regularizer in zip(sites, changed, strict=True):
            site.set_regularizer(regularizer)
            site.counter.forget_elements()
        self._put()

    def _put(self) -> None:
        """Put the rates of layers that drop by themselves in place."""
        for module, hook in self._installed:
            hook.put(module)

    def captured(self, which: str | Select | None = None) -> dict[str, list[Call]]:
        """The calls that `Capture` has kept, oldest first, by the name of the layer.

        Where a layer has several sites, they are under their keys.

        Args:
            which: a site key or a selector; None means every `Capture`.

        Raises:
            KeyError: where no site that is meant is a `Capture`.
            RuntimeError: where all of them have kept nothing, with the cause.
        """
        hooks = self._hooks
        meant = find(Capture if which is None else which, self._base, hooks) if hooks else ()
        sites = [site for site in meant if isinstance(site.regularizer, Capture)]
        if not sites:
            there = f"; {quote(which)} has {listed([s.key for s in meant], 3)}" if meant else ""
            raise KeyError(
                f"no Capture is attached there{there}: attach(model, {{...: Capture()}})"
            )
        times = Counter(site.name for site in sites)
        found = {
            (site.name or ".") if times[site.name] == 1 else site.key: site.bound.result()
            for site in sites
        }
        if not any(found.values()):
            causes = {_nothing_kept(site): None for site in sites}
            raise RuntimeError(f"nothing was captured at {listed(found, 3)}: {'; '.join(causes)}")
        return found


def find(
    which: str | Select | type[Regularizer], base: nn.Module, hooks: Sequence[SiteHook]
) -> tuple[Site, ...]:
    """The sites that are meant, among those of these hooks; more than one in model order.

    Raises:
        KeyError: where none is meant, with the reason.
        TypeError: for what can mean none.
    """
    if isinstance(which, type) and issubclass(which, Regularizer):
        return _of_class(which, base, hooks)
    if not isinstance(which, str | Select):
        raise TypeError(
            "a site is found by its key or a selector, and sites by a class of "
            f"regularizers, got {quote(which)}"
        )
    sites = [hook.site for hook in hooks]
    meant = [site for site in sites if site.key == which]
    if meant:
        return tuple(meant)
    try:
        order = {target.name: i for i, target in enumerate(match(which, Index(base)))}
        reason = f"it means layers that have none: {listed(order, 3)}"
    except NoMatchError as error:
        order, reason = {}, str(error)
    meant = [site for site in sites if site.name in order]
    if not meant:
        keys = [site.key for site in sites]
        word = which if isinstance(which, str) else ""
        hint = closest(word, dict.fromkeys([*keys, *(site.name for site in sites)]))
        raise KeyError(
            f"no site is {quote(which)}: {reason}; sites{hint or f': {listed(keys, 5)}'}"
        )
    return tuple(sorted(meant, key=lambda site: order[site.name]))


def _of_class(
    kind: type[Regularizer], base: nn.Module, hooks: Sequence[SiteHook]
) -> tuple[Site, ...]:
    order = {name: i for i, (name, _) in enumerate(named_modules(base))}
    meant = [hook for hook in hooks if isinstance(hook.site.regularizer, kind)]
    if not meant:
        labels = dict.fromkeys(hook.site.regularizer.label for hook in hooks)
        raise KeyError(f"no site has a {kind.__name__} (there are: {', '.join(labels)})")
    meant.sort(key=lambda hook: order.get(hook.owner_name, len(order)))
    return tuple(hook.site for hook in meant)


def _nothing_kept(site: Site) -> str:
    """Why a site has kept nothing."""
    life = site.counter.snapshot()
    if not life.calls:
        return "no call of the layer was seen: run a forward, with active='train' in training mode"
    if not life.active:
        return (
            "at all its calls the attachment was paused, or the layer was in evaluation mode: "
            "Capture(active='always')"
        )
    return (
        "records of its calls are not copied, saved or loaded, and none are made inside torch.func "
        "or on the meta device, nor of gradients alone under no_grad(): run a forward first"
    )
