"""The hooks of a site whose layer drops by itself: they hold the layer's own rate."""

import inspect
import re
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

from ..checkpointing import NO_TASK, graph_task
from .hooks import OutputHook, SiteHook, Turn, hooks_on
from .site import Site


class OwnRateHook(SiteHook):
    """Base of the hooks that set an attribute of a module to the rate of now.

    Attributes:
        attribute: its name; None of an ``nn.Identity``, which has none.
        before: what it, and others that were changed with it, held before.
    """

    attribute: str | None
    before: dict[str, Any]

    def put(self, module: nn.Module) -> None:
        """Put the rate of now in place; what was there before where nothing is to act."""
        control = self.site.control
        on = control.installed and control.enabled
        for name, value in (self.held() if on else self.before).items():
            if getattr(module, name, None) is not value:
                setattr(module, name, value)

    def held(self) -> dict[str, Any]:
        """The values of the attributes now."""
        return dict.fromkeys(self.before, self.site.rate)

    @property
    def is_constant_in_code(self) -> bool:
        """Whether compiled code holds the rate as a constant: each value is compiled anew."""
        return self.attribute is not None

    def _count_call(self) -> None:
        """Count a call; what it has dropped is not known."""
        record = self.site.record
        if is_exporting():
            return  # there is nothing to count into
        if is_compiling():
            record.meter.add_call()
            record.meter.add_active(None, 0, 0.0)
        elif graph_task() == NO_TASK:
            record.add_active(None, 0, 0.0)

    def remove(self, module: nn.Module) -> None:
        super().remove(module)
        for name, value in self.before.items():
            setattr(module, name, value)


class RetuneHook(OwnRateHook, OutputHook):
    """On a layer. Where ours is its function, its rate is 0 from its first call on, and ours acts.

    A layer that is only read, as fused attention reads the rate of a dropout, so keeps the rate.

    Attributes:
        called: whether training has ever called the layer.
        counts_zeros: whether what a layer with a function of its own sets to zero is what it drops.
    """

    turn = Turn.FIRST

    def __init__(self, site: Site, attribute: str | None) -> None:
        super().__init__(site)
        self.attribute, self.called, self.before = attribute, False, {}
        self.counts_zeros = False

    @property
    def ours(self) -> bool:
        """Whether ours is the function of the layer."""
        return getattr(self.site.regularizer, "function", None) is not None

    @property
    def is_constant_in_code(self) -> bool:
        return self.attribute is not None and not (self.ours and self.called)

    def install(self, module: nn.Module) -> None:
        self.counts_zeros = not module._modules and not module._parameters
        if self.attribute is not None:
            names = [self.attribute]
            if getattr(module, "inplace", False):
                names.append("inplace")  # what it is given is needed
            self.before = {name: getattr(module, name) for name in names}
            if self.ours:
                module.register_forward_pre_hook(self._first_call)
        # first of all: whatever is on the layer gets what the layer itself would give
        module.register_forward_hook(self.__call__, with_kwargs=True, prepend=True)
        self.put(module)

    def held(self) -> dict[str, Any]:
        if self.ours and not self.called:  # compiled code can't tell at once
            self.called = self.site.record.read(elements=False).compiled > 0
        rate = 0.0 if self.ours and self.called else self.site.rate
        return {name: False if name == "inplace" else rate for name in self.before}

    def _first_call(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook, until training calls the layer: a checkpoint must not see another rate
        when it repeats the call. In compiled code nothing may be written; there `_act` takes what
        the layer was given. An evaluation may call what training reads, to look at attention.
        """
        if is_compiling() or not module.training:
            return
        self.called = True
        self.put(module)
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "__self__", None) is self:
                del module._forward_pre_hooks[key]

    def _act(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        kwargs, output = rest
        known = isinstance(output, Tensor) and output.is_floating_point() and self.counts_zeros
        if not self.ours and not known:
            return self._count_call()  # of what gives a mask, or does more than to drop
        given = (*args, *kwargs.values())
        if is_compiling() and self.ours and given:
            output = given[0]
        return super()._act(module, given, {}, output)

    def is_read_by(self, parent: nn.Module) -> bool:
        """Whether the forward of the module around it reads the rate, as its source has it."""
        return self.attribute is not None and reads(
            parent, f"{self.site.name.rpartition('.')[2]}.{self.attribute}"
        )


class AttributeHook(OwnRateHook):
    """On a module that holds a rate itself: sets it, and counts the calls of the module."""

    attribute: str

    def __init__(self, site: Site, attribute: str) -> None:
        super().__init__(site)
        self.attribute, self.before = attribute, {}

    @property
    def owner_name(self) -> str:
        return self.site.name.rpartition(".")[0]

    def install(self, module: nn.Module) -> None:
        self.before = {self.attribute: getattr(module, self.attribute)}
        module.register_forward_pre_hook(self.__call__)
        self.put(module)

    def _act(self, module: nn.Module, *given: Any) -> None:
        self._count_call()


def own_rate_hooks(module: nn.Module) -> list[OwnRateHook]:
    """Those on this very module."""
    return [hook for hook in hooks_on(module) if isinstance(hook, OwnRateHook)]


def reads(module: nn.Module, name: str) -> bool:
    """Whether the forward of a module mentions ``self.<name>``; True where its source is lost."""
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return True
    return re.search(rf"\bself\.{re.escape(name)}\b", source) is not None
