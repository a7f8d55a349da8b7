"""Trace a training step as for a GPU, without one, and print what its graphs call.

It runs in a process of its own, because TRITON_INTERPRET replaces the kernels at import. Torch asks
the driver of Triton for the device, so this puts one in its place. Nothing runs on it.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import sys

import torch
import triton
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint
from triton.backends.compiler import GPUTarget

from dropblock_hooks import ActivationStats, DropBlock2d, GradientStats, Watchdog, attach
from dropblock_hooks.functional import operators
from dropblock_hooks.functional.kernels import launch

ITEMS = {
    "exact": DropBlock2d(0.1, 3),
    "paper": DropBlock2d(0.1, 3, calibration="paper"),
    "sample": DropBlock2d(0.1, 3, normalize="sample", share_channels=True),
    "across": DropBlock2d(0.1, 3, normalize=None, border="across"),
    "watch": Watchdog(every=None),
    "watch with rows": Watchdog(every=None, keep=3),
    "activations": ActivationStats(),
    "gradients": GradientStats(),
}


class Driver:
    """Tells the kind of a GPU."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


class Net(nn.Module):
    """Two blocks, perhaps each in a checkpoint."""

    def __init__(self, checkpoints):
        super().__init__()
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def name_of(node):
    """What a node of a graph calls; of a Triton kernel its name."""
    if "kernel_idx" not in node.kwargs:
        return str(node.target)
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.get_kernel(node.kwargs["kernel_idx"]).fn.__name__


def made_like(x):
    """A value like that of a traced output."""
    if isinstance(x, torch.Tensor):
        return torch.zeros([int(size) for size in x.shape], dtype=x.dtype)
    return x if x is None else int(x)


def main(item, checkpoints, batch):
    """Print a line of names for the forward graph, and one for the backward."""
    triton.runtime.driver.set_active(Driver())
    launch.DEVICES.add("cpu")
    operators.SEEDED.discard("cpu")

    def keep(graph, inputs):
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        print(*map(name_of, calls))
        outputs = [node.meta["val"] if node else None for node in graph.graph.output_node().args[0]]

        def run(*given):
            return [made_like(x) for x in outputs]

        return make_boxed_func(run)

    net = Net(checkpoints == "checkpoints")
    attach(net, {"blocks.*.1": ITEMS[item]})
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    x = torch.randn(2, 4, 8, 8)
    if batch == "any":
        torch._dynamo.mark_dynamic(x, 0)
    torch.compile(net, backend=backend, fullgraph=True)(x).square().mean().backward()


if __name__ == "__main__":
    main(*sys.argv[1:])
