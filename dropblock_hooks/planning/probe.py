"""A trial: a spec put on a copy of a model for one forward, and what each site has met."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..attachment.activity import take_off_proof
from ..attachment.install import install
from ..attachment.resolve import Placement
from ..regularizers.base import Regularizer
from ..selectors.wrappers import named_modules
from ..sites import indexing
from ..sites.hooks import SiteHook
from ..sites.parameters import ParameterHook
from ..sites.shared import Control
from ..sites.site import Site, SiteError
from .dropped_twice import droppers
from .dry_run import Rehearsal, rehearsing
from .record import record, shape_of
from .residual import carries_stream, passes_around, without_gradient


@dataclass
class SiteTrial:
    """What a site has met in one forward.

    Attributes:
        placement: the placement on the model itself.
        site: on the copy.
        error: why it can't work there.
        shapes: of what it works on, one for each call; of a structure its type and size.
        structure: what the layer returns or takes around that tensor, or "".
        followers: layers that work in place on its output.
        loses_samples: whether no shortcut runs around it (asked of what drops whole samples).
        without_gradient: whether no gradient will come (asked of what acts on gradients).
        dropped: layers that drop by themselves and have taken, or given, the very tensor.
    """

    placement: Placement
    site: Site
    error: str | None = None
    shapes: list[Any] = field(default_factory=list)
    structure: str = ""
    followers: dict[str, None] = field(default_factory=dict)
    loses_samples: bool = False
    without_gradient: bool = False
    dropped: dict[str, None] = field(default_factory=dict)


@dataclass
class Trial:
    """One forward: its sites in the order of the placements, and the calls of all layers."""

    sites: list[SiteTrial]
    calls: Mapping[str, int]
    left_out: tuple[str, ...]
    training: bool


def try_spec(
    host: nn.Module,
    base: nn.Module,
    placements: list[Placement],
    example: Any,
    *,
    fake: bool,
    training: bool,
) -> Trial:
    """One forward of a copy with everything attached.

    Args:
        host: the model that takes the example.
        base: the model in it that the placements are on.
        placements: resolved and checked.
        example: a tensor, a tuple of arguments, or a mapping of keywords.
        fake: on fake tensors.
        training: in training mode; in evaluation, every site is made active.
    """
    with rehearsing(host, example, fake=fake) as rehearsal:
        if not training:
            rehearsal.model.eval()
        elif not host.training:
            rehearsal.model.train()
        copied = rehearsal.copy_of(base)
        observer = _Observer()
        tries = _install(rehearsal, copied, placements, observer, always=not training)
        for name in droppers(copied):
            observer.any_drops = True
            layer = copied.get_submodule(name)
            layer.register_forward_pre_hook(_Dropped(name, observer.took))
            layer.register_forward_hook(_Dropped(name, observer.gave))
        seen = record(copied)
        for name, module in named_modules(copied):
            module.register_forward_hook(_Follower(name, observer))
        sources = _ask_for_gradients(rehearsal) if any(t.drops_samples for t in tries) else []
        with torch.enable_grad():
            outputs = list(_tensors(rehearsal.run()))
        observer.meet()
        for each in tries:
            each.trial.loses_samples = each.loses_samples(outputs, sources)
            if each.parameter is not None:
                each.trial.without_gradient = without_gradient(outputs, each.parameter)
        calls = {name: layer.calls for name, layer in seen.items()}
        return Trial([each.trial for each in tries], calls, rehearsal.left_out, training)


class _Observer:
    """Outputs of sites that are still waiting for the layer that takes them."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[SiteTrial, Tensor, int]] = {}
        self.tensors: list[tuple[SiteTrial, _Version, _Version]] = []
        self.gave: dict[_Version, str] = {}
        self.took: dict[_Version, str] = {}
        self.any_drops = False

    def put(self, trial: SiteTrial, output: Tensor) -> None:
        self.waiting[id(output)] = trial, output, output._version

    def see(self, name: str, args: Any) -> None:
        for x in args:
            trial, output, version = self.waiting.get(id(x), (None, None, 0))
            if trial is not None and output is not None and output._version > version:
                trial.followers[name] = None
                del self.waiting[id(x)]

    def meet(self) -> None:
        """Tell the sites of the layers that have dropped in the very tensor that is theirs."""
        for trial, before, after in self.tensors:
            for name in (self.gave.get(before), self.took.get(after)):
                if name is not None:
                    trial.dropped[name] = None


class _Version:
    """A tensor in the state of now: it is another one when something has changed it in place."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor  # held, so that no other one gets its address
        self.state = id(tensor), getattr(tensor, "_version", 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Version) and self.state == other.state

    def __hash__(self) -> int:
        return hash(self.state)


class _Dropped:
    """Hook, before and after, of a layer that drops by itself: keeps what it takes and gives."""

    def __init__(self, name: str, seen: dict[_Version, str]) -> None:
        self.name, self.seen = name, seen

    def __call__(self, module: nn.Module, args: Any, *output: Any) -> None:
        value = output[0] if output else args[0] if args else None
        self.seen[_Version(value)] = self.name


class _Follower:
    """Forward hook: sees whether a layer has worked in place on what it was given."""

    def __init__(self, name: str, observer: _Observer) -> None:
        self.name, self.observer = name, observer

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.observer.see(self.name, args)


class _Try:
    """Stands in for the hook of a site: the forward goes on where the site can't work."""

    def __init__(self, hook: SiteHook, trial: SiteTrial, observer: _Observer) -> None:
        self.hook, self.trial, self.observer = hook, trial, observer
        self.drops_samples = drops_samples(hook.site.regularizer)
        self.nodes: list[tuple[Node | None, Node | None, Node]] = []
        self.parameter: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        site = self.hook.site
        value, index = self._value(args, rest)
        try:
            changed = self.hook(module, args, *rest)
        except SiteError as error:
            self.trial.error = str(error).removeprefix(str(site.error("")))
            self.trial.shapes.append(shape_of(value if site.at == "output" else args))
            return None
        try:
            before = indexing.get(value, index)
        except ValueError:  # while it is not active, it does not ask for a tensor
            self.trial.shapes.append(shape_of(value))
            return changed
        self.trial.shapes.append(tuple(before.shape))
        if value is not before and site.at == "output":
            self.trial.structure = shape_of(value)
        if site.regularizer.acts_on == "gradient":
            self.trial.without_gradient = not before.requires_grad
        changed = self._marked(args, before, changed if changed is not None else value, changed)
        if self.observer.any_drops:
            given = site.at == "output" and changed is not None
            after = indexing.get(changed, index) if given else before
            self.observer.tensors.append((self.trial, _Version(before), _Version(after)))
        return changed

    def _value(self, args: tuple[Any, ...], rest: tuple[Any, ...]) -> tuple[Any, int | str | None]:
        index = self.hook.site.regularizer.index
        if self.hook.site.at == "output":
            return rest[-1], index
        return (rest[-1], index) if isinstance(index, str) else (args, index or 0)

    def _marked(self, args: tuple[Any, ...], before: Tensor, value: Any, changed: Any) -> Any:
        if self.hook.site.at != "output":
            return changed
        index = self.hook.site.regularizer.index
        after = indexing.get(value, index)
        if self.drops_samples and after.grad_fn is not None:
            first = args[0] if args and isinstance(args[0], Tensor) else before
            after = after.clone()  # a node of the graph that is this site's alone
            self.nodes.append((before.grad_fn, first.grad_fn, after.grad_fn))  # type: ignore[arg-type]
            changed = indexing.put(value, index, after)
        self.observer.put(self.trial, after)
        return changed

    def loses_samples(self, outputs: list[Tensor], sources: list[Node]) -> bool:
        """Whether, at any call, no shortcut runs around the site."""
        for output, first, node in self.nodes:
            if sources and not passes_around(outputs, sources, node):
                return True
            if carries_stream(output, first) and not passes_around(outputs, [first], node):  # type: ignore[list-item]
                return True
        return False


def drops_samples(regularizer: Regularizer) -> bool:
    """Whether it zeroes whole samples: ours and those of timm and torchvision."""
    return regularizer.label in ("DropPath", "Foreign(DropPath)", "Foreign(StochasticDepth)")


def _install(
    rehearsal: Rehearsal,
    copied: nn.Module,
    placements: list[Placement],
    observer: _Observer,
    always: bool,
) -> list[_Try]:
    moved = [
        replace(
            p,
            target=replace(p.target, module=rehearsal.copy_of(p.target.module)),
            regularizer=_always(p.regularizer) if always else p.regularizer,
        )
        for p in placements
    ]
    attachment = install(copied, moved, Control())
    take_off_proof(attachment._control, copied)
    tries = []
    for p, (module, hook) in zip(placements, attachment._installed, strict=True):
        stand_in = _Try(hook, SiteTrial(p, hook.site), observer)
        tries.append(stand_in)
        if isinstance(hook, ParameterHook):
            parameter = module._parameters[hook.parameter]
            stand_in.parameter = parameter
            stand_in.trial.shapes.append(shape_of(parameter))
            continue
        for table in (module._forward_hooks, module._forward_pre_hooks):
            hooks: dict[int, Any] = table
            for key in [key for key, there in hooks.items() if there is hook]:
                hooks[key] = stand_in
    return tries


def _always(regularizer: Regularizer) -> Regularizer:
    changed = copy.copy(regularizer)
    object.__setattr__(changed, "active", "always")
    return changed


def _ask_for_gradients(rehearsal: Rehearsal) -> list[Node]:
    """Make the graph begin at what the model is called with; the nodes where it begins."""
    sources: list[Node] = []

    def watched(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            with rehearsal.mode or torch.enable_grad():
                value = value.detach().requires_grad_().clone()  # which may be worked on in place
            sources.append(value.grad_fn)
            return value
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(map(watched, value))
        return {k: watched(v) for k, v in value.items()} if type(value) is dict else value

    with torch.enable_grad():
        rehearsal.args = tuple(map(watched, rehearsal.args))
        rehearsal.kwargs = {name: watched(value) for name, value in rehearsal.kwargs.items()}
    return sources


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of an output, however it is nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(vars(value))
