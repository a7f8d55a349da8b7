"""Finds out whether updates change parameters: of a layer, for `Watchdog`, and of a whole model.

A `Watchdog` calls the methods of `Updates` after measured forwards and in their backwards.
`writes_to` tells ``diagnosis`` whether the model was trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from .._torch import local_values, version_of

_RUN = 32  # forwards, one after the other, in which a gradient was never cleared
_MOST_RUNS = 4  # runs of a gradient, because each forward is measured while one goes on
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


@dataclass
class Updates:
    """The updates of the parameters of a layer since the last look.

    An update is a write to a parameter between two measured forwards, which also counts if it has
    changed no value. The fingerprints stay on their device until they are judged.
    """

    updates: int = 0  # the number of updates
    parameters: list[nn.Parameter] = field(default_factory=list)  # the `readable_parameters`
    versions: list[int] = field(default_factory=list)  # the number of writes to each parameter
    before: list[Tensor] = field(default_factory=list)  # each `fingerprint` at the first forward
    forwards: int = 0  # the measured training forwards since attaching
    gradients: list["Gradient"] = field(default_factory=list)  # of the parameters; stay after looks

    def __reduce__(self) -> Any:
        return Updates, ()  # a copy has other parameters

    def after_measured_forward(self, module: nn.Module) -> None:
        """Count an update if parameters were written since the last measured training forward.

        The first call keeps the parameters of the layer.
        """
        self.forwards += 1
        parameters = readable_parameters(module)
        if not _are_same(parameters, [gradient.parameter for gradient in self.gradients]):
            self.gradients = list(map(Gradient, parameters))
        versions = list(map(version_of, parameters))

        # the first forward since the last look, or the layer has new parameters
        if not _are_same(parameters, self.parameters):
            self.updates = 0
            self.parameters = parameters
            self.before = list(map(fingerprint, parameters))
        elif versions != self.versions:
            self.updates += 1
        self.versions = versions

    def begin_backward(self, unmeasured: int) -> bool:
        """Compare the gradients, before a backward adds to them, with those of the last backward.

        Args:
            unmeasured: the forwards of the model that were not measured.

        Returns:
            whether the next forward must be measured, because a gradient may never be cleared.
        """
        waiting = [gradient.meet(self.forwards, unmeasured) for gradient in self.gradients]
        return any(waiting)

    def unchanged(self) -> bool:
        """Return whether no value has changed; this waits for a device."""
        if not self.before:
            return False
        for parameter, before in zip(self.parameters, self.before, strict=True):
            now = fingerprint(parameter)
            if now != before:
                return False
        return True

    def forget(self) -> None:
        """Forget all updates, so that the next measured forward is the first one."""
        self.updates = 0
        self.parameters = []
        self.versions = []
        self.before = []


@dataclass(eq=False)
class Gradient:
    """The gradient of a parameter at the beginning of measured backwards.

    A run begins if a backward meets the tensor that the last measured backward met, too. It goes on
    while each forward is measured and each backward meets this tensor. Setting the gradient to None
    ends the run, because the next gradient is another tensor. A gradient that is zeroed in place
    does not end the run, but some backward meets zeros. Gradients that are accumulated on purpose
    begin runs that end soon.
    """

    parameter: nn.Parameter = field(repr=False)
    tensor: TensorWeakRef | None = field(default=None, repr=False)  # the gradient
    unmeasured: int = 0  # how many forwards were not measured before the last backward
    runs: int = 0  # how many have begun
    first: int = 0  # the number of the first measured forward of the run
    last: int = 0  # the number of the last one
    # the `fingerprint` of the parameter at the last backward of the run; None outside of runs
    before: Tensor | None = None
    updates: Tensor | int = 0  # how often the parameter has changed in the run
    nonzero: Tensor | bool = True  # whether no backward of the run met zeros

    @property
    def is_long(self) -> bool:
        """Whether the run is long enough to judge it."""
        return self.before is not None and self.last - self.first >= _RUN

    def meet(self, forward: int, unmeasured: int) -> bool:
        """Compare the gradient, before a backward adds to it, with the one of the last backward.

        Args:
            forward: the number of the measured forward.
            unmeasured: the number of forwards that were not measured.

        Returns:
            whether a run goes on, for which the next forward must be measured.
        """
        grad = self.parameter.grad
        if grad is None or grad.layout != torch.strided:
            self.tensor = None
            self.before = None
            return False
        if self.tensor is None or self.tensor() is not grad:
            self.tensor = TensorWeakRef(grad)
            self.before = None
        elif not self.is_long:  # a long run stays as it is, to be judged
            if unmeasured > self.unmeasured:
                self.before = None  # ends the run, because a forward between was not measured
            self._add(grad, forward)

        self.unmeasured = unmeasured
        return self.before is not None and not self.is_long

    def _add(self, grad: Tensor, forward: int) -> None:
        """Add a backward to the run, or begin a run."""
        if self.before is None:
            if self.runs == _MOST_RUNS:
                return
            self.runs += 1
            self.first = forward
            self.updates = 0
            self.nonzero = True

        now = fingerprint(self.parameter)
        if self.before is not None:
            self.updates = self.updates + (now != self.before)
        self.nonzero = local_values(grad).detach().any() & self.nonzero
        self.before = now
        self.last = forward

    def updates_of_uncleared(self) -> int:
        """Return the updates of a long run that met no zeros, else 0; this waits for a device."""
        was_kept = self.is_long and bool(self.nonzero)
        return int(self.updates) if was_kept else 0


def writes_to(model: nn.Module) -> dict[int, int]:
    """Return how often each trained parameter of a model was written in place, by its identity."""
    writes = {}
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.is_inference():
            writes[id(parameter)] = version_of(parameter)
    return writes


def readable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a layer itself that are trained and that this process can read."""
    trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
    return list(filter(_is_readable, trained))


def _is_readable(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has values here, whose bits can be read as integers."""
    if nn.parameter.is_lazy(parameter) or parameter.is_inference():
        return False

    values = local_values(parameter)
    if values.is_meta or not values.numel():  # a shard may be empty
        return False
    return values.element_size() in _INTEGERS


def _are_same(a: Sequence[nn.Parameter], b: Sequence[nn.Parameter]) -> bool:
    """Return whether two lists hold the same objects, in the same order."""
    return list(map(id, a)) == list(map(id, b))


def fingerprint(parameter: nn.Parameter) -> Tensor:
    """Return the sum of the values' bits as integers, which almost always changes with a value.

    Changes that cancel stay unseen, such as two values that are swapped.
    """
    values = local_values(parameter).detach()
    integer = _INTEGERS[values.element_size()]
    bits = values.view(integer)
    return bits.sum(dtype=torch.int64)
