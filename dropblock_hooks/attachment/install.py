"""Installs the hooks of placements on the layers of a model; all or none."""

from collections import Counter
from collections.abc import Callable

from torch import nn

from ..observers.base import Observer
from ..selectors.wrappers import bare_type
from ..sites.hooks import SiteHook
from ..sites.observe import ObserveHook
from ..sites.parameters import ParameterHook
from ..sites.retune import RetuneHook
from ..sites.run import Run
from ..sites.site import Site
from .attachment import Attachment
from .checks import ModelHook
from .resolve import Placement


def make_hook(site: Site, p: Placement) -> SiteHook:
    """The hook that a site needs."""
    if p.target.parameter is not None:
        return ParameterHook(site, p.target.parameter)
    if p.attribute is not None:
        return RetuneHook(site, p.attribute)
    if isinstance(p.regularizer, Observer):
        return ObserveHook(site)
    return SiteHook(site)


def install(
    base: nn.Module,
    placements: list[Placement],
    run: Run,
    make: Callable[[Site, Placement], SiteHook] = make_hook,
) -> Attachment:
    """Put the hooks of all placements on a model. If one fails, remove them all.

    `make` makes the hook of a site; all sites share `run`.
    """
    hooks = []
    for order, (key, p) in enumerate(zip(site_keys(placements), placements, strict=True)):
        name, kind = p.target.name, bare_type(p.target.module).__name__
        site = Site(key, name, kind, p.regularizer, run, p.target.aliases, p.facts)
        site.order, site.position = order, p.position
        site.selector = str(p.entry.selector)
        hooks.append(make(site, p))
    installed = [(p.target.module, hook) for p, hook in zip(placements, hooks, strict=True)]
    run.keys = tuple(hook.site.key for hook in hooks)
    attachment = Attachment(base, run, installed)
    try:
        for module, hook in installed:
            hook.install(module)
            hook.look(module)
        if any(hook.site.reader.needs_grids for hook in hooks):
            run.grids.watch(base)
        base.register_forward_hook(ModelHook(run, hooks))
    except BaseException:
        attachment.remove()
        raise
    return attachment


def site_keys(placements: list[Placement]) -> list[str]:
    """The key of each site: its layer and its regularizer, and a number if that is not unique."""
    keys: list[str] = []
    repeated: Counter[str] = Counter()
    for p in placements:
        key = f"{p.target.name or '.'}/{p.regularizer.label}"
        repeated[key] += 1
        keys.append(key if repeated[key] == 1 else f"{key}#{repeated[key]}")
    return keys
