"""Tools for torch.compile: handles, operators, and compiling anew.

- ``sites.operator`` defines its operators by `define_operator`. They run Python objects, which they
  find by handles. ``functional.operators`` has decorators of its own, for operators that take only
  tensors and numbers.
- `attach` calls `forget_compiled`, so that code that is compiled already gets the new hooks.
- `capture`, `gradcam` and others call `as_written` to run a compiled model in eager mode.
- A hook that is traced calls `refuse_version` if this torch is `TOO_OLD`.

A handle is a tensor by which an operator finds a Python object. It is an input of the graph, so
copies of a model run the same graph.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._torch import EXPORTING
from ._torch import forget_compiled as forget_compiled

TOO_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
"""Whether this torch can't compile a model with sites."""
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def new_handle(owner: Any) -> Tensor:
    """Return a 0-dim int64 tensor on the CPU that stands for `owner` while `owner` lives."""
    number = next(_numbers)
    _owners[number] = owner
    outside: AbstractContextManager[Any] = nullcontext()
    if torch.is_inference_mode_enabled():
        # some operators declare that they change the handle, so that no call is left out or moved;
        # torch refuses this for inference tensors
        outside = torch.inference_mode(False)
    with outside:
        return torch.tensor(number, device="cpu")


def owner_of(handle: Tensor | float) -> Any:
    """Return the object that a handle, or its number, stands for; None if the object is gone."""
    return _owners.get(int(handle))


# ``functional.operators`` has a library of its own. Its operators have other tags, because they may
# run in CUDA graphs, and AOTAutograd may trace into them.
_library = torch.library.Library("dropblock_hooks", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
_TAGS = [
    getattr(torch.Tag, tag)  # any strides; inductor runs it outside of CUDA graphs
    for tag in ("flexible_layout", "cudagraph_unsafe")
    if hasattr(torch.Tag, tag)
]


def define_operator(
    name: str, schema: str, fake: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function, which becomes an operator that Dynamo does not trace into.

    A call takes a tenth of the time of an operator of ``torch.library.custom_op``. An operator
    whose schema changes needs a new name, because Inductor's cache on disk knows it by name.

    Args:
        name: the name of the operator.
        schema: its arguments and results.
        fake: an implementation without values, for the tracing compiler. Without it, AOTAutograd
            replaces the operator by the operations that the function runs.
    """

    def define(run: Callable[..., Any]) -> Any:
        _library.define(name + schema, tags=_TAGS)  # type: ignore[no-untyped-call]  # torch's
        key = "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd"
        _library.impl(name, run, key)  # type: ignore[no-untyped-call]  # torch's
        if fake is not None:
            torch.library.register_fake(f"dropblock_hooks::{name}", fake, lib=_library)
        return getattr(torch.ops.dropblock_hooks, name).default

    return define


def differentiate(name: str, backward: Callable[..., Any], save: Callable[..., Any]) -> None:
    """Give an operator a backward; `save` saves the tensors for it."""
    name = f"dropblock_hooks::{name}"
    torch.library.register_autograd(name, backward, setup_context=save, lib=_library)


def is_exporting() -> bool:
    """Return whether torch.export traces.

    In older versions of torch, ``torch.compiler.is_exporting()`` is also true in torch.compile.
    """
    return bool(getattr(torch.compiler, EXPORTING, False))


def refuse_version() -> NoReturn:
    """Raise the error that this torch is too old to compile a model with sites."""
    raise RuntimeError(
        f"torch {torch.__version__} can't compile or export a model with active regularizers "
        "or observers: use torch >= 2.9, or call the model without torch.compile"
    )


def as_written() -> AbstractContextManager[object]:
    """Return a context manager within which compiled code runs in eager mode."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing is compiled, and importing dynamo takes a second
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
