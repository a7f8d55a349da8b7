"""Triton kernels for GPUs, each beside the torch operations that it replaces.

- `launch`: where the kernels run, how they are started, seeds and counts on a device
- `blocks`: DropBlock, which draws the seeds of blocks, grows them and applies the mask
- `units`: dropout of elements, channels and samples
- `moments`: statistics of a tensor in one pass
- `tails`: kurtosis, outliers and the largest magnitudes of channels
- `branch`: the size of a residual branch and of its shortcut
- `clip`: bounds of gradients by norm
- `clamp`: bounds of gradients by value
- `memory`: bounds of norms that follow from the norms of earlier updates

Each module is loaded by the first tensor on a GPU, because importing Triton takes a while.
"""
