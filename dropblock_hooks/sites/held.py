"""The hooks for values that a module holds, instead of a tensor that passes through it.

    RetuneHook     the rate of a dropout that the model already has
    FreezeHook     the mode of a norm, for `FreezeNorm`
    ParameterHook  a parameter; puts a `GradHook` or an `AccumulatedHook` on it

``attachment.place.HOOKS`` says which targets and regularizers get which hook. torch calls these
hooks before or after each forward of the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, compiler, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from .. import messages
from .._torch import (
    COMPILING,
    NO_PARAMETERS,
    NO_TASK,
    PARAMETERS,
    accumulate_hooks_of,
    address_of,
    children_of,
    graph_task,
    hooks_of_tensor,
    parameters_of,
    run_as_python,
    set_eval_frame,
    set_hooks_of_tensor,
    transforming,
)
from ..axes.view import OF_PARAMETER
from ..compiling import is_exporting
from ..findings import tell
from ..observers.base import Observer
from ..quoting import with_article
from ..regularizers.base import Regularizer
from ..regularizers.foreign import Retune, in_place_of
from ..regularizers.freeze_norm import FreezeNorm
from ..selectors.dropouts import RATES, has_no_effect, is_read_above, rate_attribute
from ..selectors.index import Index, Target
from ..selectors.wrappers import bare_type, is_distributed, is_gathered, shard_refusal
from . import compiled, indexing
from .hooks import Call, Precedence, SiteHook, is_quantized
from .site import LiveSite, is_due, refuse_tracing, regularize_grad, see_grad


def acts_once(regularizer: Regularizer) -> bool:
    """Return whether a regularizer gets a gradient only once all processes have added it up.

    It is the argument `once` of `shard_refusal`.
    """
    return regularizer.accumulates or isinstance(regularizer, Observer)


class RetuneHook(SiteHook):
    """Sets the rate of a dropout layer to 0, and drops in its place.

    In three cases it sets the present rate instead, and the layer drops: for a layer of an unknown
    class, for a rate that other code reads, and for an ``attr:`` target.
    """

    takes = Retune
    precedence = Precedence.BEFORE
    before: Any = None  # the value that the attribute had before `install`

    @classmethod
    def fitted(cls, target: Target, regularizer: Any, index: Index) -> Regularizer:
        attribute = target.local or rate_attribute(target.module) or ""
        names = (target.name, *target.aliases)
        is_read = not target.local and is_read_above(index.model, names, attribute)
        ours = None  # the regularizer that drops in place of the layer, if it may
        if not (target.local or is_read):
            ours = in_place_of(target.module)
        fitted: Retune = regularizer.fitted(attribute, ours, read_elsewhere=is_read)
        return fitted

    @classmethod
    def refusals(cls, target: Target, regularizer: Any) -> Iterator[str | None]:
        kind = bare_type(target.module).__name__
        if not regularizer.attribute:
            yield (
                f"{with_article(kind)} has no {' or '.join(RATES)} that is a number in [0, 1] and "
                "can be set. builtin(model) lists all rates, with their selectors. On an "
                "nn.Identity in place of a drop path, put DropPath(p=...)"
            )
        elif has_no_effect(target.module, regularizer.attribute):
            yield (
                f"{with_article(kind)} drops between its layers, and this one has one layer: put "
                "Dropout(p=..., index=0) on it"
            )
        elif regularizer.ours is None and regularizer.active == "always":
            yield f"the {kind} itself drops, in training mode only: leave active='always' out"

    def __init__(self, site: LiveSite, local: str = "") -> None:
        super().__init__(site, local)
        retune: Any = site.regularizer
        self.attribute = retune.attribute
        self.holds_rate = retune.ours is None
        self.direct = self.direct and not self.holds_rate  # otherwise `_act` counts the calls

    def install(self, module: nn.Module) -> None:
        self.before = getattr(module, self.attribute)
        # before all other hooks, which then see the dropped tensor
        module.register_forward_hook(self.__call__, prepend=True)
        module.register_forward_pre_hook(self.follow_mode)
        self.refresh(module)

    def restore(self, module: nn.Module) -> None:
        if self.before is not None:  # the hook was installed
            setattr(module, self.attribute, self.before)

    def refresh(self, module: nn.Module) -> None:
        """Set the attribute to its present value for training."""
        setattr(module, self.attribute, self.value(training=True))

    def value(self, training: bool) -> Any:
        """Return the value of the attribute: the present rate, or 0 if this hook drops.

        While the attachment is switched off, it is the value from before `install`. If the module
        holds the rate, this is also the value in evaluation mode, because some models read their
        rate there.
        """
        if not (self.run.installed and self.run.enabled):
            return self.before
        if not self.holds_rate:
            return 0.0
        return self.site.rate if training else self.before

    def follow_mode(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook: set the value of this mode, which other code may have changed."""
        value = self.value(module.training)
        present = getattr(module, self.attribute)
        if present == value:
            return
        setattr(module, self.attribute, value)
        if is_compiling():
            return

        expected = self.value(training=True), self.value(training=False), self.before
        if present in expected:
            return
        finding = messages.OWN_RATE.finding(
            self.site.key,
            epoch=self.run.epoch,
            attribute=self.attribute,
            value=present,
        )
        tell([finding], self.run.told)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        result = super().__call__(module, args, *rest)
        if self.holds_rate and not module.training:
            # set the rate of training again, because training may call another method than
            # `forward`, and then no hook runs
            self.refresh(module)
        return result

    def _act(self, module: nn.Module, args: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
        if not self.holds_rate:
            return super()._act(module, args, rest)
        # only the call is counted, because the module does not say how much it has dropped
        if is_compiling():
            self._note_compiled(module, self.call_of(args, rest))
        elif graph_task() == NO_TASK:
            self.site.tally.add(affected=None, total=0, rate=0.0)
        return None

    def _note_compiled(self, module: nn.Module, call: Call) -> None:
        """Count a call in compiled code, on the device of any of its tensors."""
        if is_exporting():
            return
        tensors = indexing.flatten(tuple(call)).tensors
        if tensors:
            compiled.note(self.site, tensors[0].device, module.training)


class FreezeHook(SiteHook):
    """Puts a norm into evaluation mode before each of its forwards, and back after it.

    Attributes:
        frozen: whether the norm is frozen now. torch.compile traces the hook once for each value.
        holds: whether this hook has put the norm into evaluation mode.
        switched_off: the parameters whose ``requires_grad`` this hook has set to False.
    """

    takes = FreezeNorm
    precedence = Precedence.BEFORE

    def __init__(self, site: LiveSite, local: str = "") -> None:
        super().__init__(site, local)
        self.frozen = False
        self.holds = False
        self.switched_off: set[str] = set()

    @classmethod
    def refusals(cls, target: Target, regularizer: Any) -> Iterator[str | None]:
        yield from super().refusals(target, regularizer)
        if regularizer.parameters:
            yield shard_refusal(target.module, acts_on_parts=False, once=False)

    def install(self, module: nn.Module) -> None:
        # before all other hooks, and also when the forward of the norm raises an error
        module.register_forward_hook(self.__call__, prepend=True, always_call=True)
        module.register_forward_pre_hook(self.freeze)
        self.refresh(module)

    def restore(self, module: nn.Module) -> None:
        self.refresh(module)

    def refresh(self, module: nn.Module) -> None:
        """Note whether the norm is frozen now; freeze its parameters, or unfreeze them again."""
        self.frozen = self.run.installed and self.run.enabled and bool(self.site.rate)
        if self.frozen:
            self._freeze_parameters(module)
            return

        for name in self.switched_off:
            parameter = parameters_of(module).get(name)
            if parameter is not None:
                parameter.requires_grad_(True)
        self.switched_off = set()

    def _freeze_parameters(self, module: nn.Module) -> None:
        """Freeze the weight and the bias, if the regularizer says so.

        It runs in each eager forward in which the norm is frozen, because other code may have
        unfrozen them.
        """
        regularizer: Any = self.site.regularizer
        if not regularizer.parameters:
            return
        for name in ("weight", "bias"):
            parameter = parameters_of(module).get(name)
            if parameter is not None and parameter.requires_grad and parameter.is_leaf:
                parameter.requires_grad_(False)
                parameter.grad = None  # an optimizer would still use this gradient
                self.switched_off.add(name)

    def freeze(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook: put the norm into evaluation mode."""
        if not (self.frozen and module.training):
            return
        module.training = False
        self.holds = True
        if not is_compiling():
            self._freeze_parameters(module)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        if self.holds:
            module.training = True
            self.holds = False
        return super().__call__(module, args, *rest)

    def _act(self, module: nn.Module, args: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
        """Count a call whose output is not one dense tensor. `perform` counts all other calls."""
        if is_compiling():
            return super()._act(module, args, rest)
        if graph_task() == NO_TASK:
            self.site.tally.add(affected=None, total=0, rate=0.0)
        return None


class ParameterHook(SiteHook):
    """Forward pre-hook of the module of a parameter: counts calls, and hooks new parameters.

    Before each forward, it makes sure that the parameter which the module holds now has a hook of
    this site: a `GradHook`, or an `AccumulatedHook` if the parameter is sharded. If the site acts
    once per update, the parameter needs no hook, and calls are only counted.
    """

    by_call = False

    def __init__(self, site: LiveSite, local: str = "") -> None:
        super().__init__(site, local)
        self.direct = False  # so that compiled code calls `_act`
        self.handles: list[RemovableHandle] = []  # of the hooks on all present tensors

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handles": []}  # a copy has other parameters

    @classmethod
    def refusals(cls, target: Target, regularizer: Regularizer) -> Iterator[str | None]:
        parameter: Any = parameters_of(target.module)[target.local]
        if regularizer.acts_on != "gradient":
            yield (
                "a parameter takes only regularizers of gradients, such as ClipGradNorm, and the "
                "observers GradientStats and WeightStats"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            yield "the parameter is not initialized: run a forward first"
        if parameter.is_complex():
            yield "the parameter is complex: only gradients of real parameters are regularized"
        acts_on_parts = bool(regularizer.parts)
        yield shard_refusal(
            target.module,
            acts_on_parts,
            once=acts_once(regularizer),
            anchored=regularizer.anchored,
        )
        yield regularizer.refusal(target.module, parameter)

    def install(self, module: nn.Module) -> None:
        self.layer_type = None if is_quantized(module) else type(module)
        module.register_forward_pre_hook(self.__call__)
        parameter = self.held(module)
        if self.site.regularizer.anchored:
            self.site.anchor = parameter.detach().clone()
            self.site.anchored_at = address_of(parameter), parameter._version
        # FSDP puts a gathered copy into the module for one forward, but an observer needs the
        # sharded parameter
        is_copy = self.site.watch is not None and is_gathered(module)
        if parameter.requires_grad and not (self.site.accumulates or is_copy):
            self._hook(parameter, module)

    def restore(self, module: nn.Module) -> None:
        self._unhook(self.held(module))
        for handle in self.handles:  # also of earlier parameters, and of a functional_call
            handle.remove()

    def _unhook(self, parameter: Any) -> None:
        """Take the hooks of this site off a parameter."""
        for hooks in (hooks_of_tensor(parameter), accumulate_hooks_of(parameter)):
            for key, tensor_hook in list(hooks.items()):
                if getattr(tensor_hook, "hook", None) is self:
                    del hooks[key]

    def read_layer(self, module: nn.Module, together: bool = False) -> None:
        super().read_layer(module, together)
        # a parameter that was unfrozen since the last reading may have no hook yet
        is_unhooked = self.site.frozen and not self.follows(module)
        self.site.frozen = is_unhooked or self.is_frozen(module)

    def is_frozen(self, module: nn.Module) -> bool:
        """Return whether the parameter gets no gradient, so that it needs no hook now."""
        parameter = self.held(module)
        return parameter is not None and not parameter.requires_grad

    def held(self, module: nn.Module) -> Any:
        """Return the parameter that a module holds now; None if it holds none.

        torch.nn.utils.prune renames it, and torch.nn.utils.parametrize moves it to a child.
        """
        # the usual case first, because this runs for each parameter in each step; see `PARAMETERS`
        parameter = vars(module).get(PARAMETERS, NO_PARAMETERS).get(self.local)
        if parameter is not None:
            return parameter
        parameters = parameters_of(module)
        parameter = parameters.get(self.local, parameters.get(f"{self.local}_orig"))
        parametrized = children_of(module).get("parametrizations")
        if parameter is None and parametrized is not None:
            original = children_of(parametrized).get(self.local)
            return None if original is None else parameters_of(original).get("original")
        return parameter

    def follows(self, module: nn.Module) -> bool:
        """Return whether this site gets the gradient of the parameter that a module holds now."""
        if self.site.accumulates:  # the step of the optimizer has a hook
            return not self.lost(module)
        if self.site.watch is not None and is_gathered(module):  # a gathered copy, see `install`
            return not self.lost(module)
        parameter = self.held(module)
        is_ordinary = type(parameter) is nn.Parameter  # a fast test, for this runs in each forward
        if not is_ordinary and is_distributed(parameter):
            hooks = accumulate_hooks_of(parameter)
        else:
            hooks = hooks_of_tensor(parameter)
        for tensor_hook in hooks.values():  # a generator would take longer in each forward
            if isinstance(tensor_hook, AccumulatedHook) and tensor_hook.hook is self:
                return tensor_hook.owner() is module
            if isinstance(tensor_hook, GradHook) and tensor_hook.hook is self:
                # False after torch.utils.swap_tensors. Then the hook is listed, but does not run.
                has_same_tensor = tensor_hook.impl == address_of(parameter)
                return tensor_hook.owner() is module and has_same_tensor
        return False

    def call_of(self, args: tuple[Any, ...], rest: tuple[Any, ...]) -> Call:
        return Call(args)

    @run_as_python
    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """Run in every forward of the module. A model has many parameters, so this is short.

        The hooks of a compiled model itself run outside of its graph. Dynamo would compile each of
        them alone, once for each parameter.
        """
        # the function is_compiling() would take longer
        if is_dynamo_compiling() or getattr(compiler, COMPILING, False):
            self._compile(module, args, rest)
            return

        callback = set_eval_frame(None)  # otherwise dynamo would compile what this calls
        try:
            training = module.training
            if training and type(module) is not self.layer_type:
                training = not is_quantized(module)
            if not self.site.enter(training):
                return
            if transforming():
                refuse_tracing(self.site, module.training)

            for hooks_of_step in self.run.optimizers:
                hooks_of_step.began = False  # a step that raised an error has not reset this
            if not self.site.accumulates:  # otherwise the optimizer has the hook
                self._hook_present(module)
        finally:
            set_eval_frame(callback)

    def _hook_present(self, module: nn.Module) -> None:
        """Hook the parameter that the module holds now, if that was not done before."""
        if not self.run.checked:
            parameter = self.held(module)
            if parameter is not None:
                self.site.note_autocast(parameter.device)
        if torch.is_grad_enabled() and not self.follows(module):
            self.refresh(module)

    def _act(self, module: nn.Module, args: tuple[Any, ...], rest: tuple[Any, ...]) -> None:
        """Count a call in compiled code."""
        refuse_tracing(self.site, module.training)
        self._note_compiled(module)

    def _note_compiled(self, module: nn.Module) -> None:
        """Count a call in compiled code, on the device of the parameter."""
        parameter = self.held(module)
        if parameter is not None and not is_exporting():
            compiled.note(self.site, parameter.device, module.training)

    def refresh(self, module: nn.Module) -> None:
        """Hook a new parameter, as in a copy. The old one stays hooked, for it may come back."""
        if not self.run.installed or self.site.accumulates or self.follows(module):
            return
        regularizer = self.site.regularizer
        acts_on_parts = bool(regularizer.parts)
        refusal = shard_refusal(
            module,
            acts_on_parts,
            once=acts_once(regularizer),
            anchored=regularizer.anchored,
        )
        if refusal is not None:
            raise self.site.error(refusal)
        parameter = self.held(module)
        if parameter is not None and parameter.requires_grad:
            self._unhook(parameter)
            self._hook(parameter, module)

    def _hook(self, parameter: Any, module: nn.Module) -> None:
        """Hook a parameter of the module."""
        # Forget the handles of tensors that are gone. A handle has a weak reference to the hooks of
        # its tensor. One to the tensor itself would prevent torch.utils.swap_tensors.
        self.handles = [handle for handle in self.handles if handle.hooks_dict_ref() is not None]

        if is_distributed(parameter):
            hook = AccumulatedHook(self, weakref.ref(module))
            self.handles.append(parameter.register_post_accumulate_grad_hook(hook))
            return
        # In the backward, the hook finds a leaf in the module. Another tensor, as in a
        # functional_call, may be gone by then, so the hook keeps its value.
        is_in_module = parameter.is_leaf and not transforming()
        tensor_hook = GradHook(
            self,
            owner=weakref.ref(module),
            impl=address_of(parameter),
            value=None if is_in_module else parameter.detach(),
        )
        handle = parameter.register_hook(tensor_hook)
        self.handles.append(handle)

        # a higher precedence comes first, as in the backward of a layer
        hooks = hooks_of_tensor(parameter)
        for key, other in list(hooks.items()):
            if isinstance(other, GradHook) and other.hook.precedence < self.precedence:
                hooks[key] = hooks.pop(key)
        # After torch.utils.swap_tensors, the parameter has another C++ tensor, which runs no hooks
        # until they are set again.
        set_hooks_of_tensor(parameter, hooks)


@dataclass(eq=False)
class AccumulatedHook:
    """Hook of a sharded parameter: shows its gradient to an observer.

    It runs after the processes have added up the gradient. It gathers the parts of all processes,
    so all processes must measure the same gradients.
    """

    hook: ParameterHook
    owner: weakref.ref[nn.Module]  # the module that holds the parameter
    __torch_unserializable__ = True  # a ParameterHook puts it back after loading

    def __call__(self, parameter: Any) -> None:
        module = self.owner()
        site = self.hook.site
        if module is None or not site.acts(module.training) or not is_due(site, training=True):
            return
        grad = parameter.grad
        if site.bound.observer.sees_gradients and is_distributed(grad):
            grad = grad.full_tensor()
        see_grad(site, grad)


@dataclass(eq=False)
class GradHook:
    """Tensor hook of a parameter: regularizes its gradient, with the rates during the backward.

    Attributes:
        hook: the hook on the module.
        owner: the module that holds the parameter.
        impl: the address of the C++ tensor of the parameter.
        value: the detached parameter, if it is no leaf; None for a leaf, read from the module.
    """

    hook: ParameterHook
    owner: weakref.ref[nn.Module]
    impl: int
    value: Tensor | None
    __torch_unserializable__ = True  # a ParameterHook puts it back after loading

    def __call__(self, grad: Tensor | None) -> Any:
        module = self.owner()
        site = self.hook.site
        # the forward of a gradient is unknown, so the present mode of the module decides
        if module is None or not (module.training or site.is_on(False)):
            return grad
        value = self._leaf_in(module) if self.value is None else self.value
        return regularize_grad(site, OF_PARAMETER, site.values, grad, parameter=value)

    def _leaf_in(self, module: nn.Module) -> Tensor:
        """Return the parameter in its module.

        Raises:
            SiteError: if the module does not hold it any more, under no name.
        """
        held: Tensor | None = self.hook.held(module)
        if held is not None:
            return held
        for parameter in parameters_of(module).values():  # prune.remove gives it another name
            if parameter is not None and address_of(parameter) == self.impl:
                found: Tensor = parameter
                return found
        message = messages.PARAMETER_GONE
        text = message.text.format(name=self.hook.local)
        raise self.hook.site.error(f"{text}. {message.cure}")
