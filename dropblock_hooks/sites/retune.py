"""The hook of `Retune`: it sets the attribute that holds the rate of a module."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from ..checkpointing import NO_TASK, graph_task
from ..handles import is_exporting
from ..regularizers.base import Regularizer
from ..regularizers.retune import RATES, Retune, in_place_of, is_read, rate_attribute
from ..selectors.index import Target
from ..selectors.wrappers import bare_type
from . import operator
from .hooks import SiteHook, Turn
from .site import Site


class RetuneHook(SiteHook):
    """Sets the rate that a layer holds to 0, and drops in its place.

    A layer that drops in another way, or whose rate is read by other code, gets the rate of now, as
    does an attribute that an ``attr:`` selector names.

    Attributes:
        before: the value that the attribute had before.
    """

    takes = Retune
    turn = Turn.FIRST
    before: Any

    @classmethod
    def fitted(cls, target: Target, regularizer: Regularizer, model: nn.Module) -> Regularizer:
        attribute = target.local or rate_attribute(target.module)
        if attribute is None or not isinstance(regularizer, Retune):
            return regularizer
        ours = None if target.local else in_place_of(target.module)
        if ours is not None and is_read(model, (target.name, *target.aliases), attribute):
            ours = None
        return regularizer.fitted(attribute, ours)

    @classmethod
    def refusals(cls, target: Target, regularizer: Regularizer) -> Iterator[str | None]:
        kind = bare_type(target.module).__name__
        if isinstance(regularizer, Retune) and regularizer.attribute:
            if regularizer.ours is None and regularizer.active == "always":
                yield f"the {kind} itself drops, in training mode only: leave active='always' out"
        elif isinstance(target.module, nn.Identity):
            yield (
                "it is an nn.Identity, which models put where a rate is 0. Put DropPath(p=...) on "
                "it, build the model without drop paths and use presets.drop_path(model, p), or "
                "select the other layers only, as in Select(names=..., types='DropPath')"
            )
        else:
            yield (
                f"a {kind} has no {' or '.join(RATES)} that is a number in [0, 1] and can be set. "
                "builtin(model) lists all rates, with their selectors"
            )

    def __init__(self, site: Site, local: str = "") -> None:
        super().__init__(site, local)
        retune: Retune = site.regularizer  # type: ignore[assignment]  # by `takes`
        self.attribute, self.holds_rate = retune.attribute, retune.ours is None

    def install(self, module: nn.Module) -> None:
        self.before = getattr(module, self.attribute)
        # before all other hooks, which then see the dropped tensor
        module.register_forward_hook(self.__call__, prepend=True)
        self.put(module)

    def restore(self, module: nn.Module) -> None:
        super().restore(module)
        if hasattr(self, "before"):  # it was installed
            setattr(module, self.attribute, self.before)

    def put(self, module: nn.Module) -> None:
        """Set the attribute to the rate of now; while paused, to the value that it had before."""
        value = self.before
        if self.run.installed and self.run.enabled:
            value = self.site.rate if self.holds_rate else 0.0
        if getattr(module, self.attribute, None) is not value:
            setattr(module, self.attribute, value)

    def leaves_no_trace(self, model: nn.Module) -> bool:
        names = (self.site.name, *self.site.aliases)
        return self.holds_rate and not self.local and is_read(model, names, self.attribute)

    def _act(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        if not self.holds_rate:
            return super()._act(module, args, *rest)
        # the call is counted; how much the module has dropped is not known
        if is_compiling():
            if not is_exporting():
                operator.note(self.site.handle, module.training)
        elif graph_task() == NO_TASK:
            self.site.counter.add(None, 0, 0.0)
        return None
