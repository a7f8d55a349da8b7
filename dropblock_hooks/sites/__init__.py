"""One regularizer on one layer, at run time.

updates      gradients that accumulate, regularized when the optimizer begins its step
parameters   hooks of parameters, whose gradients they regularize
retune       hooks of layers that drop by themselves, and of rates that modules hold
hooks        the hooks that a site puts on its layer
operator     the operators through which compiled code runs a site
act          what a site does with one activation or gradient in eager mode
site         `Site`: the state of one
identity     the identity whose backward regularizes a gradient
counter      `Counter`: totals that only grow; a window is the difference of two snapshots
norms        histograms of gradient norms before a bound
shared       what the sites of one Attachment share: the time, the switches, the loss scale
grad_scaler  the GradScaler that multiplies the loss
optimizers   the optimizers of the training loop, found in what wraps them
indexing     tensors inside what a layer takes or returns
"""
