"""Triton kernels for GPUs, each beside the torch operations that it replaces.

launch   where the kernels run, how they are started, seeds and counts on a device
blocks   DropBlock: draw the seeds of blocks, grow them, apply the mask
units    dropout of elements, channels and samples
moments  statistics of a tensor in one pass
clip     bound a gradient by norms
clamp    bound a gradient by value
memory   bounds of norms from those of earlier updates

Each module is loaded by the first tensor on a GPU, because importing Triton takes a while.
"""
