"""The hooks that a site puts on its layer, and how they are put on, found and taken off.

They are objects of module-level classes, so that a model with hooks pickles and copies. They hold
their site, and no reference to the model, to the Attachment, or to a tensor of a graph.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from ..checkpointing import recomputing
from ..functional.axes import Form
from ..selectors.wrappers import find_module, shard_refusal
from . import indexing
from .identity import may_get_gradient, watch_grad
from .inplace import EntryHook
from .site import Site
from .traced import trace, trace_grad

_disabled: list[Any] = []


def _break_graph(call: Callable[..., Any], *given: Any) -> Any:
    """Call it as in eager mode: nothing in it is compiled."""
    if "torch._dynamo" not in sys.modules:
        return call(*given)  # importing dynamo takes a second
    if not _disabled:
        _disabled.append(torch.compiler.disable(_call))  # type: ignore[no-untyped-call]
    return _disabled[0](call, *given)


def _call(call: Callable[..., Any], *given: Any) -> Any:
    return call(*given)


class SiteHook:
    """Base of the hooks of a site on its layer."""

    parameter: str | None = None

    def __init__(self, site: Site) -> None:
        self.site = site

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        """Called by torch at every forward of the layer: what follows is paid in evaluation too."""
        site = self.site
        if is_compiling():
            return self._compile(module, *given)
        if not site.enter(module.training):
            return None
        if site.regularizer.traceable:
            return self._act(module, *given)
        return _break_graph(self._act, module, *given)

    @property
    def owner_name(self) -> str:
        """The name of the module that it is on."""
        return self.site.name.rpartition(".")[0] if self.parameter else self.site.name

    def install(self, module: nn.Module) -> None:
        """Put it on the module."""
        raise NotImplementedError

    def remove(self, module: nn.Module) -> None:
        """Take it off the module, if it is there."""
        take_off(self, module)

    def lost(self, module: nn.Module) -> bool:
        """Whether it is no longer on the module."""
        return all(hook is not self for hook in _hooks_of(module))

    def _act(self, module: nn.Module, *given: Any) -> Any:
        """What it does where its site has something to do; `given` is what torch calls it with."""
        raise NotImplementedError

    def _compile(self, module: nn.Module, *given: Any) -> Any:
        """Under torch.compile: nothing where the site has nothing to do, so that an export is
        clean; traced, or (where the regularizer can't be) a break in the graph.
        """
        site = self.site
        site.trace_mode(module.training)
        if not site.acts(module.training):
            return None
        if site.regularizer.traceable or torch.compiler.is_exporting():
            return self._act(module, *given)
        return _break_graph(self, module, *given)

    def _put_on(self, hooks: MutableMapping[int, Any], register: Callable[[], Any]) -> None:
        """Put it on a layer that has these hooks, where its turn is.

        What acts on activations comes first, in written order; then what acts on gradients, the
        last written first: the backward meets them the other way round. Those of a later
        Attachment follow in the backward, too.
        """
        watching = [key for key, hook in hooks.items() if _acts_on_gradients(hook)]
        register()
        for key in watching:
            hooks[key] = hooks.pop(key)

    def _treat(self, x: Tensor, layer_input: Any, training: bool, told: Any = ()) -> Tensor:
        """The tensor regularized, or with its gradient watched; `told` is what the layer took and
        gave.
        """
        site, compiling = self.site, is_compiling()
        if compiling or torch._C._is_tracing():
            _refuse_tracing(site, training)
        if site.regularizer.acts_on == "activation":
            if compiling:
                return trace(site, x, layer_input, training, told)
            return site.regularize(x, layer_input, training, told)
        if compiling:
            _refuse_transforms(site)
            return trace_grad(site, x, told) if may_get_gradient(x) else x
        values = site.values_of_the_forward(recomputing())
        return watch_grad(site, x, values, told) if may_get_gradient(x) else x


class OutputHook(SiteHook):
    """Forward hook: regularizes what the layer returns, or watches its gradient."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.entry = EntryHook() if site.regularizer.needs_input else None

    def install(self, module: nn.Module) -> None:
        if self.entry is not None:
            module.register_forward_pre_hook(self.entry)
        self._put_on(
            module._forward_hooks,
            lambda: module.register_forward_hook(self, with_kwargs=self.site.reads_sizes),
        )

    def remove(self, module: nn.Module) -> None:
        super().remove(module)
        if self.entry is not None:
            take_off(self.entry, module)

    def _act(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        *kwargs, output = rest
        site = self.site
        index = site.regularizer.index
        try:
            x = indexing.get(output, index)
        except ValueError as error:
            raise site.error(f"the output {error}") from None
        if self.entry and args and self.entry.gives_back_changed(module, args[0], x):
            raise site.error(
                f"the layer gives its input back, changed in place, and {site.regularizer.label} "
                "needs it as it was: work out of place there (x = x + y for x += y)"
            )
        taken = (*args, *kwargs[0].values()) if kwargs else args
        y = self._treat(x, args[0] if args else None, module.training, (*taken, output))
        if y is x:
            return None
        return y if index is None else indexing.put(output, index, y)


class InputHook(SiteHook):
    """Forward pre-hook: regularizes what the layer is given, or watches its gradient."""

    def install(self, module: nn.Module) -> None:
        self._put_on(
            module._forward_pre_hooks,
            lambda: module.register_forward_pre_hook(self, with_kwargs=True),
        )

    def _act(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        site = self.site
        index = 0 if site.regularizer.index is None else site.regularizer.index
        values: Any = kwargs if isinstance(index, str) else args
        try:
            x = indexing.get(values, index)
        except ValueError as error:
            given = f"(arguments: {len(args)}, keywords: {list(kwargs)})"
            raise site.error(f"what the layer is given {error} {given}") from None
        y = self._treat(x, x, module.training, (*args, *kwargs.values()))
        if y is x:
            return None
        changed = indexing.put(values, index, y)
        return (args, changed) if isinstance(index, str) else (changed, kwargs)


class ParameterHook(SiteHook):
    """Hooks a parameter, and again (forward pre-hook of its owner) when the object has changed.

    Copies, loaded models and ``load_state_dict(assign=True)`` hold new Parameter objects, which
    come without the hooks of the old ones.

    A gradient does not tell which forward it comes from. It is regularized where any forward with
    gradients since the last one was in training (or the site is always active): an evaluation
    between a training forward and its backward does not switch it off. Nothing but constants is
    written in a forward, so that compiled code has nothing to guard.

    Attributes:
        on: whether gradients are regularized, as decided at the last one.
        trained: whether a forward that is on has come since then.
        evaluated: whether a forward that is off, but with gradients, has come since then.
    """

    parameter: str

    def __init__(self, site: Site, parameter: str) -> None:
        super().__init__(site)
        self.parameter = parameter
        self.on = True
        self.trained = self.evaluated = False
        self.called = False  # whether its owner is ever called
        self._hooked: list[tuple[weakref.ref[Tensor], RemovableHandle]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hooked": []}

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self)
        self.on = self.site.is_on(module.training)
        self.rehook(module)

    def remove(self, module: nn.Module) -> None:
        super().remove(module)
        self._unhook()

    def lost(self, module: nn.Module) -> bool:
        parameter = module._parameters.get(self.parameter)
        return super().lost(module) or not self.holds(parameter)

    def holds(self, parameter: Tensor | None) -> bool:
        """Whether this very parameter is hooked."""
        for reference, _ in self._hooked:  # at every forward, so no generator
            hooked = reference()
            if hooked is not None and hooked is parameter:
                return True
        return False

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if is_compiling():
            return self._compile(module)
        self.called = True
        self.site.enter(module.training)
        if torch.is_grad_enabled():
            self.follow(module)
        return None

    def _compile(self, module: nn.Module, *given: Any) -> None:
        self.site.trace_mode(module.training)
        if torch.compiler.is_exporting():
            if self.site.acts(module.training):
                _refuse_tracing(self.site, module.training)
            return
        if self.site.acts(module.training):
            _refuse_transforms(self.site)
            self.site.record.meter.add_call()
        if torch.is_grad_enabled():
            # what was hooked stays hooked; `step` looks after it. The keeper has told the mode: to
            # write it again is a side effect, which a checkpoint in the graph does not allow
            if self.site.is_on(module.training):
                if not self.trained:
                    self.trained = True
            elif not self.evaluated:
                self.evaluated = True

    def follow(self, module: nn.Module) -> None:
        """Before gradients come: take over the mode of the owner, and its parameter."""
        self.take_mode(module)
        self.rehook(module)

    def take_mode(self, module: nn.Module) -> None:
        """A forward with gradients begins, in the mode of this module."""
        if self.site.is_on(module.training):
            self.trained = True
        else:
            self.evaluated = True

    def is_meant(self) -> bool:
        """Whether the gradient that has come is regularized."""
        if self.trained or self.evaluated:
            self.on, self.trained, self.evaluated = self.trained, False, False
        return self.on

    def rehook(self, module: nn.Module) -> None:
        """Hook the parameter, if it is another object than before.

        One that was hooked stays so: another may stand in its place for one call only, as in
        ``torch.func.functional_call``. All sites of the parameter hook it anew, in their order.
        """
        parameter = module._parameters.get(self.parameter)
        if self.holds(parameter):
            return
        refusal = shard_refusal(module) or _vmap_refusal(parameter)
        if refusal is not None:
            raise self.site.error(refusal)
        if parameter is None or not parameter.requires_grad:
            return
        for hook in self._on_the_same_parameter(module):
            hook._hook_last(parameter)

    def _on_the_same_parameter(self, module: nn.Module) -> list[ParameterHook]:
        found = [
            hook
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, ParameterHook) and hook.parameter == self.parameter
        ]
        return found if any(hook is self for hook in found) else [*found, self]

    def _hook_last(self, parameter: Tensor) -> None:
        """Hook a parameter behind all that have hooked it."""
        kept = []
        for reference, handle in self._hooked:
            hooked = reference()
            if hooked is parameter:
                handle.remove()
            elif hooked is not None:
                kept.append((reference, handle))
        hook = GradHook(self.site, self.site.form_of(parameter), self)
        handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        self._hooked = [*kept, (weakref.ref(parameter), handle)]

    def _unhook(self) -> None:
        for _, handle in self._hooked:
            handle.remove()
        self._hooked = []


class KeeperHook:
    """Forward pre-hook of the model: follows parameters whose owners are never called themselves.

    Such are the projections of an attention that takes their weights, and parameter lists. In
    compiled code it tells the mode of all: it stands before any checkpoint in the graph.
    """

    def __init__(self, hooks: Iterable[ParameterHook]) -> None:
        self.hooks = tuple(hooks)

    def __call__(self, model: nn.Module, *args: Any) -> None:
        if torch.compiler.is_exporting() or not torch.is_grad_enabled():
            return
        if is_compiling():
            for hook in self.hooks:
                hook.take_mode(_submodule(model, hook.owner_name) or model)
            return
        for hook in self.hooks:
            if not hook.called:
                owner = find_module(model, hook.owner_name)
                if owner is not None:
                    hook.follow(owner)


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    """As `find_module`, but for wrappers: that is what torch.compile can trace."""
    module: nn.Module | None = model
    for key in name.split(".") if name else ():
        module = None if module is None else module._modules.get(key)
    return module


class GradHook:
    """Tensor hook of a parameter: regularizes its gradient, unless that was switched off.

    A parameter outlives its graphs, so the rates are those of the backward.
    """

    __torch_unserializable__ = True  # a ParameterHook puts it back after loading

    def __init__(self, site: Site, form: Form, owner: ParameterHook) -> None:
        self.site = site
        self.form = form
        self.owner = owner

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        control = self.site.control
        if grad is None or not self.owner.is_meant():
            return None
        if not (control.installed and control.enabled):
            return None
        return self.site.regularize_grad(grad, self.form, self.site.values)


def _refuse_tracing(site: Site, training: bool) -> None:
    """Raise SiteError where a trace or an export would not keep what the site does."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    if tracing and site.is_on(training):
        raise site.error(
            "torch.jit.trace would keep the rate of now for good: call model.eval() before "
            "tracing, and leave active='always' out; torch.export can hold it"
        )
    if torch.compiler.is_exporting() and site.regularizer.acts_on == "gradient":
        raise site.error(
            "torch.export keeps a forward alone, without what acts on gradients: call "
            "model.eval() before exporting"
        )


def _refuse_transforms(site: Site) -> None:
    """Raise SiteError in a graph of ``torch.func``, which would lose what acts on gradients.

    Where torch.compile may break the graph, it does, and eager mode follows.
    """
    if torch._C._are_functorch_transforms_active():
        raise site.error(
            "torch.compile can't trace what acts on gradients inside torch.func.grad, vmap and the "
            "like: leave fullgraph=True out, or call it without torch.compile"
        )


def _vmap_refusal(parameter: Tensor | None) -> str | None:
    """Why a parameter under ``torch.func.vmap`` can't be hooked, where it would get a gradient."""
    functorch = torch._C._functorch
    if parameter is None or not functorch.is_batchedtensor(parameter):
        return None
    below = functorch.get_unwrapped(parameter)
    if not (below.requires_grad or functorch.is_functorch_wrapped_tensor(below)):
        return None
    return (
        "torch.func.vmap has stacked the parameter, and a hook on it sees no gradient: regularize "
        "the gradient at the output of the layer, or take vmap of torch.func.grad"
    )


def _acts_on_gradients(hook: object) -> bool:
    return isinstance(hook, SiteHook) and hook.site.regularizer.acts_on == "gradient"


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def take_off(hook: object, module: nn.Module) -> None:
    """Take a hook off a module, if it is there."""
    forward = module._forward_hooks_with_kwargs, module._forward_hooks_always_called
    for hooks, extras in (
        (module._forward_hooks, forward),
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
    ):
        for key in [key for key, there in hooks.items() if cast(object, there) is hook]:
            for table in (hooks, *extras):
                table.pop(key, None)


def hooks_on(module: nn.Module) -> list[SiteHook]:
    """Our hooks on this very module."""
    return [hook for hook in _hooks_of(module) if isinstance(hook, SiteHook)]


def keepers_on(module: nn.Module) -> list[KeeperHook]:
    """Our keepers on this very module."""
    return [hook for hook in _hooks_of(module) if isinstance(hook, KeeperHook)]


def make_hook(site: Site, parameter: str | None) -> SiteHook:
    """The hook that a site needs."""
    if parameter is not None:
        return ParameterHook(site, parameter)
    return OutputHook(site) if site.regularizer.at == "output" else InputHook(site)
