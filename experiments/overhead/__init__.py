"""The cost of a regularizer: variants of the same work, timed side by side.

- `sets`: the sets of works by name, and their limits of time
- `timing`: works, and paired timings of their variants
- `variants`: a variant in this process, or in a process of its own
- `memory`: bytes that autograd saves, and the peak of a step
- `launches`: kernels that a step starts, and the most that a site may start
- `replay`: steps as CUDA graphs, whose replays take the time of the GPU alone
- `peers`: other implementations of DropBlock, at the rate that they really drop
- `layers`: works on one activation: kernels, other regularizers, observers, sites
- `classes`: works of one class: penalties, clamps, norms, embeddings, updates, `watch`
- `models`: works on whole models, and a user's own case
- `gpu`: works for a GPU on one activation: its own time, launches
- `resnet`: works for a GPU on a ResNet-50: eager and compiled training steps, clipping
- `page`: the table of `classes` on the page of benchmarks
- `machine`: names and versions of the machine and of the packages
"""
