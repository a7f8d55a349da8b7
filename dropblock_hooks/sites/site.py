"""A site: one regularizer on one layer, with its state and counts."""

import copy
from typing import Any

from torch import Tensor

from ..axes.facts import Facts
from ..axes.reader import Reader
from ..axes.view import View
from ..checkpointing import NO_TASK, graph_task
from ..handles import new_handle
from ..observers.base import Watch
from ..regularizers.base import Regularizer
from ..regularizers.dropout import DropsShare
from ..schedules import is_moving
from ..selectors.index import HELD, Target
from ..selectors.wrappers import bare_type
from .counter import Counter, Norms
from .run import Run


class SiteError(ValueError):
    """A regularizer met a tensor that it can't work on; the message names the site.

    Example:
        >>> model = nn.Sequential(nn.ReLU())
        >>> attached = attach(model, {"0": DropBlock2d(0.1)})
        >>> try:
        ...     y = model(torch.ones(8, 10))
        ... except SiteError as error:
        ...     print(str(error).split(":")[0])
        0/DropBlock2d on ReLU '0'
    """


class Site:
    """One regularizer on one layer.

    Example:
        >>> model = nn.Sequential(nn.ReLU())
        >>> site = attach(model, {"0": Dropout(0.5)})["0/Dropout"]
        >>> y = model(torch.ones(8, 1000))
        >>> site.calls, round(site.realized_rate, 1)
        (1, 0.5)

    Attributes:
        key: its name in the Attachment: ``layer4.0/DropBlock2d``.
        name: the layer (or parameter), as the bare model names it.
        aliases: other names of the same, shared, module.
        module_type: class name of the layer.
        at: ``"output"`` or ``"input"``; of no layer ``"parameter"`` or ``"attribute"``.
        regularizer: the regularizer or observer.
        rate: the first of the rates now; None without rates.
    """

    def __init__(
        self,
        key: str,
        target: Target,
        regularizer: Regularizer,
        run: Run,
        facts: Facts | None = None,
    ) -> None:
        self.key, self.run = key, run
        self.name, self.owner, self.aliases = target.name, target.owner, target.aliases
        self.module_type = bare_type(target.module).__name__
        self.at: str = HELD[target.form].noun if target.form else regularizer.at
        self.reader = Reader(regularizer, facts, run.grids)
        self.order, self.position = 0, (0, 0)  # in the spec: of its entry, and in that
        self.selector = key  # of its entry
        self.counter = Counter()
        self.handle = new_handle(self)
        self.kept_draws: dict[int, list[Any]] = {}  # of compiled forwards, by seed
        self.recomputed = False
        self.bound: Any = None  # the callable, which may have a state
        self.set_regularizer(regularizer)

    def set_regularizer(self, regularizer: Regularizer) -> None:
        """Put another one of the same class in place, with the values of the present epoch."""
        values = regularizer.values(self.run.epoch)
        self.regularizer = copy.copy(regularizer)  # compiled code guards what sites share
        before, self.bound = self.bound, self.regularizer.bind()
        if hasattr(before, "state_dict") and hasattr(self.bound, "load_state_dict"):
            self.bound.load_state_dict(before.state_dict())
        self.watch: Watch | None = self.bound if isinstance(self.bound, Watch) else None
        gradient = regularizer.acts_on == "gradient"
        self.draws = regularizer.random and not gradient  # random numbers for activations
        sure: Any = self.reader.sure and tuple(self.reader.sure)
        # one tuple for compiled code, because it compiles faster than five attributes
        self.traits = gradient, regularizer.linear or gradient, self.draws, len(values), sure
        self.moves = any(map(is_moving, regularizer.rates.values()))
        self.always = regularizer.active == "always"
        self.move(values)

    def move(self, values: dict[str, float]) -> None:
        """Put other values in place; a new dict, since a pending backward may hold the old one."""
        self.values = values
        self.rate = next(iter(values.values()), None)
        activation = self.regularizer.acts_on == "activation"
        self.idle = self.rate == 0.0 and self.regularizer.idle_at_zero and activation

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None, "kept_draws": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, handle=new_handle(self))  # a copy is another site

    def __repr__(self) -> str:
        return f"Site({self.key!r}, {self.regularizer!r})"

    @property
    def layout(self) -> str | None:
        """The axes of the tensors seen last, ``"NHWC"`` say; None before the first call."""
        form = self.reader.last
        return None if form is None or self.at == "attribute" else form.layout

    @property
    def calls(self) -> int:
        """Forward calls of the layer since attaching; compiled code counts those where it is on."""
        return self.counter.evaluated + self.counter.trained

    @property
    def active_calls(self) -> int:
        """Calls in which it was on; of a gradient regularizer, the gradients that it has seen."""
        return self.counter.active

    @property
    def realized_rate(self) -> float | None:
        """Share of the elements dropped or changed since the epoch began.

        The window closes when the whole part of the epoch changes; an empty window shows the one
        that closed then. Attaching, `Attachment.set` and loading a state begin one that shows
        nothing. Reading it waits for the device.
        """
        return self.counter.read().shown().share()

    @property
    def expected_rate(self) -> float | None:
        """The mean nominal rate over the same window as `realized_rate`."""
        shown = self.counter.read().shown()
        return shown.expected / shown.total if shown.total else None

    @property
    def total_realized_rate(self) -> float | None:
        """The same as `realized_rate`, since attaching."""
        return self.counter.read().life().share()

    @property
    def norms(self) -> Norms | None:
        """The norms of gradients before the bound, over the same window; None without norms."""
        norms = self.counter.read().shown().norms
        return norms if norms.count else None

    @property
    def map_size(self) -> tuple[int, ...] | None:
        """Spatial size of the last tensor; None without a map."""
        return self.counter.map_size

    @property
    def block_size(self) -> tuple[int, ...] | None:
        """The block in force on that map, clipped to it."""
        size = self.counter.map_size
        return None if size is None else self.regularizer.block_in_force(size)

    def enter(self, training: bool) -> bool:
        """Count a forward call, unless a checkpoint recomputes it; return whether to act."""
        run = self.run
        if graph_task() == NO_TASK:
            if training:
                self.counter.trained += 1
                self.counter.off += not run.enabled
            else:
                self.counter.evaluated += 1
        if training:
            return run.installed and run.enabled
        return (self.always or run.always) and self.acts(False)

    def count_idle(self, elements: int, training: bool) -> None:
        """Count a call at rate 0, in which nothing is run; not one that ``always()`` adds."""
        if graph_task() == NO_TASK and (training or self.always):
            known = 0 if isinstance(self.regularizer, DropsShare) else None
            self.counter.add(known, elements, 0.0)

    def acts(self, training: bool) -> bool:
        """Whether the regularizer is to be run in this mode of its layer."""
        return self.run.installed and self.run.enabled and self.is_on(training)

    def is_on(self, training: bool) -> bool:
        """Whether it acts in this mode of its layer unless it is switched off."""
        return training or self.always or (self.run.always and self.draws)

    def form_of(self, x: Tensor) -> View:
        """How the axes of a tensor are read; SiteError if they are not known."""
        try:
            return self.reader.view(x)
        except ValueError as error:
            raise self.error(error) from None

    def form_or_none(self, x: Tensor) -> View | None:
        """How the axes of a tensor are read; None if its channels are not known."""
        try:
            return self.reader.view(x) if x.ndim > 1 else None
        except ValueError:
            return None  # the report says so

    def error(self, cause: object) -> SiteError:
        where = f" at its {self.at}" if self.at == "input" else ""
        return SiteError(f"{self.key} on {self.module_type} '{self.name or '.'}'{where}: {cause}")
