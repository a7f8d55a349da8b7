"""Runs one forward of a copy with the hooks of a spec, and records what each site meets.

The hooks are the real ones. A site that can't work notes its error, and the forward goes on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from ..attachment.epoch_checks import windows
from ..attachment.faults import Window, fault_of, finding, why_not_called
from ..attachment.install import install, make_hook
from ..attachment.resolve import Placement
from ..findings import Finding, Kind
from ..regularizers.base import Regularizer
from ..regularizers.droppers import unit_dropped
from ..sites import indexing
from ..sites.counter import Snapshot
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.site import Site, SiteError
from .dry_run import DryRun, shape_of
from .recording import LayerCalls, recorded
from .residual import passes_around, without_gradient


@dataclass
class SiteMet:
    """What a site has met in one forward; its `watch` is the last forward hook of the layer.

    Attributes:
        hook: of the site, on the copy.
        error: why it can't work there.
        fault: why it did nothing.
        shape: of the tensor of the last call; of a structure its type and size.
        nodes: for what drops samples, the nodes of the layer's input and of its own output.
        loses_samples: whether it drops whole samples without a shortcut around it.
        without_gradient: whether it acts on gradients and none will come.
    """

    hook: SiteHook
    error: str | None = None
    fault: Finding | None = None
    shape: Any = None
    nodes: list[tuple[Node | None, Node]] = field(default_factory=list)
    loses_samples: bool = False
    without_gradient: bool = False

    @property
    def site(self) -> Site:
        """The site, on the copy."""
        return self.hook.site

    def watch(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Note the tensor that the site works on."""
        regularizer, value = self.site.regularizer, output
        index = regularizer.index
        if regularizer.at == "input":
            value = kwargs if isinstance(index, str) else args
            index = 0 if index is None else index
        try:
            x = indexing.get(value, index)
        except ValueError:  # no tensor, which the site itself tells if it is active
            self.shape = shape_of(value)
            return None
        self.shape = tuple(x.shape)
        if regularizer.acts_on == "gradient":
            self.without_gradient = not x.requires_grad
        if not _drops_samples(regularizer) or x.grad_fn is None:
            return None
        x = x.clone()  # by a node of the graph that is this site's alone
        assert x.grad_fn is not None
        first = args[0] if args else None
        self.nodes.append((first.grad_fn if isinstance(first, Tensor) else None, x.grad_fn))
        return indexing.put(output, index, x)

    def finish(self, outputs: list[Tensor], sources: list[Node], layer: LayerCalls) -> None:
        """Look for shortcuts around the site, and around its branch in a residual block."""
        for first, node in self.nodes:
            ways = [sources] if sources else []
            ways += [[first]] if first and layer.adds else []
            if not all(passes_around(outputs, above, node) for above in ways):
                self.loses_samples = True


@dataclass
class Probed:
    """One forward: its sites in the order of the placements, and the calls of all layers."""

    sites: list[SiteMet]
    calls: Mapping[str, int]
    left_out: tuple[str, ...]


def probe(base: nn.Module, placements: list[Placement], run: DryRun) -> Probed:
    """One training forward of a copy with the hooks of all placements.

    Args:
        base: the module that the placements are on.
        placements: resolved and checked.
        run: a copy of the model.
    """
    if not run.model.training:
        run.model.train()
    copied, shared = run.copy_of(base), Run()
    shared.looked = True  # the plan reports what a first forward would warn of
    drops_samples = any(_drops_samples(p.regularizer) for p in placements)
    with recorded(copied, residual=drops_samples) as layers, torch.enable_grad():
        sites = _install(run, copied, placements, shared)
        sources = _ask_for_gradients(run) if drops_samples else []
        outputs = [x for x in tree_leaves(run.run()) if isinstance(x, Tensor)]
    calls = {name: layer.calls for name, layer in layers.items()}
    window = replace(
        windows(shared, [met.hook for met in sites])[0],
        layers=calls,
        model=Snapshot(trained=1),
        compiled=False,
        backward=False,
    )
    for p, met in zip(placements, sites, strict=True):
        if p.target.parameter is not None:
            _look_at_parameter(run.copy_of(p.target.module), copied, met, outputs, window)
        else:
            met.finish(outputs, sources, layers[met.hook.owner_name])
            met.fault = None if met.error else fault_of(copied, met.hook, window)
    return Probed(sites, calls, run.left_out)


def _look_at_parameter(
    owner: nn.Module, base: nn.Module, met: SiteMet, outputs: list[Tensor], window: Window
) -> None:
    parameter = owner.get_parameter(str(met.hook.parameter))
    met.shape = shape_of(parameter)
    if without_gradient(outputs, parameter):
        text, cure = f"{met.site.regularizer.label} gets no gradient", ""
        text += ": the output does not depend on the parameter"
        if not window.layers[met.hook.owner_name]:
            why, cure = why_not_called(base, owner, met.hook.owner_name, window)
            text = f"{text}, and its layer is never called: {why}"
        met.fault = finding(met.hook, Kind.NEVER_ACTIVE, text, cure)


def _drops_samples(regularizer: Regularizer) -> bool:
    """Whether it may lose samples. What takes the input of its layer returns that instead."""
    at_output = regularizer.at == "output" and not regularizer.needs_input
    return at_output and unit_dropped(regularizer) == "samples"


def _install(
    run: DryRun, copied: nn.Module, placements: list[Placement], shared: Run
) -> list[SiteMet]:
    """Put the hooks on the copy, each with one that watches behind it."""
    sites: list[SiteMet] = []

    def make(site: Site, p: Placement) -> SiteHook:
        hook = make_hook(site, p)
        met = SiteMet(hook)
        sites.append(met)
        site.idle = False  # a schedule that starts at 0 must not hide the layout and the map

        def collect(hook: SiteHook, module: nn.Module, *given: Any) -> Any:
            try:
                return type(hook).__call__(hook, module, *given)
            except SiteError as error:
                met.error = str(error).removeprefix(str(site.error("")))
                return None

        if p.target.parameter is None:
            hook.__call__ = MethodType(collect, hook)  # type: ignore[method-assign]  # what is registered
        return hook

    moved = [
        replace(p, target=replace(p.target, module=run.copy_of(p.target.module)))
        for p in placements
    ]
    install(copied, moved, shared, make)
    for p, met in zip(moved, sites, strict=True):
        if p.target.parameter is None:
            p.target.module.register_forward_hook(met.watch, with_kwargs=True)
    return sites


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
