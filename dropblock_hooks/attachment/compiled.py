"""What torch has compiled: it would use that again, and not see hooks that have come since."""

import sys
import types
from contextlib import AbstractContextManager, nullcontext

import torch


def forget_compiled() -> None:
    """Have everything compiled anew, so that it sees new hooks.

    Which code runs a model is not known: a function may have taken it as an argument. What was
    built for a pending backward stays, and so does what ``torch.compiler.reset()`` would end
    besides: CUDA graphs, callbacks, compiled autograd.
    """
    for code in _compiled_codes():
        torch._C._dynamo.eval_frame.reset_code(code)


def as_written() -> AbstractContextManager[object]:
    """Within it, code that torch has compiled is not used."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing is compiled, and importing it takes a second
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def _compiled_codes() -> list[types.CodeType]:
    """All code that compiled code is held for; none after ``torch._dynamo.reset()``."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return []  # nothing has ever been compiled
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.convert_frame import input_codes

    codes = [reference() for reference in list(input_codes.seen)]
    return [code for code in codes if code is not None and _debug_get_cache_entry_list(code)]
