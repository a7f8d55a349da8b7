"""The hook of `Retune`: it sets the attribute that holds a layer's own rate."""

from typing import Any

from torch import nn
from torch.compiler import is_compiling

from ..checkpointing import NO_TASK, graph_task
from ..handles import is_exporting
from . import operator
from .hooks import SiteHook, Turn
from .site import Site


class RetuneHook(SiteHook):
    """Sets an attribute of a module to 0 and drops in its place, or sets it to the rate of now.

    Attributes:
        attribute: the name of the attribute.
        before: the value that it had before.
    """

    turn = Turn.FIRST
    before: Any

    def __init__(self, site: Site, attribute: str) -> None:
        super().__init__(site)
        self.attribute = attribute

    @property
    def ours(self) -> bool:
        """Whether this hook drops; otherwise the module does, at the rate in its attribute."""
        return getattr(self.site.regularizer, "ours", None) is not None

    def install(self, module: nn.Module) -> None:
        self.before = getattr(module, self.attribute)
        # before all other hooks, which then see the dropped tensor
        module.register_forward_hook(self.__call__, prepend=True)
        self.put(module)

    def remove(self, module: nn.Module) -> None:
        super().remove(module)
        if hasattr(self, "before"):  # it was installed
            setattr(module, self.attribute, self.before)

    def put(self, module: nn.Module) -> None:
        """Set the attribute to the rate of now; while paused, to the value that it had before."""
        run = self.site.run
        value = self.before
        if run.installed and run.enabled:
            value = 0.0 if self.ours else self.site.rate
        if getattr(module, self.attribute, None) is not value:
            setattr(module, self.attribute, value)

    def _act(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        if self.ours:
            return super()._act(module, args, *rest)
        # the call is counted; how much the module has dropped is not known
        if is_compiling():
            if not is_exporting():
                operator.note(self.site.handle, module.training)
        elif graph_task() == NO_TASK:
            self.site.counter.add(None, 0, 0.0)
        return None
