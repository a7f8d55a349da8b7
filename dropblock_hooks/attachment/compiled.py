"""What torch.compile has made of a model before: where torch would ignore hooks that come later."""

from __future__ import annotations

import gc
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

_ADVICE = (
    "is compiled, and torch ignores hooks that come later: attach to the bare model first, then "
    "compile; for a model that has run compiled, call torch._dynamo.reset() and compile it anew "
    "after attaching"
)


def refuse_compiled(model: nn.Module) -> None:
    """Raise RuntimeError where torch would silently ignore a new hook.

    Compiled code that can't be told to run this model is forgotten, so that it sees the hooks when
    it is compiled again.
    """
    compiled = compiled_part(model)
    if compiled:
        raise RuntimeError(compiled)
    _forget()


def compiled_part(model: nn.Module) -> str | None:
    """Which part of a model is compiled, and what to do about it; None where nothing is.

    That is the model or a submodule; and, once anything has run compiled, a model that a live
    compiled one contains, or that a compiled function uses (as closure, object or global).
    """
    for name, module in model.named_modules():
        if isinstance(module, _optimized()) or getattr(module, "_compiled_call_impl", None):
            return f"{f'its submodule {name!r}' if name else 'the model'} {_ADVICE}"
    if _compiled_codes():
        own = {id(module) for module in model.modules()}
        for what, host in _live_hosts():
            if any(id(module) in own for module in host.modules()):
                return f"the model {_ADVICE} ({what} is alive)"
    return None


def _optimized() -> Any:
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())


def _live_hosts() -> Iterator[tuple[str, nn.Module]]:
    """Modules that compiled objects run, with what the objects are called."""
    optimized = _optimized()
    for found in gc.get_objects():
        kind = type(found)
        if kind is types.FunctionType and "_torchdynamo_orig_callable" in vars(found):
            inner = found._torchdynamo_orig_callable
            name = getattr(inner, "__qualname__", repr(inner))
            yield from ((f"the compiled {name}", module) for module in _used_by(inner))
        elif issubclass(kind, optimized):
            yield "a torch.compile() of it", found._orig_mod


def _used_by(call: Any) -> Iterator[nn.Module]:
    """The modules that a function can reach in one step: closure, defaults, object, globals."""
    values: list[Any] = [getattr(call, "__self__", None)]
    function = inspect.unwrap(getattr(call, "__func__", call))
    if isinstance(function, types.FunctionType):
        values += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        values += function.__defaults__ or ()
        values += [function.__globals__.get(name) for name in function.__code__.co_names]
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif not isinstance(value, type | types.ModuleType) and hasattr(value, "__dict__"):
            yield from (item for item in vars(value).values() if isinstance(item, nn.Module))


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False


def has_compiled() -> bool:
    """Whether torch holds compiled code at all."""
    return bool(_compiled_codes())


def _compiled_codes() -> list[types.CodeType]:
    """All code that compiled code is held for; none after ``torch._dynamo.reset()``."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return []  # nothing has ever been compiled
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.convert_frame import input_codes

    codes = [reference() for reference in list(input_codes.seen)]
    return [code for code in codes if code is not None and _debug_get_cache_entry_list(code)]


def _forget() -> None:
    """Drop all compiled code, since torch would use what there is of this model again.

    Which code runs this model is not known: it may have come as an argument. What else was compiled
    is compiled once more.
    """
    codes = _compiled_codes()
    if codes:
        from torch._C._dynamo.eval_frame import reset_code

        for code in codes:
            reset_code(code)
