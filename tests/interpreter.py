"""Triton's interpreter, without work that changes no result.

It replaces about a hundred functions of Triton's language by its own before each kernel, and again
before each function that a kernel calls. It also computes each sum and product of integers a second
time with 64 bits, and then ignores whether the results differ. For each operation, it makes a new
table of NumPy's types.
"""

from triton import language as tl
from triton.language import core
from triton.runtime import interpreter

__all__ = ["core", "leave_out_repetitions", "tl"]


def leave_out_repetitions(monkeypatch):
    """Let the interpreter replace functions once for each kernel, and compute numbers once."""
    if not hasattr(interpreter, "_patch_lang"):  # another version, which takes longer
        return
    replace = interpreter._patch_lang
    look_up = interpreter._get_np_dtype
    known = {}
    run = interpreter.GridExecutor.__call__
    is_replaced = False

    def replace_once(function):
        nonlocal is_replaced
        if is_replaced:
            return None
        is_replaced = True
        # the interpreter looks for modules of the language next to the function
        return replace(leave_out_repetitions)

    def run_kernel(executor, *arguments, **options):
        nonlocal is_replaced
        is_replaced = False
        return run(executor, *arguments, **options)

    def look_up_once(dtype):
        if dtype.scalar.is_ptr():
            return look_up(dtype)
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    monkeypatch.setattr(interpreter, "_patch_lang", replace_once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", look_up_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_kernel)
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
