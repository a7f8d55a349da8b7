"""What the sites of a `Capture` have kept, by layer; and why nothing was."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..observers.capture import Capture
from ..observers.kept_calls import Record
from ..quoting import listed, quote
from ..sites.hooks import SiteHook
from ..sites.shared import Control
from ..sites.site import Site
from .compiled import has_compiled
from .find import find


def captured(
    which: Any, base: nn.Module, control: Control, hooks: Sequence[SiteHook]
) -> dict[str, list[Record]]:
    """The records by layer, oldest first; where a layer has several sites, by their keys.

    Raises:
        KeyError: where no site that is meant keeps any.
        RuntimeError: where all of them have kept nothing, with the cause.
    """
    meant = find(Capture if which is None else which, base, hooks) if hooks else ()
    sites = [site for site in meant if isinstance(site.regularizer, Capture)]
    if not sites:
        there = f"; {quote(which)} has {listed([s.key for s in meant], 3)}" if meant else ""
        raise KeyError(f"no Capture is attached there{there}: attach(model, {{...: Capture()}})")
    times = Counter(site.name for site in sites)
    found = {
        (site.name or ".") if times[site.name] == 1 else site.key: site.bound.records
        for site in sites
    }
    if not any(found.values()):
        causes = {_cause(site, control): None for site in sites}
        raise RuntimeError(f"nothing was captured at {listed(found, 3)}: {'; '.join(causes)}")
    return found


def _cause(site: Site, control: Control) -> str:
    """Why a site has kept nothing."""
    life = site.record.read(elements=False).life
    if not life.calls:
        if not control.installed:
            return "the layer was not called before the attachment was removed"
        if site.regularizer.active == "train" and has_compiled():  # it counts no evaluation
            return "the layer was never called in training mode: Capture(active='always')"
        if not control.record.read(elements=False).life.calls:
            return "the model was not called yet: run a forward first"
        return "the layer was never called"
    if not life.active and not control.enabled:
        return "the attachment is paused"
    if not life.active and not life.trained and site.regularizer.active == "train":
        return "the layer was called in evaluation mode alone: Capture(active='always')"
    if not life.active:
        return "the attachment was paused at all its calls"
    return (
        "records of its calls are not copied, saved or loaded, and none are made inside torch.func "
        "or on the meta device, nor of gradients alone under no_grad(): run a forward first"
    )
