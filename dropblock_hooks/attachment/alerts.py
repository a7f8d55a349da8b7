"""The looks of a `Watchdog` at its sites, and its rules, which judge all sites together."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from .._torch import local_values
from ..findings import Finding, Kind, Severity, tell
from ..observers.watchdog import Clock, Watchdog, Watched
from ..quoting import listed
from ..selectors.wrappers import find_module
from ..sites.hooks import SiteHook
from ..sites.run import Run, is_enabled
from ..sites.site import Site

_SMALLEST_SCALE = 1.0  # a GradScaler below it is not recovering from its overflows
_FEW = 4  # with fewer layers, no rule about depth is applied
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
    watched: Watched

    @property
    def measured(self) -> bool:
        """Whether there are numbers since the last look."""
        watched = self.watched
        return bool(watched.calls or watched.grads or watched.bad_calls)

    @property
    def judged(self) -> bool:
        """Whether the layer was called often enough to judge statistics."""
        return self.watched.calls >= self.dog.min_calls

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters of the layer itself that get a gradient."""
        return [p for p in self.module.parameters(recurse=False) if p.requires_grad]

    def finding(self, kind: Kind, text: str, cure: str = "") -> Finding:
        """Make a finding about the layer; without a cure, with the one of its kind."""
        severity = Severity.ERROR if kind == Kind.NONFINITE else Severity.WARNING
        cure = cure or _CURES[kind]
        return Finding(kind, severity, (self.site.key,), text, cure, self.site.run.epoch)


def new_alerts(
    base: nn.Module, run: Run, hooks: Sequence[SiteHook], statistics: bool = True
) -> list[Finding]:
    """Look at all sites: return the findings that the last look did not have; begin new counts.

    Without `statistics`, only values that are not finite are judged.
    """
    run.take_counts()
    sights = _sights(base, hooks)
    clock = Clock.of(run.shared)
    if not sights or not run.installed:
        return []

    if _is_scaled(run):
        clock.note_scale(run.scaler.get_scale())
    if statistics:
        clock.begin()
    statistics = statistics and any(sight.judged for sight in sights)

    before = clock.alerts
    findings = _judge(base, run, sights, statistics)
    if any(sight.measured for sight in sights):
        run.told -= before.keys() - findings.keys()  # these have cleared, and may come again
        clock.alerts = findings
    clock.looks += statistics
    for sight in sights:
        sight.watched.forget(statistics)

    new = [finding for key, finding in findings.items() if key not in before]
    return _first_cause(new, sights)


def alerts_now(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """Return the findings of the last look that hold, and those since then. Reports nothing."""
    run.take_counts()
    sights = _sights(base, hooks)
    statistics = any(sight.judged for sight in sights)
    findings = Clock.of(run.shared).alerts | _judge(base, run, sights, statistics)
    return _first_cause(list(findings.values()), sights)


def tell_alerts(run: Run, hooks: Sequence[SiteHook], findings: Sequence[Finding]) -> None:
    """Report findings by the `action` of the `Watchdog` of their site, a WatchdogError last."""
    dogs: dict[str, Any] = {hook.site.key: hook.site.regularizer for hook in hooks}

    actions = [(dogs[finding.sites[0]].action, finding) for finding in findings]
    for action, finding in sorted(actions, key=lambda pair: pair[0] == "raise"):
        tell([finding], run.told, action)


def _sights(base: nn.Module, hooks: Sequence[SiteHook]) -> list[Sight]:
    """Read all sites of a `Watchdog`, which waits for the device."""
    sights = []
    for hook in hooks:
        site = hook.site
        dog = site.regularizer
        module = find_module(base, site.name)
        if isinstance(dog, Watchdog) and module is not None:
            watched: Watched = site.bound.open["watched"]
            watched.read()
            sights.append(Sight(site, module, dog, watched))
    return sights


def _is_scaled(run: Run) -> bool:
    """Return whether a GradScaler that the attachment knows scales the loss."""
    return bool(run.scaler) and is_enabled(run.scaler)


def _first_cause(findings: Sequence[Finding], sights: Sequence[Sight]) -> list[Finding]:
    """Return the first finding, whose text lists the others as its likely effects.

    NaN and Inf come first. Then come findings of the forward, in the order of the layers, and
    findings of the backward, in reverse order. Layers that were never called stay separate.
    """
    last_calls = {sight.site.key: sight.watched.at for sight in sights}

    def order(finding: Finding) -> tuple[bool, int, int]:
        time = last_calls[finding.sites[0]]
        in_backward = finding.kind in _OF_BACKWARD
        stage = in_backward + (finding.kind in _OF_BACKWARD[1:])  # a missing gradient comes first
        return finding.kind != Kind.NONFINITE, stage, -time if in_backward else time

    called: list[Finding] = []
    never_called: list[Finding] = []
    for finding in findings:
        group = called if last_calls.get(finding.sites[0]) else never_called
        group.append(finding)
    if len(called) < 2:
        return called + never_called

    first, *effects = sorted(called, key=order)
    layers = defaultdict(list)
    for effect in effects:
        layers[effect.kind].append(effect.layer)
    effects_text = "; ".join(f"{kind} at {listed(names, 5)}" for kind, names in layers.items())
    text = f"{first.text}. Likely effects of it: {effects_text}"
    return [replace(first, text=text), *never_called]


def _judge(
    base: nn.Module, run: Run, sights: list[Sight], statistics: bool
) -> dict[tuple[str, str], Finding]:
    """Apply all rules; return the findings by site and kind.

    Without `statistics`, the findings of the last look about statistics hold.
    """
    clock = Clock.of(run.shared)
    last_findings = list(clock.alerts.values())

    nonfinite = list(_nonfinite(run, _with_rule(Kind.NONFINITE, sights)))
    had_nonfinite = any(finding.kind == Kind.NONFINITE for finding in last_findings)
    if nonfinite and had_nonfinite:
        return clock.alerts  # NaN comes from NaN

    if statistics:
        others = list(_judge_statistics(base, clock, sights))
    else:
        others = [finding for finding in last_findings if finding.kind != Kind.NONFINITE]
    return {(finding.sites[0], finding.kind): finding for finding in nonfinite + others}


def _judge_statistics(base: nn.Module, clock: Clock, sights: list[Sight]) -> Iterator[Finding]:
    """Apply the rules about gradients and activations."""
    yield from _along_depth(Kind.VANISHING, _with_rule(Kind.VANISHING, sights))

    cure = _cure_of_exploding(clock)
    yield from _along_depth(Kind.EXPLODING, _with_rule(Kind.EXPLODING, sights), cure)

    for sight in sights:
        if sight.judged:
            yield from _of_activation(sight)
    yield from _no_gradient(base, sights, _with_rule(Kind.NO_GRADIENT, sights))


def _with_rule(kind: Kind, sights: Sequence[Sight]) -> list[Sight]:
    """Return the sites whose `Watchdog` has the rule for this kind."""
    return [sight for sight in sights if kind in sight.dog.names]


def _cure_of_exploding(clock: Clock) -> str:
    """Return the cure of the last look, or one that depends on when it was found; "" by default."""
    for finding in clock.alerts.values():
        if finding.kind == Kind.EXPLODING:
            return str(finding.cure)
    return _TRAINED if clock.looks else ""


def _nonfinite(run: Run, sights: list[Sight]) -> Iterator[Finding]:
    """Find the layer that made the first bad value, or the first that a bad gradient reaches.

    An output with -Inf alone may be masked logits. It is a cause only where NaN or +Inf follows.
    """
    if not sights:
        return

    clock = Clock.of(run.shared)
    worst = min(sights, key=lambda sight: sight.watched.worse)
    first_in_backward = min(sights, key=lambda sight: sight.watched.grad_bad)
    bad_gradient_first = first_in_backward.watched.grad_bad < worst.watched.worse

    scaled = _is_scaled(run)
    # overflows are how a GradScaler finds its scale
    searching = scaled and run.scaler.get_scale() >= _SMALLEST_SCALE
    if bad_gradient_first and not searching:
        yield _of_backward(first_in_backward, scaled)
    elif worst.watched.worse < math.inf:
        first = worst
        if worst.watched.made != worst.watched.worse:  # -Inf in its input may have made it
            first = min(sights, key=lambda sight: sight.watched.bad)
        yield _of_forward(first, sights, clock)
    elif run.ticker is None:  # compiled code measures each forward
        yield from _after_the_last_measured(sights, clock)


def _of_backward(sight: Sight, scaled: bool) -> Finding:
    """Make the finding that a bad gradient reached a layer, as the first one."""
    text = (
        "a gradient that is not finite (NaN or Inf) reached its output, as the first of the "
        "watched layers: the loss or the code behind this layer made it"
    )
    cure = (
        "Look behind the layer for a root, norm or logarithm at 0, an overflow, or -Inf in masked "
        "logits. If the gradients grew before, lower the learning rate. If a GradScaler scales "
        "this loss, "
        "pass it, attach(..., grad_scaler=scaler), so that its overflows are not reported"
    )
    if scaled:
        cure = "The GradScaler is not recovering: run this layer in float32"
    return sight.finding(Kind.NONFINITE, text, cure)


def _of_forward(first: Sight, sights: Sequence[Sight], clock: Clock) -> Finding:
    """Make the finding that a layer returned bad values, where `first` was the first to do so.

    Of that layer and all around it, the innermost one whose input was finite has made them. If
    code between two layers made them, that is their parent. If there is none, `first` is named.
    """
    makers = [sight for sight in sights if _made_bad_values(sight, first)]
    sight = max(makers, key=lambda maker: (maker is first, len(maker.site.name)), default=first)

    bad = _bad_parameters(sights)
    gap = clock.gap
    if bad and gap is not None and first.watched.bad > gap.time:
        clock.closely = True
        text = f"its output held NaN or Inf in training forward {gap.after}, and was finite before"
        when = f"between forward {gap.before} and forward {gap.after}"
        return _not_measured(sight, text, when, bad)

    measured = f"{sight.watched.bad_calls} of {sight.watched.calls} measured calls"
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
    if bad and makers:
        cure += ", and lower the learning rate or clip gradients (ClipGradNorm)"
    return sight.finding(Kind.NONFINITE, text, cure)


def _made_bad_values(sight: Sight, first: Sight) -> bool:
    """Return whether a layer is `first`, or around it, and made bad values of a finite input."""
    watched = sight.watched
    if not watched.made == watched.bad < math.inf:
        return False
    prefix = f"{sight.site.name}.".lstrip(".")  # "" for the model itself, which is around all
    names_of_first = (first.site.name, *first.site.aliases)
    return any(f"{name}.".startswith(prefix) for name in names_of_first)


def _after_the_last_measured(sights: Sequence[Sight], clock: Clock) -> Iterator[Finding]:
    """Find bad parameters that forwards have left which were not measured."""
    if clock.last == clock.forwards:
        return
    bad_by_sight = [(sight, _bad_parameters([sight])) for sight in sights if sight.trained]
    bad = [name for _, names in bad_by_sight for name in names]
    if bad:
        clock.closely = True
        first = next(sight for sight, names in bad_by_sight if names)
        text = f"its parameters hold NaN or Inf after training forward {clock.forwards}"
        yield _not_measured(first, text, f"after forward {clock.last}", bad)


def _not_measured(sight: Sight, text: str, when: str, bad: Sequence[str]) -> Finding:
    """Make the finding that NaN or Inf came in forwards that were not measured.

    An update has put NaN or Inf into parameters since then. Therefore the first layer with bad
    values need not be the one that made them.
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
    """Describe the parameters of the watched layers that are not finite."""
    bad = []
    for sight in sights:
        for name, p in sight.module.named_parameters(recurse=False):
            values = local_values(p).detach()
            if not (values.is_meta or torch.isfinite(values).all()):
                bad.append(f"parameter '{name}' of {sight.site.name or 'the model'}")
    return bad


def _along_depth(kind: Kind, sights: list[Sight], cure: str = "") -> Iterator[Finding]:
    """Find gradients that shrink, or grow, from the last layers to the first."""
    layers = [
        sight for sight in sights if sight.watched.grads >= sight.dog.min_calls and sight.trained
    ]
    if len(layers) < _FEW:
        return

    layers.sort(key=lambda sight: sight.watched.at)
    norms = [sight.watched.norm / sight.watched.grads for sight in layers]
    end = max(1, len(layers) // 4)
    first = norms[:end]
    last = norms[-end:]

    ratio = layers[0].dog.max_ratio
    # a branch may have small gradients by design, so neither rule uses the smallest
    if kind == Kind.VANISHING:
        most = "most"
        early = max(first)
        late = median(last)
        wrong = early * ratio < late
    else:
        most = "least"
        early = min(first)
        late = max(last)
        wrong = early > ratio * late

    if early and late and wrong:  # a layer without any gradient is dead
        text = (
            f"gradient norms of the first {end} of {len(layers)} layers are at {most} "
            f"{early:.3g}, and {late:.3g} at the last layers, up to '{layers[-1].site.name}'"
        )
        yield layers[0].finding(kind, text, cure)


def _of_activation(sight: Sight) -> Iterator[Finding]:
    """Find channels that are dead, and values at the bounds of the activation."""
    dog = sight.dog
    watched = sight.watched

    alive: Any = watched.units.get("alive", ())
    dead = 1.0 - alive.float().mean().item() if len(alive) else 0.0
    if Kind.DEAD in dog.names and dead > dog.max_dead:
        yield sight.finding(Kind.DEAD, f"{dead:.0%} of its {len(alive)} channels were always zero")

    near = float(watched.near) / max(watched.calls, 1)
    if Kind.SATURATED in dog.names and near > dog.max_saturated:
        text = f"{near:.0%} of its values were within 1 % of its bounds"
        yield sight.finding(Kind.SATURATED, text)


def _no_gradient(
    base: nn.Module, all_sights: list[Sight], sights: list[Sight]
) -> Iterator[Finding]:
    """Find layers with trained parameters that get no gradient, while others do.

    Args:
        base: the model.
        all_sights: all sites of a `Watchdog`.
        sights: those of them that have the rule.
    """
    most_gradients = max((sight.watched.grads for sight in all_sights), default=0)
    model_has_gradients = any(_has_gradient(p) for p in base.parameters())
    routed = _routed(base, all_sights)
    for sight in sights:
        trained = sight.trained  # empty for a frozen layer, which is meant to have no gradient
        if most_gradients < sight.dog.min_calls or not trained:
            continue
        if any(map(_has_gradient, trained)):
            continue

        never_called = model_has_gradients and not sight.watched.called
        unused = never_called and routed.isdisjoint(_around(sight.site.name))
        if unused or _got_no_gradient(sight):
            calls = sight.watched.calls
            text = f"no gradient, or only zeros, reached it in {calls} measured calls"
            yield sight.finding(Kind.NO_GRADIENT, text)


def _got_no_gradient(sight: Sight) -> bool:
    """Return whether a layer was called often, and got no gradient or only zeros."""
    watched = sight.watched
    fewest = sight.dog.min_calls
    none = watched.calls >= fewest and not watched.grads
    zeros = watched.grads >= fewest and not watched.norm and math.isinf(watched.grad_bad)
    return none or zeros


def _routed(base: nn.Module, sights: Sequence[Sight]) -> set[str]:
    """Return the names of lists from whose layers the model chooses some, such as experts.

    The layers of a list have the same class, and some of them, or layers in them, are called.
    """
    called: set[str] = set()
    for sight in sights:
        if sight.watched.calls:
            called.update(_around(sight.site.name))
    return {name for name in called if _is_list_of_equals(find_module(base, name))}


def _is_list_of_equals(module: nn.Module | None) -> bool:
    """Return whether a module is a list or dict of layers of one class."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    classes = {type(child) for child in module.children()}
    return len(classes) == 1


def _around(name: str) -> list[str]:
    """Return the names of all modules around a layer."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))]


def _has_gradient(p: nn.Parameter) -> bool:
    """Return whether a gradient is not zero: ``zero_grad(set_to_none=False)`` leaves zeros."""
    return p.grad is not None and bool((p.grad != 0).any())
