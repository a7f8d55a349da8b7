"""Probes: a spec put on a copy of a model for one forward, and what each site meets in it."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map_only

from ..attachment.faults import Fault, Window, fault_of, why_not_called
from ..attachment.install import install, make_hook
from ..attachment.placement import Placement
from ..attachment.verify import windows
from ..observers.base import Observer
from ..regularizers.base import Regularizer
from ..regularizers.droppers import unit_dropped
from ..selectors.wrappers import named_modules
from ..sites import indexing
from ..sites.counts import Counts
from ..sites.hooks import InputHook, OutputHook, SiteHook
from ..sites.observe import ObserveHook
from ..sites.retune import RetuneHook
from ..sites.shared import Control
from ..sites.site import Site, SiteError
from .droppers import droppers
from .dry_run import DryRun, dry_run, shape_of
from .residual import carries_stream, passes_around, without_gradient


@dataclass
class SiteMet:
    """What a site has met in one forward.

    Attributes:
        site: on the copy.
        hook: that of the site.
        error: why it can't work there.
        fault: why it did nothing.
        shapes: of what it works on, one for each call; of a structure its type and size.
        structure: what the layer returns or takes around that tensor, or "".
        followers: layers that work in place on its output.
        loses_samples: whether no shortcut runs around it (asked of what drops whole samples).
        without_gradient: whether no gradient will come (asked of what acts on gradients).
        dropped: layers that drop by themselves and have taken, or given, the very tensor.
    """

    site: Site
    hook: SiteHook
    error: str | None = None
    fault: Fault | None = None
    shapes: list[Any] = field(default_factory=list)
    structure: str = ""
    followers: dict[str, None] = field(default_factory=dict)
    loses_samples: bool = False
    without_gradient: bool = False
    dropped: dict[str, None] = field(default_factory=dict)


@dataclass
class Probed:
    """One forward: its sites in the order of the placements, and the calls of all layers."""

    sites: list[SiteMet]
    calls: Mapping[str, int]
    left_out: tuple[str, ...]


def probe(
    host: nn.Module,
    base: nn.Module,
    placements: list[Placement],
    example: Any,
    *,
    fake: bool,
    training: bool,
) -> Probed:
    """One forward of a copy with everything attached.

    Args:
        host: the model that takes the example.
        base: the model in it that the placements are on.
        placements: resolved and checked.
        example: a tensor, a tuple of arguments, or a mapping of keywords.
        fake: on fake tensors.
        training: in training mode; in evaluation, every site is made active.
    """
    with dry_run(host, example, fake=fake) as run:
        if not training:
            run.model.eval()
        elif not host.training:
            run.model.train()
        copied, control = run.copy_of(base), Control()
        control.looked = True  # the plan tells what a first forward would be warned of
        hooks = _install(run, copied, placements, control, always=not training)
        passing = _Passing(copied)  # its hooks stand behind those of the sites
        probes = [hook for hook in hooks if isinstance(hook, _Probe)]
        for each in probes:
            each.passing = passing
        sources = _ask_for_gradients(run) if any(each.drops_samples for each in probes) else []
        with torch.enable_grad():
            outputs = list(_tensors(run.run()))
        window = replace(
            windows(control, hooks)[0],
            layers=passing.calls,
            model=Counts(trained=1),
            compiled=False,
            backward=False,
        )
        sites = []
        for p, hook in zip(placements, hooks, strict=True):
            if isinstance(hook, _Probe):
                met = hook.met
                met.loses_samples = hook.loses_samples(outputs, sources)
                met.fault = None if met.error else fault_of(copied, hook, window)
            elif p.target.attribute:
                met = SiteMet(hook.site, hook, fault=fault_of(copied, hook, window))
            else:
                owner = run.copy_of(p.target.module)
                parameter = owner.get_parameter(str(p.target.parameter))
                met = SiteMet(hook.site, hook, shapes=[shape_of(parameter)])
                if without_gradient(outputs, parameter):
                    met.fault = _unused(copied, owner, hook, window)
            sites.append(met)
        return Probed(sites, passing.calls, run.left_out)


def _unused(base: nn.Module, owner: nn.Module, hook: SiteHook, window: Window) -> Fault:
    """Of a parameter that gets no gradient."""
    why = "the output does not depend on the parameter"
    if not window.layers[hook.owner_name]:
        cause = why_not_called(base, owner, hook.owner_name, window)
        why = f"{why}, and its layer is never called: {cause}"
    return Fault("never_active", f"{hook.site.regularizer.label} gets no gradient", why)


class _Passing:
    """What passes between the layers in one forward.

    Attributes:
        calls: of each layer, by its name.
        outputs: of sites, by address, each with its version then: it grows with a change in place.
        gave: what layers that drop have given, by address and version.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, int] = {}
        self.outputs: dict[int, list[tuple[SiteMet, Tensor, int]]] = {}
        self.gave: dict[tuple[int, int], tuple[str, Tensor]] = {}
        dropping = droppers(model)
        for name, module in named_modules(model):
            self.calls[name] = 0
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                layer = _LayerHook(name, name in dropping, self)
                module.register_forward_pre_hook(layer.before)
                module.register_forward_hook(layer.after)


class _LayerHook:
    """Hooks of a layer: count its calls, and see what it changes in place, takes and gives."""

    def __init__(self, name: str, drops: bool, passing: _Passing) -> None:
        self.name, self.drops, self.passing = name, drops, passing

    def before(self, module: nn.Module, args: Any) -> None:
        for met, output, version in self.passing.outputs.get(id(args[0]) if args else 0, ()):
            if self.drops and output._version == version:
                met.dropped[self.name] = None

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.passing.calls[self.name] += 1
        if self.drops and isinstance(output, Tensor):
            self.passing.gave[id(output), output._version] = self.name, output
        for x in args:
            given = self.passing.outputs.get(id(x), [])
            if given and x._version > given[-1][-1]:
                for met, *_ in self.passing.outputs.pop(id(x)):
                    met.followers[self.name] = None


class _Probe(SiteHook):
    """The hook of a site that notes what it meets, and goes on where the site can't work."""

    passing: _Passing

    def __init__(self, site: Site, *given: Any) -> None:
        super().__init__(site, *given)
        self.met = SiteMet(site, self)
        r = site.regularizer  # what takes the layer's input adds it back
        self.drops_samples = unit_dropped(r) == "samples" and not r.needs_input
        self.nodes: list[tuple[Node | None, Node | None, Node]] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        site, met, index = self.site, self.met, self.site.regularizer.index
        at_output = site.at == "output"
        value: Any = rest[-1]
        if not at_output and not isinstance(index, str):
            value, index = args, index or 0
        try:
            changed = super().__call__(module, args, *rest)
        except SiteError as error:
            met.error = str(error).removeprefix(str(site.error("")))
            met.shapes.append(shape_of(value if at_output else args))
            return None
        try:
            before = indexing.get(value, index)
        except ValueError:  # while it is not active, it does not ask for a tensor
            met.shapes.append(shape_of(value))
            return changed
        met.shapes.append(tuple(before.shape))
        name, _ = self.passing.gave.get((id(before), before._version), (None, None))
        if name is not None:
            met.dropped[name] = None
        if site.regularizer.acts_on == "gradient":
            met.without_gradient = not before.requires_grad
        if at_output:
            met.structure = "" if value is before else shape_of(value)
            value = value if changed is None else changed
            after = indexing.get(value, index)
            if self.drops_samples and after.grad_fn is not None:
                after = self._marked(args, before, after)
                changed = indexing.put(value, index, after)
            given = self.passing.outputs.setdefault(id(after), [])
            given.append((met, after, after._version))
        return changed

    def _marked(self, args: tuple[Any, ...], before: Tensor, after: Tensor) -> Tensor:
        """A copy, made by a node of the graph that is this site's alone."""
        first = args[0] if args and isinstance(args[0], Tensor) else before
        after = after.clone()
        assert after.grad_fn is not None
        self.nodes.append((before.grad_fn, first.grad_fn, after.grad_fn))
        return after

    def loses_samples(self, outputs: list[Tensor], sources: list[Node]) -> bool:
        """Whether, at any call, no shortcut runs around the site."""
        ways = [(sources, node) for _, _, node in self.nodes if sources]
        ways += [
            ([first], node)
            for output, first, node in self.nodes
            if first and carries_stream(output, first)
        ]
        return not all(passes_around(outputs, above, node) for above, node in ways)


class _OutputProbe(_Probe, OutputHook):
    """At the output of a layer."""


class _InputProbe(_Probe, InputHook):
    """At its input."""


class _ObserverProbe(_Probe, ObserveHook):
    """Of an observer."""


class _RetuneProbe(_Probe, RetuneHook):
    """On a layer that drops by itself."""


def _install(
    run: DryRun,
    copied: nn.Module,
    placements: list[Placement],
    control: Control,
    always: bool,
) -> list[SiteHook]:
    moved = [
        replace(
            p,
            target=replace(p.target, module=run.copy_of(p.target.module)),
            regularizer=_always(p.regularizer) if always else p.regularizer,
        )
        for p in placements
    ]
    hooks: list[SiteHook] = []

    def make(site: Site, p: Placement) -> SiteHook:
        if p.target.form:
            hooks.append(make_hook(site, p))
        elif p.attribute is not None:
            hooks.append(_RetuneProbe(site, p.attribute))
        elif isinstance(p.regularizer, Observer):
            hooks.append(_ObserverProbe(site))
        else:
            hooks.append(_OutputProbe(site) if site.at == "output" else _InputProbe(site))
        return hooks[-1]

    install(copied, moved, control, make)
    for hook in hooks:
        hook.site.idle = False  # a schedule that starts at 0 must not hide the layout and the map
    return hooks


def _always(regularizer: Regularizer) -> Regularizer:
    changed = copy.copy(regularizer)
    object.__setattr__(changed, "active", "always")
    return changed


def _ask_for_gradients(run: DryRun) -> list[Node]:
    """Make the graph begin at what the model is called with; the nodes where it begins."""
    sources: list[Node] = []

    def watched(x: Tensor) -> Tensor:
        if x.is_floating_point():
            with run.mode or torch.enable_grad():
                x = x.detach().requires_grad_().clone()  # which may be worked on in place
            assert x.grad_fn is not None
            sources.append(x.grad_fn)
        return x

    with torch.enable_grad():
        run.args, run.kwargs = tree_map_only(Tensor, watched, (run.args, run.kwargs))
    return sources


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of an output, however it is nested."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type | Mapping):
        yield from _tensors(vars(value))
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
