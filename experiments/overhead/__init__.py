"""The cost of a regularizer: variants of the same work, timed side by side.

| module | content |
| --- | --- |
| timing | works, and paired timings of their variants |
| memory | bytes that autograd saves, and the peak of a step |
| peers | other implementations of DropBlock at the rate that they really drop |
| layers | works on one activation: kernels, other regularizers, observers, sites |
| models | works on whole models, and a user's own case |
"""
