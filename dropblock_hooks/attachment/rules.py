"""The rules of `Watchdog`: what the numbers of its sites mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..observers.watchdog import Watchdog
from ..observers.watched import Clock, can_die
from ..sites.grad_scaler import in_use
from ..sites.shared import Control, is_enabled
from ..sites.site import Site
from .finding import Alert
from .maker import Sight, find_maker

_OVERFLOWS = 10
"""So many in a row a GradScaler may take to find its scale."""
_ZERO = 1e-12
_FEW = 4
"""Fewer layers have no depth."""


class Looked(NamedTuple):
    """All that was read in one look.

    Attributes:
        base: the model.
        control: of the Attachment.
        sights: the sites of every `Watchdog`.
        sites: all sites of the Attachment.
    """

    base: nn.Module
    control: Control
    sights: list[Sight]
    sites: list[Site]

    @property
    def has_calls(self) -> bool:
        """Whether any layer was called, or got a gradient."""
        return any(s.kept.calls or s.kept.grads or s.kept.bad_calls for s in self.sights)

    @property
    def has_statistics(self) -> bool:
        """Whether there were calls enough to judge by."""
        return any(s.kept.calls >= _dog(s).min_calls for s in self.sights)

    def under(self, rule: str) -> list[Sight]:
        """The sites with this rule."""
        return [s for s in self.sights if rule in _dog(s).names]

    def alert(
        self, dog: Watchdog, site: Site, kind: str, figure: float, message: str, cure: str
    ) -> Alert:
        """What was found at a site."""
        return Alert(
            site.key, kind, message, site.name, self.control.epoch, figure, cure, dog.action
        )


def _dog(sight: Sight) -> Watchdog:
    observer: Watchdog = sight.site.regularizer  # type: ignore[assignment]  # who looks has asked
    return observer


def alerts_of(looked: Looked) -> Iterator[Alert]:
    """All that is wrong, by the rules."""
    yield from _nonfinite(looked)
    if looked.has_statistics:
        yield from _along_depth(looked)
        yield from _dead(looked)
        yield from _saturated(looked)
        yield from _no_gradient(looked)
        yield from _realized_rate(looked)
        yield from _clipped(looked)


def _nonfinite(looked: Looked) -> Iterator[Alert]:
    sights = looked.under("nonfinite")
    scaler = looked.control.grad_scaler
    scaled = bool(scaler) and is_enabled(scaler)
    found = find_maker(sights, backward=not scaled or _overflows(looked, sights) >= _OVERFLOWS)
    if found is None:
        if not scaled:
            yield from _bad_parameters(looked, sights)
        return
    sight, kept = found.sight, found.sight.kept
    if found.backward:
        n, what = kept.grads, "gradients that are not finite (NaN or Inf)"
        message = (
            f"it has made {what}, from finite ones" if found.made else f"{what} came from the loss"
        )
        cure = _cure_backward(looked, found.made, scaled)
    else:
        n, what = kept.bad_calls, "NaN or Inf"
        share = f" in {kept.bad_calls:g} of {kept.calls:g} calls"
        message = (
            f"its output held {what}{share}, and it was given finite values"
            if found.made
            else f"its output held {what}{share}, as did what it was given: they came with the "
            "batch, or from code in front of it that is not watched"
        )
        cure = _cure_forward(sight, sights, found.made)
    yield looked.alert(_dog(sight), sight.site, "nonfinite", n, message, cure)


def _overflows(looked: Looked, sights: Sequence[Sight]) -> float:
    """How many overflows there were in a row: scales, as an update may have several backwards; of a
    scale that nobody moves, backwards.
    """
    scaler, clock = looked.control.grad_scaler, Clock.of(looked.control.shared)
    scales = max((s.kept.most_scales for s in sights), default=0.0)
    initial = getattr(scaler, "_init_scale", None)
    clock.rescaled |= scales > 1 or (initial is not None and scaler.get_scale() != initial)
    if clock.rescaled:
        return scales
    grads = [s.kept.grads for s in sights if s.kept.grads]
    passes = min(grads, default=0.0)  # a layer that is called several times has more
    return max((s.kept.longest * passes / s.kept.grads for s in sights if s.kept.grads), default=0)


def _cure_forward(sight: Sight, sights: Sequence[Sight], made: bool) -> str:
    bad = _bad_names(sight, sights)
    if bad:
        return (
            f"its parameter '{bad[0]}' is not finite: go back to a checkpoint, and lower the "
            "learning rate or clip gradients (ClipGradNorm)"
        )
    if not made:
        return "look at the inputs"
    return (
        "look there for a division by 0, a log or root of 0, an exponential, or an overflow of "
        "half precision"
    )


def _bad_names(sight: Sight, sights: Sequence[Sight]) -> list[str]:
    """The parameters that are not finite; not those of layers inside that are watched as well."""
    others = {
        id(p) for s in sights if s is not sight and s.kept.calls for p in _own(s.module).values()
    }
    own = {id(p) for p in _own(sight.module).values()}
    return [
        name
        for name, p in sight.module.named_parameters()
        if (id(p) in own or id(p) not in others) and not _finite(p)
    ]


def _cure_backward(looked: Looked, made: bool, scaled: bool) -> str:
    if scaled:
        return f"{_OVERFLOWS} overflows in a row are no search for a scale: keep it in float32"
    if looked.control.grad_scaler is None and in_use():
        return (
            "a GradScaler is in use in this process: if it scales this loss, give it, "
            "grad_scaler=scaler, and its overflows are silent; else give grad_scaler=False"
        )
    where = "there" if made else "at the loss"
    return f"look {where} for a root, norm or logarithm at 0, or for an overflow of half precision"


def _finite(x: Tensor | None) -> bool:
    local = getattr(x, "_local_tensor", x)
    return local is None or local.is_meta or bool(torch.isfinite(local.detach()).all())


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module._parameters.items() if p is not None}


def _bad_parameters(looked: Looked, sights: Sequence[Sight]) -> Iterator[Alert]:
    """Layers of which a parameter alone has got a bad gradient: the first layer, say."""
    for sight in sorted(sights, key=lambda s: -s.kept.at):
        for name, p in _own(sight.module).items():
            if not _finite(p.grad):
                message = f"the gradient of its '{name}' is not finite (NaN or Inf), and what came "
                message += "to its output was"
                cure = _cure_backward(looked, True, False)
                yield looked.alert(_dog(sight), sight.site, "nonfinite", 1.0, message, cure)
                return


def _along_depth(looked: Looked) -> Iterator[Alert]:
    for kind in ("vanishing", "exploding"):
        layers = [
            s
            for s in looked.under(kind)
            if s.kept.grads >= _dog(s).min_calls
            and any(p.requires_grad for p in _own(s.module).values())
        ]
        layers.sort(key=lambda s: s.kept.at)
        if len(layers) < _FEW:
            continue
        end = max(1, len(layers) // 4)
        norms = [s.kept.norm / s.kept.grads for s in layers]
        # a branch may have small gradients by design: neither rule goes by the smallest
        vanishing = kind == "vanishing"
        late = median(norms[-end:]) if vanishing else max(norms[-end:])
        early = max(norms[:end]) if vanishing else min(norms[:end])
        if not late:
            continue
        ratio = early / late
        sight, last, limit = layers[0], layers[-1], _dog(layers[0]).max_ratio
        if vanishing and ratio < 1 / limit:
            message = (
                f"gradients of the first {end} of {len(layers)} layers are at most {early:.3g}, "
                f"and {late:.3g} at the last, up to '{last.site.name}': they vanish"
            )
            cure = "put in shortcuts or normalization, or begin with larger weights"
        elif not vanishing and ratio > limit:
            message = (
                f"gradients of the first {end} of {len(layers)} layers are at least {early:.3g}, "
                f"and {late:.3g} at the last, up to '{last.site.name}': they explode"
            )
            cure = "begin with smaller weights, put in normalization, or clip (ClipGradNorm)"
        else:
            continue
        yield looked.alert(_dog(sight), sight.site, kind, ratio, message, cure)


def _dead(looked: Looked) -> Iterator[Alert]:
    for sight in looked.under("dead"):
        dog, peaks = _dog(sight), sight.peaks
        if not peaks or not can_die(sight.module) or sight.kept.calls < dog.min_calls:
            continue
        share = sum(peak <= _ZERO for peak in peaks) / len(peaks)
        if share > dog.max_dead:
            message = f"{share:.0%} of its {len(peaks)} channels were zero all the time"
            cure = "lower the learning rate, look at the bias in front, or use a leaky activation"
            yield looked.alert(dog, sight.site, "dead", share, message, cure)


def _saturated(looked: Looked) -> Iterator[Alert]:
    for sight in looked.under("saturated"):
        dog, kept = _dog(sight), sight.kept
        share = kept.near / kept.calls if kept.calls >= dog.min_calls else 0.0
        if share > dog.max_saturated:
            message = f"{share:.0%} of its values were within 1 % of its bounds"
            cure = "begin with smaller weights in front, or put normalization there"
            yield looked.alert(dog, sight.site, "saturated", share, message, cure)


def _no_gradient(looked: Looked) -> Iterator[Alert]:
    most = max((s.kept.grads for s in looked.sights), default=0.0)
    any_left = any(_has_gradient(p) for p in looked.base.parameters())
    for sight in looked.under("no_gradient"):
        dog, kept, own = _dog(sight), sight.kept, _own(sight.module)
        trained = [p for p in own.values() if p.requires_grad]
        if most < dog.min_calls or not trained:  # a frozen layer is meant to have none
            continue
        calls = kept.calls - sight.site.bound.frozen
        if any(map(_has_gradient, trained)):
            continue
        elif calls >= dog.min_calls and not kept.grads:
            message = f"no gradient has come to it in {calls:g} calls"
            cure = (
                "look for a detach() or no_grad behind it, or for a branch that the loss leaves out"
            )
        elif kept.grads >= dog.min_calls and not kept.norm and math.isinf(kept.grad_bad):
            message = f"all of its {kept.grads:g} gradients were zero"
            cure = "look for dead units, a weight of zero, or a mask behind it"
        elif not kept.calls and any_left:
            message = "it was never called in training, and its parameters have no gradient"
            cure = "remove it, or look why the model leaves it out"
        else:
            continue
        yield looked.alert(dog, sight.site, "no_gradient", 0.0, message, cure)


def _has_gradient(p: nn.Parameter) -> bool:
    """Whether it has one that is not zero: zeros are what ``zero_grad(set_to_none=False)`` left."""
    return p.grad is not None and bool((p.grad != 0).any())


def _guard(looked: Looked, rule: str) -> Watchdog | None:
    """The `Watchdog` that looks at regularizers by this rule."""
    found = looked.under(rule)
    return _dog(found[0]) if found else None


def _realized_rate(looked: Looked) -> Iterator[Alert]:
    dog = _guard(looked, "realized_rate")
    for site in looked.sites if dog else ():
        if site.regularizer.acts_on == "gradient" or not site.regularizer.random:
            continue
        counts = site.record.read().shown
        realized, nominal = counts.share(), counts.expected_share()
        if realized is None or nominal is None or dog is None or counts.active < dog.min_calls:
            continue
        nominal = _on_average(site, nominal)
        if not 0.0 < nominal < 1.0:
            continue
        draws = counts.active * _draws(site, Clock.of(looked.control.shared))
        surprise = 2 * draws * _divergence(realized, nominal)
        if surprise > dog.max_z**2 and abs(realized - nominal) > dog.margin * nominal:
            message = f"it drops {realized:.3g}, and should drop {nominal:.3g}"
            cure = "look how it scales its rate (its block, its layout), or whether it was on"
            yield looked.alert(dog, site, "realized_rate", realized, message, cure)


def _on_average(site: Site, nominal: float) -> float:
    """The share that is dropped on average at a nominal rate, as far as that is known."""
    regularizer: Any = site.regularizer
    maps = site.record.read(elements=False).maps
    if site.regularizer.spatial is not None and maps is None:
        return nominal
    share = regularizer.expected_share(site.values, None if maps is None else maps[1])
    return nominal if share is None or not site.rate else nominal * share / site.rate


def _draws(site: Site, clock: Clock) -> float:
    """How many numbers a call draws at least: of compiled code, one."""
    if getattr(site.regularizer, "mode", "row") == "batch":
        return 1.0
    return max(1.0, clock.samples / clock.calls) if clock.calls else 1.0


def _divergence(q: float, p: float) -> float:
    """Of a share from a probability, in nats: of Chernoff's bound, which holds for few draws and
    small rates as well. Twice this, times the draws, is the square of standard errors where these
    are small.
    """
    return sum(a * math.log(a / b) for a, b in ((q, p), (1 - q, 1 - p)) if a > 0)


def _clipped(looked: Looked) -> Iterator[Alert]:
    dog = _guard(looked, "clipped")
    for site in looked.sites if dog else ():
        bound = site.regularizer.acts_on == "gradient" and site.regularizer.reads_grad_scale
        counts = site.record.read().shown
        share = counts.share()
        if dog is None or not bound or share is None or counts.active < dog.min_calls:
            continue
        if share > dog.max_clipped:
            norm = site.mean_norm
            seen = "" if norm is None else f"; the mean norm was {norm:.3g}"
            message = f"its bound has changed {share:.0%} of the gradients{seen}"
            cure = (
                "raise the bound, or lower the learning rate: it now sets the length of each step"
            )
            yield looked.alert(dog, site, "clipped", share, message, cure)
