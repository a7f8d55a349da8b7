"""The sites of an Attachment that a key, a selector or a class of regularizers means."""

from collections.abc import Sequence

from torch import nn

from ..checks import closest
from ..quoting import listed, quote
from ..regularizers.base import Regularizer
from ..selectors.index import Index, NoMatchError
from ..selectors.select import Select, match
from ..selectors.wrappers import named_modules
from ..sites.hooks import SiteHook
from ..sites.site import Site


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
        names = [target.name for target in match(which, Index(base))]
    except NoMatchError as error:
        raise KeyError(_nothing(which, sites, str(error))) from None
    named: dict[str, list[Site]] = {}
    for site in sites:
        named.setdefault(site.name, []).append(site)
    meant = [site for name in names for site in named.get(name, ())]
    if not meant:
        reason = f"it means layers that have none: {listed(names, 3)}"
        raise KeyError(_nothing(which, sites, reason))
    return tuple(meant)


def _nothing(which: str | Select, sites: Sequence[Site], reason: str) -> str:
    """Why nothing is meant: by a key that is mistyped, or a selector."""
    keys = [site.key for site in sites]
    word = which if isinstance(which, str) else ""
    hint = closest(word, dict.fromkeys([*keys, *(site.name for site in sites)]))
    return f"no site is {quote(which)}: {reason}; sites{hint or f': {listed(keys, 5)}'}"


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
