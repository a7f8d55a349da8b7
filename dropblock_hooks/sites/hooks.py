"""The hooks that a site puts on its layer, and how they are put on, found and taken off.

A model with hooks pickles and copies: they are objects of module-level classes that hold their
site, and no reference to the model, to the Attachment, or to a tensor of a graph.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, compiler, nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.compiler import is_compiling, is_dynamo_compiling

from ..handles import check_version, is_exporting
from ..selectors.wrappers import find_module
from . import indexing, operator
from .act import act
from .run import Run
from .site import Site


class Turn(IntEnum):
    """The place of a hook among the hooks of its layer. The backward meets them in reverse."""

    FIRST = 0
    BEFORE = 1
    ACTIVATIONS = 2
    AFTER = 3
    GRADIENTS = 4
    LAST = 5


class SiteHook:
    """Forward hook, or forward pre-hook at an input: regularizes a tensor, or its gradient.

    Subclasses are for parameters, observers and `Retune`. The method `__call__` is registered,
    which torch calls faster than the object.

    Attributes:
        parameter: the name of the parameter of a `ParameterHook`.
        with_kwargs: whether a hook at an output gets the keyword arguments.
        plain: whether the last argument is the tensor itself.
        turn: its place among the hooks of its layer.
    """

    parameter: str | None = None
    with_kwargs = False
    turn = Turn.ACTIVATIONS

    def __init__(self, site: Site) -> None:
        self.site = site
        self.at_input = site.regularizer.at == "input"
        self.plain = not self.at_input and site.regularizer.index is None
        if site.regularizer.acts_on == "gradient":
            self.turn = Turn.GRADIENTS

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        """Run at every forward of the layer, in evaluation too, so this is short."""
        site = self.site
        if is_dynamo_compiling() or compiler._is_compiling_flag:  # is_compiling() takes longer
            return self._compile(module, *given)
        if not site.enter(module.training):
            return None
        if site.idle and self.plain and type(given[-1]) is Tensor and not torch._C._is_tracing():
            site.count_idle(given[-1].numel())  # without reading the layout or drawing a mask
            return None
        callback = set_eval_frame(None)  # after a graph break, dynamo would compile what we call
        try:
            return self._act(module, *given)
        finally:
            set_eval_frame(callback)

    @property
    def run(self) -> Run:
        """The state that the sites of the attachment share."""
        return self.site.run

    @property
    def owner_name(self) -> str:
        """The name of the module that it is on."""
        name = self.site.name
        return name.rpartition(".")[0] if self.site.at in ("parameter", "attribute") else name

    def install(self, module: nn.Module) -> None:
        """Put it on the module."""
        put_on(module, self)

    def remove(self, module: nn.Module) -> None:
        """Take the hooks of its attachment off the module."""
        take_off(self.run, module)

    def lost(self, module: nn.Module) -> bool:
        """Whether it is no longer on the module."""
        return all(hook is not self for hook in hooks_of(module))

    def put(self, module: nn.Module) -> None:
        """Set the rate of the module, or hook its parameter again."""

    def look(self, module: nn.Module) -> None:
        """Let an observer look at the layer."""
        if self.site.watch is not None:
            self.site.watch.look(module, self.parameter)

    def pick(self, given: tuple[Any, ...]) -> tuple[Any, indexing.Index, Tensor]:
        """Return the value that holds the tensor, the index in it, and the tensor.

        `given` are the arguments of a hook of torch after the module.

        Raises:
            SiteError: if there is no such tensor.
        """
        site, index, value = self.site, self.site.regularizer.index, given[-1]
        what = "the output"
        if self.at_input:
            what = "what the layer is given"
            value = value if isinstance(index, str) else given[0]
            index = 0 if index is None else index
        try:
            return value, index, indexing.get(value, index)
        except ValueError as error:
            raise site.error(f"{what} {error}") from None

    def _act(self, module: nn.Module, *given: Any) -> Any:
        """Run the regularizer; `given` are the arguments of a hook of torch after the module."""
        site, args = self.site, given[0]
        value, index, x = self.pick(given)
        layer_input = x if self.at_input else args[0] if args else None
        needs_input = site.regularizer.needs_input and not self.at_input
        if needs_input and _gives_back(module, layer_input, x):
            raise site.error(
                "the layer gives its input back, which it may have changed in place, and "
                f"{site.regularizer.label} needs the unchanged input: work out of place there "
                "(x = x + y for x += y)"
            )
        run = operator.regularize if is_compiling() else act
        y = run(site, x, layer_input, module.training)
        if y is x:
            return None
        changed = y if index is None else indexing.put(value, index, y)
        if not self.at_input or len(given) == 1:  # quantization moves hooks without with_kwargs
            return changed
        return (args, changed) if isinstance(index, str) else (changed, given[1])

    def _compile(self, module: nn.Module, *given: Any) -> Any:
        """Run while torch.compile or torch.export traces.

        A site that is off in this mode adds nothing to the graph.
        """
        site = self.site
        check_version()
        on = site.acts(module.training) if is_exporting() else site.is_on(module.training)
        return self._act(module, *given) if on else None


def put_on(module: nn.Module, hook: SiteHook) -> None:
    """Put a hook on a layer, where its turn is.

    Regularizers of activations stand in written order. Regularizers of gradients stand in reverse
    order, because the backward meets them in reverse. Hooks of other libraries keep their places.
    """
    hooks = module._forward_pre_hooks if hook.at_input else module._forward_hooks
    there = {key: ours(each) for key, each in hooks.items()}
    turns = {key: each.turn for key, each in there.items() if isinstance(each, SiteHook)}
    least = hook.turn if hook.turn == Turn.GRADIENTS else hook.turn + 1
    later = [key for key, turn in turns.items() if turn >= least]
    if hook.at_input:
        module.register_forward_pre_hook(hook.__call__, with_kwargs=True)
    else:
        module.register_forward_hook(hook.__call__, with_kwargs=hook.with_kwargs)
    for key in later:
        hooks[key] = hooks.pop(key)


def _gives_back(module: nn.Module, given: Any, output: Tensor) -> bool:
    """Whether a layer returns the memory of its input; an ``nn.Identity`` may."""
    if isinstance(module, nn.Identity) or not isinstance(given, Tensor):
        return False
    alias = torch._C._is_alias_of  # type: ignore[attr-defined]  # torch's
    return output is given or (not is_compiling() and bool(alias(output, given)))


def ours(hook: Any) -> Any:
    """The `SiteHook` behind a registered method; other hooks are returned."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, SiteHook) else hook


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """All forward hooks of a module, whoever put them there."""
    yield from map(ours, module._forward_pre_hooks.values())
    yield from map(ours, module._forward_hooks.values())


def take_off(run: Run, module: nn.Module) -> None:
    """Take all hooks of an attachment off a module."""
    forward = module._forward_hooks_with_kwargs, module._forward_hooks_always_called
    tables: tuple[tuple[Any, ...], ...] = (
        (module._forward_hooks, *forward),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    )
    for each in tables:
        for key, hook in list(each[0].items()):
            if getattr(ours(hook), "run", None) is run:
                for table in each:
                    table.pop(key, None)


def holder(hook: SiteHook, model: nn.Module, name: str) -> nn.Module | None:
    """The module of a model that has a hook now.

    This is the module called `name`, unless its hooks were moved (``prepare_qat``), or it was put
    inside another module (a wrapper).
    """
    named = find_module(model, name)
    if named is not None and not hook.lost(named):
        return named
    return next((module for module in model.modules() if not hook.lost(module)), None)


def hooks_on(module: nn.Module) -> list[SiteHook]:
    """Our hooks on this very module, each once."""
    return list(dict.fromkeys(h for h in hooks_of(module) if isinstance(h, SiteHook)))
