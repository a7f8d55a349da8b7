"""The hooks that a site puts on its layer, and how they are put on, found and taken off.

They are objects of module-level classes, so that a model with hooks pickles and copies. They hold
their site, and no reference to the model, to the Attachment, or to a tensor of a graph.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from . import elements
from .entry import EntryHook
from .layouts import Form
from .site import Site
from .tracing import trace, trace_grad
from .wrappers import find_module, shard_refusal

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
        if not site.acts(module.training):
            return None
        if site.regularizer.traceable or torch.compiler.is_exporting():
            return self._act(module, *given)
        return _break_graph(self, module, *given)

    def _treat(
        self, x: Tensor, layer_input: Any, taken: Iterable[Any], training: bool, told: Any = ()
    ) -> Tensor:
        """The tensor regularized, or with its gradient watched.

        `taken` is what the layer took, `told` that and what it gave.
        """
        site, compiling = self.site, is_compiling()
        if compiling or torch._C._is_tracing():
            _refuse_tracing(site, training)
        if site.regularizer.acts_on == "activation":
            if compiling:
                return trace(site, x, layer_input, training, told)
            return site.regularize(x, layer_input, training, told)
        if not x.requires_grad:
            return x
        if compiling:
            return trace_grad(site, x, told)
        if x.is_leaf or any(x is value for value in taken):
            # only this use of it is meant; a view would lose the hook before an in-place layer
            x = x.clone()
        x.register_hook(GradHook(site, site.form_of(x, told)))  # type: ignore[no-untyped-call]
        return x


class OutputHook(SiteHook):
    """Forward hook: regularizes what the layer returns, or watches its gradient."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.entry = EntryHook() if site.regularizer.needs_input else None

    def install(self, module: nn.Module) -> None:
        # dearer, so not for all
        with_kwargs = self.site.regularizer.acts_on == "gradient" or self.site.reads_sizes
        if self.entry is not None:
            module.register_forward_pre_hook(self.entry)
        module.register_forward_hook(self, with_kwargs=with_kwargs)

    def remove(self, module: nn.Module) -> None:
        super().remove(module)
        if self.entry is not None:
            take_off(self.entry, module)

    def _act(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        *kwargs, output = rest
        site = self.site
        index = site.regularizer.index
        try:
            x = elements.get(output, index)
        except ValueError as error:
            raise site.error(f"the output {error}") from None
        if self.entry and args and self.entry.gives_back_changed(module, args[0], x):
            raise site.error(
                f"the layer gives its input back, changed in place, and {site.regularizer.label} "
                "needs it as it was: work out of place there (x = x + y for x += y)"
            )
        taken = (*args, *kwargs[0].values()) if kwargs else args
        y = self._treat(x, args[0] if args else None, taken, module.training, (*taken, output))
        return None if y is x else elements.put(output, index, y)


class InputHook(SiteHook):
    """Forward pre-hook: regularizes what the layer is given, or watches its gradient."""

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self, with_kwargs=True)

    def _act(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        site = self.site
        index = 0 if site.regularizer.index is None else site.regularizer.index
        values: Any = kwargs if isinstance(index, str) else args
        try:
            x = elements.get(values, index)
        except ValueError as error:
            raise site.error(
                f"{error} (arguments: {len(args)}, keywords: {list(kwargs)})"
            ) from None
        y = self._treat(x, x, (x,), module.training, (*args, *kwargs.values()))
        if y is x:
            return None
        changed = elements.put(values, index, y)
        return (args, changed) if isinstance(index, str) else (changed, kwargs)


class ParameterHook(SiteHook):
    """Hooks a parameter, and again (forward pre-hook of its owner) when the object has changed.

    Copies, loaded models and ``load_state_dict(assign=True)`` hold new Parameter objects, which
    come without the hooks of the old ones.
    """

    parameter: str

    def __init__(self, site: Site, parameter: str) -> None:
        super().__init__(site)
        self.parameter = parameter
        self.on = True
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
        return super().lost(module) or not self._is_hooked(parameter)

    def follows(self, module: nn.Module) -> bool:
        """Whether the parameter that this module has now is hooked, and will stay so."""
        here = module._parameters.get(self.parameter)
        if here is None or not here.requires_grad or not self._is_hooked(here):
            return False
        return shard_refusal(module) is None and not self.site.record.eager_calls

    def _is_hooked(self, parameter: Tensor | None) -> bool:
        for reference, _ in self._hooked:  # at every forward, so no generator
            hooked = reference()
            if hooked is not None and hooked is parameter:
                return True
        return False

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if is_compiling():
            return self._compile(module)
        self.site.enter(module.training)
        if torch.is_grad_enabled():
            self.follow(module)
        return None

    def _compile(self, module: nn.Module, *given: Any) -> None:
        if not torch.compiler.is_exporting():
            self.take_mode(module)  # what was hooked stays hooked; `step` looks after it
            if self.site.acts(module.training):
                self.site.record.meter.add_call()
        elif self.site.acts(module.training):
            _refuse_tracing(self.site, module.training)

    def follow(self, module: nn.Module) -> None:
        """Before gradients come: take over the mode of the owner, and its parameter."""
        self.on = self.site.is_on(module.training)
        self.rehook(module)

    def rehook(self, module: nn.Module) -> None:
        """Hook the parameter, if it is another object than before.

        One that was hooked stays so: another may stand in its place for one call only, as in
        ``torch.func.functional_call``.
        """
        parameter = module._parameters.get(self.parameter)
        if self._is_hooked(parameter):
            return
        refusal = shard_refusal(module)
        if refusal is not None:
            raise self.site.error(refusal)
        self._hooked = [pair for pair in self._hooked if pair[0]() is not None]
        if parameter is not None and parameter.requires_grad:
            hook = GradHook(self.site, self.site.form_of(parameter), self)
            handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
            self._hooked.append((weakref.ref(parameter), handle))

    def take_mode(self, module: nn.Module) -> None:
        """Act on the next gradients as the mode of this module says."""
        if torch.is_grad_enabled():
            self.on = self.site.is_on(module.training)

    def _unhook(self) -> None:
        for _, handle in self._hooked:
            handle.remove()
        self._hooked = []


class KeeperHook:
    """Forward pre-hook of the model: follows parameters whose owners are never called themselves.

    Such are the projections of an attention that takes their weights, and parameter lists.
    """

    def __init__(self, hooks: Iterable[ParameterHook]) -> None:
        self.hooks = tuple(hooks)

    def __call__(self, model: nn.Module, *args: Any) -> None:
        if torch.compiler.is_exporting():
            return
        if torch.compiler.is_compiling():
            for hook in self.hooks:
                hook.take_mode(model)  # an owner that is called will say its own
            return
        if not torch.is_grad_enabled():
            return
        for hook in self.hooks:
            if not hook.site.record.eager_calls:
                owner = find_module(model, hook.owner_name)
                if owner is not None:
                    hook.follow(owner)


class GradHook:
    """Tensor hook: regularizes a gradient in the backward, unless it was switched off since."""

    __torch_unserializable__ = True  # a ParameterHook puts it back after loading

    def __init__(self, site: Site, form: Form, owner: ParameterHook | None = None) -> None:
        self.site = site
        self.form = form
        self.owner = owner

    def __call__(self, grad: Tensor) -> Tensor | None:
        control = self.site.control
        if not (control.installed and control.enabled) or (self.owner and not self.owner.on):
            return None
        return self.site.regularize_grad(grad, self.form)


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
