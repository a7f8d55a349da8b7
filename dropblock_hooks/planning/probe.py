"""Runs one forward of a copy with the hooks of a spec, and records what each site meets."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from ..attachment.epoch_checks import windows
from ..attachment.faults import Window, fault_of, finding, why_not_called
from ..attachment.install import install, make_hook
from ..attachment.placement import Placement
from ..findings import Finding, Kind
from ..regularizers.droppers import unit_dropped
from ..sites import indexing
from ..sites.counter import Snapshot
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.site import Site, SiteError
from .dry_run import DryRun, dry_run, shape_of
from .recording import record
from .residual import carries_stream, passes_around, without_gradient


@dataclass
class SiteMet:
    """What a site has met in one forward.

    Attributes:
        site: on the copy.
        hook: of the site.
        error: why it can't work there.
        fault: why it did nothing.
        shapes: of the tensor of each call; of a structure its type and size.
        loses_samples: whether it drops whole samples without a shortcut around it.
        without_gradient: whether it acts on gradients and none will come.
    """

    site: Site
    hook: SiteHook
    error: str | None = None
    fault: Finding | None = None
    shapes: list[Any] = field(default_factory=list)
    loses_samples: bool = False
    without_gradient: bool = False


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
) -> Probed:
    """One training forward of a copy with everything attached.

    Args:
        host: the model that takes the example.
        base: the model in it that the placements are on.
        placements: resolved and checked.
        example: a tensor, a tuple of arguments, or a mapping of keywords.
        fake: on fake tensors.
    """
    with dry_run(host, example, fake=fake) as run:
        if not host.training:
            run.model.train()
        copied, shared = run.copy_of(base), Run()
        shared.looked = True  # the plan reports what a first forward would warn of
        hooks = _install(run, copied, placements, shared)
        recorded = record(copied)
        probes = [hook for hook in hooks if isinstance(hook, _Probe)]
        sources = _ask_for_gradients(run) if any(each.drops_samples for each in probes) else []
        with torch.enable_grad():
            outputs = _tensors(run.run())
        calls = {name: layer.calls for name, layer in recorded.items()}
        window = replace(
            windows(shared, hooks)[0],
            layers=calls,
            model=Snapshot(trained=1),
            compiled=False,
            backward=False,
        )
        sites = []
        for p, hook in zip(placements, hooks, strict=True):
            if isinstance(hook, _Probe):
                met = hook.met
                met.loses_samples = hook.loses_samples(outputs, sources)
                met.fault = None if met.error else fault_of(copied, hook, window)
            else:
                met = _of_parameter(run, copied, p, hook, outputs, window)
            sites.append(met)
        return Probed(sites, calls, run.left_out)


def _of_parameter(
    run: DryRun,
    base: nn.Module,
    p: Placement,
    hook: SiteHook,
    outputs: list[Tensor],
    window: Window,
) -> SiteMet:
    owner = run.copy_of(p.target.module)
    parameter = owner.get_parameter(str(p.target.parameter))
    met = SiteMet(hook.site, hook, shapes=[shape_of(parameter)])
    if without_gradient(outputs, parameter):
        text, cure = f"{hook.site.regularizer.label} gets no gradient", ""
        text += ": the output does not depend on the parameter"
        if not window.layers[hook.owner_name]:
            why, cure = why_not_called(base, owner, hook.owner_name, window)
            text = f"{text}, and its layer is never called: {why}"
        met.fault = finding(hook, Kind.NEVER_ACTIVE, text, cure)
    return met


class _Probe(SiteHook):
    """The hook of a site that also notes what it meets, and goes on where the site fails."""

    met: SiteMet
    nodes: list[tuple[Node | None, Node | None, Node]]

    @property
    def drops_samples(self) -> bool:
        """Whether it may lose samples; what takes the layer's input adds it back."""
        regularizer = self.site.regularizer
        return unit_dropped(regularizer) == "samples" and not regularizer.needs_input

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        site, met, index = self.site, self.met, self.site.regularizer.index
        at_output = site.at != "input"
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
        if site.regularizer.acts_on == "gradient":
            met.without_gradient = not before.requires_grad
        if at_output and self.drops_samples:
            value = value if changed is None else changed
            after = indexing.get(value, index)
            if after.grad_fn is not None:
                changed = indexing.put(value, index, self._marked(args, before, after))
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


@functools.cache
def _probe_class(kind: Any) -> Any:
    return type(f"{kind.__name__}Probe", (_Probe, kind), {})


def _make(site: Site, p: Placement) -> SiteHook:
    """The hook of a placement; on a layer, one that notes what it meets."""
    hook = make_hook(site, p)
    if p.target.parameter is None:
        kind: Any = type(hook)  # Any: mypy takes no class as hashable
        hook.__class__ = _probe_class(kind)
        assert isinstance(hook, _Probe)
        hook.met, hook.nodes = SiteMet(site, hook), []
    return hook


def _install(
    run: DryRun, copied: nn.Module, placements: list[Placement], shared: Run
) -> list[SiteHook]:
    moved = [
        replace(p, target=replace(p.target, module=run.copy_of(p.target.module)))
        for p in placements
    ]
    hooks = [hook for _, hook in install(copied, moved, shared, _make)._installed]
    for hook in hooks:
        hook.site.idle = False  # a schedule that starts at 0 must not hide the layout and the map
    return hooks


def _ask_for_gradients(run: DryRun) -> list[Node]:
    """Make the graph begin at the arguments of the model; the nodes where it begins."""
    sources: list[Node] = []

    def watched(x: Tensor) -> Tensor:
        if x.is_floating_point():
            with run.mode or torch.enable_grad():
                x = x.detach().requires_grad_().clone()  # a layer may work on it in place
            assert x.grad_fn is not None
            sources.append(x.grad_fn)
        return x

    with torch.enable_grad():
        run.args, run.kwargs = tree_map_only(Tensor, watched, (run.args, run.kwargs))
    return sources


def _tensors(value: Any) -> list[Tensor]:
    """All tensors of an output, however it is nested."""
    if is_dataclass(value) and not isinstance(value, type | Mapping):
        value = vars(value)
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
