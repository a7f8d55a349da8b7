"""The looks of a `Watchdog` at its sites, and its rules, which judge all sites together."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from ..findings import Finding, Kind, Severity, tell
from ..observers.watchdog import Clock, Watchdog, Watched
from ..quoting import listed
from ..selectors.wrappers import find_module
from ..sites.hooks import SiteHook
from ..sites.run import Run, is_enabled
from ..sites.site import Site

_SMALLEST_SCALE = 1.0  # a GradScaler below it is not recovering from its overflows
_FEW = 4  # fewer layers have no depth
_OF_BACKWARD = (Kind.NO_GRADIENT, Kind.VANISHING, Kind.EXPLODING)
_TRAINED = (
    "Earlier looks did not find it, so the training has made it: lower the learning rate, or clip "
    "(ClipGradNorm)"
)
_CURES = {
    Kind.VANISHING: "Add shortcuts or normalization, or start with larger weights",
    Kind.EXPLODING: "Start with smaller weights, add normalization, or clip (ClipGradNorm)",
    Kind.DEAD: "Lower the learning rate, check the bias in front, or use a leaky activation",
    Kind.SATURATED: "Start with smaller weights in front, or add normalization there",
    Kind.NO_GRADIENT: (
        "Look behind it for a detach(), no_grad(), a mask, dead units, or a branch without loss; "
        "a layer that the model never calls can be removed"
    ),
}


class Sight(NamedTuple):
    """A `Watchdog` site with its layer, its observer and its numbers."""

    site: Site
    module: nn.Module
    dog: Watchdog
    kept: Watched

    @property
    def judged(self) -> bool:
        """Whether the layer was called often enough to judge by."""
        return self.kept.calls >= self.dog.min_calls

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters of the layer itself that get a gradient."""
        return [p for p in self.module.parameters(recurse=False) if p.requires_grad]

    def finding(self, kind: Kind, text: str, cure: str = "") -> Finding:
        severity = Severity.ERROR if kind == Kind.NONFINITE else Severity.WARNING
        cure = cure or _CURES[kind]
        return Finding(kind, severity, (self.site.key,), text, cure, self.site.run.epoch)


def new_alerts(
    base: nn.Module, run: Run, hooks: Sequence[SiteHook], statistics: bool = True
) -> list[Finding]:
    """The findings that the last look did not have; begins new counts.

    Without `statistics`, only values that are not finite are judged.
    """
    run.take_counts()
    sights, clock = _sights(base, hooks), Clock.of(run.shared)
    if not sights or not run.installed:
        return []
    if run.scaler and is_enabled(run.scaler):
        clock.note_scale(run.scaler.get_scale())
    if statistics:
        clock.begin()
    statistics = statistics and any(sight.judged for sight in sights)
    before, found = clock.alerts, _judge(base, run, sights, statistics)
    if any(s.kept.calls or s.kept.grads or s.kept.bad_calls for s in sights):
        run.told -= before.keys() - found.keys()
        clock.alerts = found
    clock.looks += statistics
    for sight in sights:
        sight.kept.forget(statistics)
    return _first_cause([found[key] for key in found if key not in before], sights)


def alerts_now(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """The findings of the last look that hold, and those since then. Reports nothing."""
    run.take_counts()
    sights = _sights(base, hooks)
    found = _judge(base, run, sights, any(sight.judged for sight in sights))
    return _first_cause(list((Clock.of(run.shared).alerts | found).values()), sights)


def tell_alerts(run: Run, hooks: Sequence[SiteHook], findings: Sequence[Finding]) -> None:
    """Report findings by the `action` of the `Watchdog` of their site, a WatchdogError last."""
    dogs: dict[str, Any] = {hook.site.key: hook.site.regularizer for hook in hooks}
    actions = [(dogs[each.sites[0]].action, each) for each in findings]
    for action, each in sorted(actions, key=lambda pair: pair[0] == "raise"):
        tell([each], run.told, action)


def _sights(base: nn.Module, hooks: Sequence[SiteHook]) -> list[Sight]:
    """All sites of a `Watchdog`, read, which waits for the device."""
    sights = []
    for site in (hook.site for hook in hooks):
        module, dog = find_module(base, site.name), site.regularizer
        if isinstance(dog, Watchdog) and module is not None:
            sights.append(Sight(site, module, dog, site.bound.open["watched"]))
            sights[-1].kept.read()
    return sights


def _first_cause(findings: Sequence[Finding], sights: Sequence[Sight]) -> list[Finding]:
    """The first finding, whose text lists the others as its likely effects.

    NaN and Inf come first. Then come findings of the forward, in the order of the layers, and
    findings of the backward, in reverse order. Layers that were never called stay separate.
    """
    at = {sight.site.key: sight.kept.at for sight in sights}

    def order(each: Finding) -> tuple[bool, int, int]:
        time, backward = at[each.sites[0]], each.kind in _OF_BACKWARD
        stage = backward + (each.kind in _OF_BACKWARD[1:])  # a missing gradient comes first
        return each.kind != Kind.NONFINITE, stage, -time if backward else time

    apart = [each for each in findings if not at.get(each.sites[0])]
    effects = sorted((each for each in findings if each not in apart), key=order)
    if len(effects) < 2:
        return [*effects, *apart]
    layers = defaultdict(list)
    for each in effects[1:]:
        layers[each.kind].append(each.layer)
    told = "; ".join(f"{kind} at {listed(names, 5)}" for kind, names in layers.items())
    text = f"{effects[0].text}. Likely effects of it: {told}"
    return [replace(effects[0], text=text), *apart]


def _judge(
    base: nn.Module, run: Run, sights: list[Sight], statistics: bool
) -> dict[tuple[str, str], Finding]:
    """The findings of all rules, by site and kind. Without `statistics`, their findings hold."""
    clock = Clock.of(run.shared)
    before = clock.alerts
    by_rule = {kind: [s for s in sights if kind in s.dog.names] for kind in Kind}
    found = [*_nonfinite(run, by_rule[Kind.NONFINITE])]
    if found and any(kind == Kind.NONFINITE for _, kind in before):
        return before  # NaN comes from NaN
    if statistics:
        found += _along_depth(Kind.VANISHING, by_rule[Kind.VANISHING])
        told = [each.cure for (_, kind), each in before.items() if kind == Kind.EXPLODING]
        cure = told[0] if told else _TRAINED if clock.looks else ""
        found += _along_depth(Kind.EXPLODING, by_rule[Kind.EXPLODING], cure)
        found += [each for sight in sights if sight.judged for each in _of_activation(sight)]
        found += _no_gradient(base, sights, by_rule[Kind.NO_GRADIENT])
    else:
        found += [each for each in before.values() if each.kind != Kind.NONFINITE]
    return {(each.sites[0], each.kind): each for each in found}


def _nonfinite(run: Run, sights: list[Sight]) -> Iterator[Finding]:
    """The layer that made the first bad value, or the first that a bad gradient reaches."""
    if not sights:
        return
    forward = min(sights, key=lambda s: s.kept.bad)
    reached = min(sights, key=lambda s: s.kept.grad_bad)
    scaler = run.scaler
    scaled = bool(scaler) and is_enabled(scaler)
    # overflows are how a GradScaler finds its scale
    searching = scaled and scaler.get_scale() >= _SMALLEST_SCALE
    if reached.kept.grad_bad < forward.kept.bad and not searching:
        text = (
            "a gradient that is not finite (NaN or Inf) reached its output, as the first of the "
            "watched layers: the loss or the code behind this layer made it"
        )
        cure = (
            "Look behind the layer for a root, norm or logarithm at 0, or an overflow. If the "
            "gradients grew before, lower the learning rate. If a GradScaler scales this loss, "
            "pass it, attach(..., grad_scaler=scaler), so that its overflows are not reported"
        )
        if scaled:
            cure = "The GradScaler is not recovering: run this layer in float32"
        yield reached.finding(Kind.NONFINITE, text, cure)
    elif forward.kept.bad < math.inf:
        yield _of_forward(forward, sights, Clock.of(run.shared))
    elif run.ticker is None:  # compiled code measures each forward
        yield from _after_the_last_measured(sights, Clock.of(run.shared))


def _of_forward(first: Sight, sights: Sequence[Sight], clock: Clock) -> Finding:
    """The innermost layer, of the first with bad values and all around it, given finite values.

    If there is none, the first layer. If code between two layers made them, it is their parent.
    """
    names = [f"{name}." for name in (first.site.name, *first.site.aliases)]
    makers = [
        s
        for s in sights
        if s.kept.made == s.kept.bad < math.inf
        and any(name.startswith(f"{s.site.name}.".lstrip(".")) for name in names)
    ]
    sight = max(makers, key=lambda s: (s is first, len(s.site.name)), default=first)
    bad = _bad_parameters(sights)
    gap = clock.gap
    if bad and gap is not None and first.kept.bad > gap.time:
        clock.closely = True
        text = f"its output held NaN or Inf in training forward {gap.after}, and was finite before"
        when = f"between forward {gap.before} and forward {gap.after}"
        return _not_measured(sight, text, when, bad)
    measured = f"{sight.kept.bad_calls} of {sight.kept.calls} measured calls"
    text = f"its output held NaN or Inf in {measured}, "
    if makers:
        text += "and its input was finite"
        cure = (
            "Look there for a division by 0, a logarithm or root of 0, an exponential, an overflow "
            "in half precision, or an attention mask of only -inf. If the values grew before, "
            "lower the learning rate"
        )
    else:
        text += "and so did its input: the batch, or code that is not watched, made them"
        cure = "Check the inputs"
    if bad:
        cure += f". Not finite now: {listed(bad, 3)}. Go back to a checkpoint"
        cure += ", and lower the learning rate or clip gradients (ClipGradNorm)" if makers else ""
    return sight.finding(Kind.NONFINITE, text, cure)


def _after_the_last_measured(sights: Sequence[Sight], clock: Clock) -> Iterator[Finding]:
    """The finding that forwards which were not measured have left bad parameters, if they have."""
    if clock.last == clock.forwards:
        return
    bad = _bad_parameters([sight for sight in sights if sight.trained])
    if bad:
        clock.closely = True
        sight = next(sight for sight in sights if sight.trained and _bad_parameters([sight]))
        text = f"its parameters hold NaN or Inf after training forward {clock.forwards}"
        yield _not_measured(sight, text, f"after forward {clock.last}", bad)


def _not_measured(sight: Sight, text: str, when: str, bad: Sequence[str]) -> Finding:
    """The finding that NaN or Inf came in forwards that were not measured.

    An update has put it into parameters since then, so the first layer with bad values need not be
    the one that made them.
    """
    text += (
        f". The first NaN or Inf came {when}, in a forward that was not measured, so another "
        "layer, the batch or the loss may have made it. From now on, each forward is measured"
    )
    cure = (
        f"Not finite now: {listed(bad, 3)}. Go back to a checkpoint, and train on: the layer is "
        "named if it happens again. With every=1, each forward is measured from the start. If the "
        "values grew before, lower the learning rate, or clip gradients (ClipGradNorm)"
    )
    return sight.finding(Kind.NONFINITE, text, cure)


def _bad_parameters(sights: Sequence[Sight]) -> list[str]:
    """The parameters of the watched layers that are not finite."""
    bad = []
    for sight in sights:
        for name, p in sight.module.named_parameters(recurse=False):
            values = getattr(p, "_local_tensor", p).detach()  # of a sharded parameter
            if not (values.is_meta or torch.isfinite(values).all()):
                bad.append(f"parameter '{name}' of {sight.site.name or 'the model'}")
    return bad


def _along_depth(kind: Kind, sights: list[Sight], cure: str = "") -> Iterator[Finding]:
    """Gradients that shrink, or grow, from the last layers to the first."""
    layers = [s for s in sights if s.kept.grads >= s.dog.min_calls and s.trained]
    if len(layers) < _FEW:
        return
    layers.sort(key=lambda s: s.kept.at)
    end = max(1, len(layers) // 4)
    norms = [s.kept.norm / s.kept.grads for s in layers]
    first, last, ratio = norms[:end], norms[-end:], layers[0].dog.max_ratio
    # a branch may have small gradients by design: neither rule uses the smallest
    if kind == Kind.VANISHING:
        most, early, late = "most", max(first), median(last)
        wrong = early * ratio < late
    else:
        most, early, late = "least", min(first), max(last)
        wrong = early > ratio * late
    if early and late and wrong:  # a layer without any gradient is dead
        text = (
            f"gradient norms of the first {end} of {len(layers)} layers are at {most} "
            f"{early:.3g}, and {late:.3g} at the last layers, up to '{layers[-1].site.name}'"
        )
        yield layers[0].finding(kind, text, cure)


def _of_activation(sight: Sight) -> Iterator[Finding]:
    """Channels that are dead, and values at the bounds of the activation."""
    dog, kept = sight.dog, sight.kept
    alive: Any = kept.units.get("alive", ())
    dead = 1.0 - alive.float().mean().item() if len(alive) else 0.0
    if Kind.DEAD in dog.names and dead > dog.max_dead:
        yield sight.finding(Kind.DEAD, f"{dead:.0%} of its {len(alive)} channels were always zero")
    near = float(kept.near) / max(kept.calls, 1)
    if Kind.SATURATED in dog.names and near > dog.max_saturated:
        text = f"{near:.0%} of its values were within 1 % of its bounds"
        yield sight.finding(Kind.SATURATED, text)


def _no_gradient(base: nn.Module, every: list[Sight], sights: list[Sight]) -> Iterator[Finding]:
    """Layers with trained parameters that get no gradient, while others do."""
    most = max((s.kept.grads for s in every), default=0)
    any_left = any(_has_gradient(p) for p in base.parameters())
    routed = _routed(base, every)
    for sight in sights:
        few, kept, trained = sight.dog.min_calls, sight.kept, sight.trained
        if most < few or not trained or any(map(_has_gradient, trained)):
            continue  # a frozen layer is meant to have none
        none = kept.calls >= few and not kept.grads
        zeros = kept.grads >= few and not kept.norm and math.isinf(kept.grad_bad)
        unused = not kept.called and any_left and routed.isdisjoint(_around(sight.site.name))
        if none or zeros or unused:
            text = f"no gradient, or only zeros, reached it in {kept.calls} measured calls"
            yield sight.finding(Kind.NO_GRADIENT, text)


def _routed(base: nn.Module, sights: Sequence[Sight]) -> set[str]:
    """The lists from whose layers the model chooses some, such as experts.

    The layers of a list have the same class, and some of them, or layers in them, are called.
    """
    called = {name for sight in sights if sight.kept.calls for name in _around(sight.site.name)}
    lists = {name: find_module(base, name) for name in called}
    return {
        name
        for name, module in lists.items()
        if isinstance(module, nn.ModuleList | nn.ModuleDict)
        and len({type(child) for child in module.children()}) == 1
    }


def _around(name: str) -> list[str]:
    """The names of all modules around a layer."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))]


def _has_gradient(p: nn.Parameter) -> bool:
    """Whether it has a gradient. ``zero_grad(set_to_none=False)`` leaves one of zeros."""
    return p.grad is not None and bool((p.grad != 0).any())
