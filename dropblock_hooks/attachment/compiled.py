"""What torch has compiled: it would use that again, and not see hooks that have come since."""

import sys
import types


def has_compiled() -> bool:
    """Whether torch holds compiled code at all."""
    return bool(_compiled_codes())


def forget_compiled() -> None:
    """Have everything compiled anew, so that it sees new hooks.

    Which code runs a model is not known: a function may have taken it as an argument. What was
    built for a pending backward stays, and so does what ``torch.compiler.reset()`` would end
    besides: CUDA graphs, callbacks, compiled autograd.
    """
    codes = _compiled_codes()
    if codes:
        from torch._C._dynamo.eval_frame import reset_code

        for code in codes:
            reset_code(code)


def _compiled_codes() -> list[types.CodeType]:
    """All code that compiled code is held for; none after ``torch._dynamo.reset()``."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return []  # nothing has ever been compiled
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.convert_frame import input_codes

    codes = [reference() for reference in list(input_codes.seen)]
    return [code for code in codes if code is not None and _debug_get_cache_entry_list(code)]
