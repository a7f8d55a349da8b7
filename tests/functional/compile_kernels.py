"""Compile every kernel for a GPU (compute capability 9.0): it needs the compiler, but no GPU.

It runs in a process of its own, because TRITON_INTERPRET replaces the compiler at import.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import inspect
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dropblock_hooks.functional import gradients, measures, memory, operators, outliers, residual
from dropblock_hooks.functional.dropblock import distort_blocks, drop_blocks
from dropblock_hooks.functional.dropout import drop_units
from dropblock_hooks.functional.kernels import launch
from tests.functional.test_operators import arguments

TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
compiled = set()


def type_of(value):
    """The type of an argument of a kernel, as Triton writes it."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_only(prepared, device, *arguments):
    """In place of `Launch.start`: compile a kernel for these arguments, and run nothing."""
    kernel = prepared.kernel
    names = list(inspect.signature(kernel.fn).parameters)
    positional = dict(zip(names, (*arguments, *prepared.numbers), strict=False))
    constants = dict(prepared.constants)
    signature = {}
    for name in names:
        value = positional.get(name, constants.get(name))
        if name in constants or value is None:
            constants[name] = value
            signature[name] = "constexpr"
        else:
            signature[name] = type_of(value)
    key = kernel.fn.__name__, tuple(signature.items()), str(sorted(constants.items(), key=str))
    if key not in compiled:
        compiled.add(key)
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32))


def of_earlier_updates():
    """Compile the kernels for norms of earlier updates."""
    norms = torch.ones(3, dtype=torch.float64)
    memory.adagc(norms, memory.new_memory("adagc", 3))
    for max_norm in (None, 1.0):
        memory.zclip(norms, memory.new_memory("zclip", 3), max_norm=max_norm)
        memory.skip_update(norms, memory.new_memory("skip_update", 3), max_norm, z=2.0)


def of_tails(dtype):
    """Compile the kernels for outliers and for residual branches."""
    x = torch.randn(2, 4, 8, 70).to(dtype)
    state = torch.zeros(measures.SUMS, dtype=torch.float64)
    for mapped in (x, None):
        outliers.add_outliers(outliers.new_outliers(), x, mapped)
        peaks = None if mapped is None else torch.zeros(x.shape[1], dtype=torch.float64)
        outliers.add_tails(x, mapped, True, 3, state, outliers.new_tails(), peaks)
    for shortcut in (x, x.float()):
        residual.add_squares(residual.new_branch(), x, shortcut)
        residual.add_branch(x, shortcut, True, 3, state, residual.new_branch())


def main(dtype):
    """Compile the kernels for tensors of a type; print how many there are."""
    launch.Launch.start = compile_only
    launch.DEVICES.add("cpu")
    operators.SEEDED.discard("cpu")
    for shape in ((2, 4, 8, 8), (2, 4, 8, 70), (2, 3, 4, 5, 6)):
        for channels_last in (False, True):
            if channels_last and shape[-1] != 8:
                continue
            x = torch.randn(shape).to(dtype)
            if channels_last:
                x = x.movedim(1, -1).contiguous().movedim(-1, 1)
            x = x.detach().requires_grad_()
            edges = [3] * (x.ndim - 2)
            for normalize in ("batch", "sample", None):
                y, _ = drop_blocks(x, 0.3, edges, "exact", normalize, False)
                y.backward(torch.ones_like(y))
            y, _ = drop_blocks(x, 0.3, edges, "across", "batch", False)
            y.backward(torch.ones_like(y))
            distort_blocks(x.detach(), 0.3, edges, 1.0)
            for axes in (None, 1, 2):
                y, _ = drop_units(x, 0.3, axes)
                y.backward(torch.ones_like(y))
            launch.is_capturing = lambda device: True
            drop_units(x.detach(), 0.3, 2)
            drop_units(x.detach(), 0.3)
            drop_blocks(x.detach(), 0.3, edges, "exact", "batch", True)
            launch.is_capturing = lambda device: False
            grad = x.detach()
            for scale in (1.0, torch.tensor(8.0)):
                gradients.clamp_measured(grad, -1.0, 1.0, scale)
                gradients.clamp_measured(grad, None, 1.0, scale)
                for per in ("tensor", "sample", "channel"):
                    gradients.clip_measured(grad, 1.0, 2.0, per, scale)
                gradients.clip_adaptive_measured(
                    grad, torch.randn_like(grad), 0.1, 1e-3, 2.0, scale
                )
                state = {
                    "sums": torch.zeros(measures.BINS + 43, dtype=torch.float64),
                    "largest": torch.zeros((), dtype=torch.float64),
                    "all_values": 0,
                }
                measures.add_measured(state, grad, scale, (-27, 14))
                row = torch.zeros(measures.SUMS + measures.BINS + 43, dtype=torch.float64)
                alive = torch.zeros(shape[1], dtype=torch.bool)
                tensor_scale = scale if isinstance(scale, torch.Tensor) else None
                for calls in (True, False):
                    given = tensor_scale, True, calls, 3, -27, 14, row, alive, None
                    measures.add_statistics(grad, grad, None, *given)
                keep = 3 if scale == 1.0 else 0
                watched = torch.zeros(measures.WATCHED + 4 * keep, dtype=torch.float64)
                for bounds in ([], [0.0, 1.0]):
                    measures.add_watched([grad], [grad, grad], grad, True, bounds, watched, alive)
                measures.add_watched_gradient(grad, tensor_scale, True, watched)
                measures.square_of(grad)
    for normalize in ("batch", "sample", "expected", None):
        given = arguments(torch.randn(2, 4, 8, 8).to(dtype), normalize=normalize)
        operators.drop_blocks(*given)
    of_tails(dtype)
    of_earlier_updates()
    print(len(compiled), "kernels")


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]))
