"""Notes whether updates change parameters: of a layer, for `Watchdog`, and of a whole model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import local_values, version_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


@dataclass
class Updates:
    """The updates of the parameters of a layer since the last look.

    An update is a write to a parameter between two measured forwards, which also counts if it has
    changed no value. The fingerprints stay on their device until they are judged.
    """

    updates: int = 0
    parameters: list[nn.Parameter] = field(default_factory=list)  # the `readable_parameters`
    versions: list[int] = field(default_factory=list)  # the number of writes to each parameter
    before: list[Tensor] = field(default_factory=list)  # each `fingerprint` at the first forward

    def __reduce__(self) -> Any:
        return Updates, ()  # a copy has other parameters

    def note(self, module: nn.Module) -> None:
        """Note the parameters of a layer after a measured training forward."""
        parameters = readable_parameters(module)
        versions = [version_of(p) for p in parameters]
        if not _are_same(parameters, self.parameters):
            self.updates = 0
            self.parameters = parameters
            self.before = [fingerprint(p) for p in parameters]
        elif versions != self.versions:
            self.updates += 1
        self.versions = versions

    def unchanged(self) -> bool:
        """Return whether no value has changed; this waits for a device."""
        if not self.before:
            return False
        pairs = zip(self.parameters, self.before, strict=True)
        return all(bool(fingerprint(p) == before) for p, before in pairs)

    def forget(self) -> None:
        """Forget all updates, so that the next measured forward is the first one."""
        self.updates = 0
        self.parameters = []
        self.versions = []
        self.before = []


def writes_to(model: nn.Module) -> int:
    """Return how often the trained parameters of a model were written in place."""
    parameters = [p for p in model.parameters() if p.requires_grad and not p.is_inference()]
    return sum(map(version_of, parameters))


def readable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a layer itself that are trained and that this process can read."""
    return [p for p in module.parameters(recurse=False) if p.requires_grad and _is_readable(p)]


def _is_readable(p: nn.Parameter) -> bool:
    """Return whether a parameter has values here: a shard may be empty."""
    if nn.parameter.is_lazy(p) or p.is_inference():
        return False
    values = local_values(p)
    return not values.is_meta and values.numel() > 0 and values.element_size() in _INTEGERS


def _are_same(a: Sequence[nn.Parameter], b: Sequence[nn.Parameter]) -> bool:
    return len(a) == len(b) and all(p is q for p, q in zip(a, b, strict=True))


def fingerprint(p: nn.Parameter) -> Tensor:
    """Return the sum of the values' bits as integers, which almost always changes with a value.

    Changes that cancel stay unseen, such as two values that are swapped.
    """
    values = local_values(p).detach()
    bits = values.view(_INTEGERS[values.element_size()])
    return bits.sum(dtype=torch.int64)
