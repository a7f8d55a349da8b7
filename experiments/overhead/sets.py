"""The sets of works by name, and which of them need a GPU.

This module imports nothing large, so that `--help` answers at once.
"""

import math
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Set(NamedTuple):
    """Works that are measured together.

    Attributes:
        maker: a function that makes the works, as `package.module:function`.
        seconds: no work of the set is begun after as many seconds.
        needs_gpu: whether the set measures nothing useful on a CPU.
    """

    maker: str
    seconds: float = math.inf
    needs_gpu: bool = False

    def works(self) -> Iterable[Any]:
        """Return the works of the set."""
        make: Callable[[], Iterable[Any]] = pkgutil.resolve_name(self.maker)
        return make()


SETS = {
    "kernels": Set("experiments.overhead.layers:kernels"),
    "blocks": Set("experiments.overhead.layers:blocks"),
    "formats": Set("experiments.overhead.layers:formats"),
    "others": Set("experiments.overhead.classes:others"),
    "observers": Set("experiments.overhead.classes:observers"),
    "sites": Set("experiments.overhead.layers:sites"),
    "compiled": Set("experiments.overhead.layers:compiled"),
    "models": Set("experiments.overhead.models:models"),
    "gpu-kernels": Set("experiments.overhead.gpu:kernels", 100, needs_gpu=True),
    "gpu-launches": Set("experiments.overhead.gpu:launches", 50, needs_gpu=True),
    "gpu-steps": Set("experiments.overhead.resnet:steps", 130, needs_gpu=True),
    "gpu-clip": Set("experiments.overhead.resnet:clip", 60, needs_gpu=True),
    "gpu-compiled": Set("experiments.overhead.resnet:compiled", 240, needs_gpu=True),
}
GROUPS = {
    "all": [name for name, members in SETS.items() if not members.needs_gpu],
    "gpu": [name for name, members in SETS.items() if members.needs_gpu],
}


def sets_of(choice: str) -> dict[str, Set]:
    """Return the sets that a name stands for: one set, or a group of them."""
    names = GROUPS.get(choice, [choice])
    return {name: SETS[name] for name in names}
