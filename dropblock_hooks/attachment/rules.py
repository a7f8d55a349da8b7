"""The rules of `Watchdog`: what the numbers of its sites mean.

For NaN and Inf in a forward, ``nonfinite`` names the layer that made them: it gave bad values and
was given finite ones. In a backward it names the first layer that a bad gradient reaches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..findings import Finding, Kind, Severity
from ..observers.watchdog import Watchdog
from ..observers.watched import Watched
from ..quoting import listed
from ..sites.grad_scaler import is_enabled
from ..sites.run import Run
from ..sites.site import Site

_SMALLEST_SCALE = 1.0
"""A GradScaler whose scale is below this is not recovering from its overflows."""
_FEW = 4
"""Fewer layers have no depth."""


class Sight(NamedTuple):
    """What was read at one `Watchdog` site.

    Attributes:
        site: the site.
        module: its layer.
        kept: its numbers.
    """

    site: Site
    module: nn.Module
    kept: Watched

    @property
    def dog(self) -> Watchdog:
        """The observer of the site."""
        observer: Watchdog = self.site.regularizer  # type: ignore[assignment]  # checked before
        return observer

    @property
    def judged(self) -> bool:
        """Whether the layer was called often enough to judge by."""
        return self.kept.calls >= self.dog.min_calls

    @property
    def own(self) -> dict[str, nn.Parameter]:
        """The parameters of the layer itself."""
        return {name: p for name, p in self.module._parameters.items() if p is not None}

    def finding(self, kind: Kind, text: str, cure: str) -> Finding:
        """A finding about this site."""
        severity = Severity.ERROR if kind == Kind.NONFINITE else Severity.WARNING
        return Finding(kind, severity, (self.site.key,), text, cure, self.site.run.epoch)


class Looked(NamedTuple):
    """Everything that was read in one look.

    Attributes:
        base: the model.
        run: of the attachment.
        sights: every `Watchdog` site.
        statistics: whether more is judged than values that are not finite.
    """

    base: nn.Module
    run: Run
    sights: list[Sight]
    statistics: bool

    @property
    def has_calls(self) -> bool:
        """Whether any layer was called, or got a gradient."""
        return any(s.kept.calls or s.kept.grads or s.kept.bad_calls for s in self.sights)

    @property
    def has_statistics(self) -> bool:
        """Whether statistics are judged, and there were enough calls to judge by."""
        return self.statistics and any(s.judged for s in self.sights)

    def under(self, rule: Kind) -> list[Sight]:
        """The sites with this rule."""
        return [s for s in self.sights if rule in s.dog.names]


def judge(looked: Looked) -> Iterator[Finding]:
    """Everything that is wrong, by the rules."""
    yield from _nonfinite(looked)
    if looked.has_statistics:
        yield from _along_depth(looked)
        yield from _dead(looked)
        yield from _saturated(looked)
        yield from _no_gradient(looked)


def first_cause(findings: Sequence[Finding], looked: Looked) -> list[Finding]:
    """The finding that came first, which tells the others as its likely effects.

    NaN and Inf come before all; then what the forward shows, in the order of the layers; then what
    the backward shows, in reverse order. Layers that were never called are apart.
    """
    at = {sight.site.key: sight.kept.at for sight in looked.sights}

    def order(each: Finding) -> tuple[bool, int, int]:
        time, stage = at.get(each.sites[0], 0), _STAGES.get(each.kind, 0)
        return each.kind != Kind.NONFINITE, stage, -time if stage else time

    apart = [each for each in findings if not at.get(each.sites[0])]
    effects = sorted((each for each in findings if each not in apart), key=order)
    if len(effects) < 2:
        return [*effects, *apart]
    first, layers = effects[0], defaultdict(list)
    for each in effects[1:]:
        layers[each.kind].append(each.layer)
    told = "; ".join(f"{kind} at {listed(names, 5)}" for kind, names in layers.items())
    return [replace(first, text=f"{first.text}. Likely effects of it: {told}"), *apart]


_STAGES = {Kind.NO_GRADIENT: 1, Kind.VANISHING: 2, Kind.EXPLODING: 2}
"""What the backward shows; the last are about the whole model."""


def _nonfinite(looked: Looked) -> Iterator[Finding]:
    """The first bad value, in the forward or the backward."""
    sights = looked.under(Kind.NONFINITE)
    scaler = looked.run.scale.scaler
    scaled = bool(scaler) and is_enabled(scaler)
    # overflows are how a GradScaler finds its scale
    backward = not scaled or scaler.get_scale() < _SMALLEST_SCALE
    forward = min(sights, key=lambda s: s.kept.bad, default=None)
    if forward is None:
        return
    reached = min(sights, key=lambda s: s.kept.grad_bad)
    if backward and reached.kept.grad_bad < forward.kept.bad:
        text = (
            "a gradient that is not finite (NaN or Inf) reached its output, as the first of the "
            "watched layers: the loss or the code behind this layer made it"
        )
        cure = (
            "Look behind the layer for a root, norm or logarithm at 0, or an overflow. If a "
            "GradScaler scales this loss, pass it, attach(..., grad_scaler=scaler), so that its "
            "overflows are not reported"
        )
        if scaled:
            cure = "The GradScaler is not recovering: run this layer in float32"
        yield reached.finding(Kind.NONFINITE, text, cure)
    elif forward.kept.bad < math.inf:
        yield _of_forward(forward, sights)


def _of_forward(first: Sight, sights: Sequence[Sight]) -> Finding:
    """The layer that made the first bad value, or where it was first seen.

    Where no layer has made it, code between layers has: that of the innermost layer around them
    that was given finite values.
    """
    names = [f".{name}" for name in (first.site.name, *first.site.aliases)]
    makers = [
        s
        for s in sights
        if s.kept.made == s.kept.bad < math.inf
        and any(name.startswith(f".{s.site.name}.".replace("..", ".")) for name in names)
    ]
    if first.kept.made == first.kept.bad:
        makers = [first]
    sight = max(makers, key=lambda s: len(s.site.name), default=first)
    kept = sight.kept
    text = f"its output held NaN or Inf in {kept.bad_calls:g} of {kept.calls:g} calls, "
    if makers:
        text += "and its input was finite"
    else:
        text += "and so did its input: the batch, or code that is not watched, made them"
    return sight.finding(Kind.NONFINITE, text, _cure_forward(sight, sights, bool(makers)))


def _cure_forward(sight: Sight, sights: Sequence[Sight], made: bool) -> str:
    own = {id(p) for p in sight.own.values()}
    # a layer inside that is watched answers for its own parameters
    others = [(p, s) for s in sights for p in s.own.values() if id(p) not in own]
    theirs = {id(p) for p, s in others if s.kept.calls}
    named = sight.module.named_parameters()
    name = next((name for name, p in named if id(p) not in theirs and not _finite(p)), None)
    # where others are bad too, a step of the optimizer may have spread it after this call
    spread = name is not None and any(not _finite(p) for p, _ in others)
    if name is not None and not spread:
        return (
            f"Its parameter '{name}' is not finite: go back to a checkpoint, and lower the "
            "learning rate or clip gradients (ClipGradNorm)"
        )
    cure = (
        "Look there for a division by 0, a logarithm or root of 0, an exponential, or an overflow "
        "in half precision"
        if made
        else "Check the inputs"
    )
    return f"{cure}. {_SPREAD}" if spread else cure


_SPREAD = (
    "Parameters of several layers are not finite now, as after a step of the optimizer with such "
    "gradients: go back to a checkpoint"
)


def _finite(p: Tensor) -> bool:
    local = getattr(p, "_local_tensor", p)
    return local.is_meta or bool(torch.isfinite(local.detach()).all())


def _along_depth(looked: Looked) -> Iterator[Finding]:
    for kind in (Kind.VANISHING, Kind.EXPLODING):
        layers = [
            s
            for s in sorted(looked.under(kind), key=lambda s: s.kept.at)
            if s.kept.grads >= s.dog.min_calls and any(p.requires_grad for p in s.own.values())
        ]
        if len(layers) < _FEW:
            continue
        end = max(1, len(layers) // 4)
        norms = [s.kept.norm / s.kept.grads for s in layers]
        vanishing = kind == Kind.VANISHING
        # a branch may have small gradients by design: neither rule uses the smallest
        late = median(norms[-end:]) if vanishing else max(norms[-end:])
        early = max(norms[:end]) if vanishing else min(norms[:end])
        limit = layers[0].dog.max_ratio
        if not late or not early:  # a layer without any gradient is dead
            continue
        if early * limit >= late if vanishing else early <= limit * late:
            continue
        text = (
            f"gradient norms of the first {end} of {len(layers)} layers are "
            f"{'at most' if vanishing else 'at least'} {early:.3g}, and {late:.3g} at the last "
            f"layers, up to '{layers[-1].site.name}'"
        )
        yield layers[0].finding(kind, text, _CURES[kind])


_CURES = {
    Kind.VANISHING: "Add shortcuts or normalization, or start with larger weights",
    Kind.EXPLODING: "Start with smaller weights, add normalization, or clip (ClipGradNorm)",
    Kind.DEAD: "Lower the learning rate, check the bias in front, or use a leaky activation",
    Kind.SATURATED: "Start with smaller weights in front, or add normalization there",
}


def _dead(looked: Looked) -> Iterator[Finding]:
    for sight in looked.under(Kind.DEAD):
        alive = sight.kept.units["alive"]
        if sight.judged and len(alive):
            share = 1.0 - alive.float().mean().item()
            if share > sight.dog.max_dead:
                text = f"{share:.0%} of its {len(alive)} channels were always zero"
                yield sight.finding(Kind.DEAD, text, _CURES[Kind.DEAD])


def _saturated(looked: Looked) -> Iterator[Finding]:
    for sight in looked.under(Kind.SATURATED):
        share = sight.kept.near / max(sight.kept.calls, 1)
        if sight.judged and share > sight.dog.max_saturated:
            text = f"{share:.0%} of its values were within 1 % of its bounds"
            yield sight.finding(Kind.SATURATED, text, _CURES[Kind.SATURATED])


def _no_gradient(looked: Looked) -> Iterator[Finding]:
    most = max((s.kept.grads for s in looked.sights), default=0.0)
    any_left = any(_has_gradient(p) for p in looked.base.parameters())
    for sight in looked.under(Kind.NO_GRADIENT):
        few, kept = sight.dog.min_calls, sight.kept
        trained = [p for p in sight.own.values() if p.requires_grad]
        if most < few or not trained:  # a frozen layer is meant to have none
            continue
        if any(map(_has_gradient, trained)):
            continue
        none = kept.differentiable >= few and not kept.grads
        zeros = kept.grads >= few and not kept.norm and math.isinf(kept.grad_bad)
        if not (none or zeros or (not kept.calls and any_left)):
            continue
        text = f"no gradient, or only zeros, reached it in {kept.calls:g} calls in training"
        cure = (
            "Look behind it for a detach(), no_grad(), a mask, dead units, or a branch without "
            "loss; a layer that the model never calls can be removed"
        )
        yield sight.finding(Kind.NO_GRADIENT, text, cure)


def _has_gradient(p: nn.Parameter) -> bool:
    """Whether it has one that is not zero: zeros are what ``zero_grad(set_to_none=False)`` left."""
    return p.grad is not None and bool((p.grad != 0).any())
