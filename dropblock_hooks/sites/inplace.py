"""What a layer is given, watched: whether it has worked on its input in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling


class EntryHook:
    """Forward pre-hook: notes the version of the first input, which work in place raises."""

    def __init__(self) -> None:
        self.version: int | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not is_compiling():
            self.version = version_of(args[0]) if args else None

    def gives_back_changed(self, module: nn.Module, given: Any, output: Tensor) -> bool:
        """Whether the layer gives back what it was given, changed in place.

        Compiled code and inference tensors have no versions: there, whatever is given back is
        taken for changed, but by ``nn.Identity``.
        """
        if not isinstance(given, Tensor) or isinstance(module, nn.Identity):
            return False
        now = None if is_compiling() else version_of(given)
        if now is None or self.version is None:
            return output is given
        return now != self.version and (output is given or _share_memory(output, given))


def _share_memory(x: Tensor, y: Tensor) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # they have none of their own
    if wrapped(x) or wrapped(y):
        return False
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


def version_of(x: Any) -> int | None:
    """How often a tensor was changed in place; None for what does not count it."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else None
