"""One regularizer on one layer, at run time.

updates           the optimizers, and gradients that are regularized once per optimizer step
parameters        hooks of parameters, which regularize their gradients
retune            hooks of layers that drop by themselves, and of rates that modules hold
observe           the hook of an observer
hooks             the hooks that a site puts on its layer
operator          the operators through which compiled code runs a regularizer or an observer
act               runs a regularizer on one activation or gradient, and counts
site              `Site`: the state of one regularizer on one layer
counter           `Counter`: totals that only grow, and windows of them; histograms of norms
run               `Run`: what the sites of one attachment share: time, switches, loss scale
grad_scaler       the GradScaler that multiplies the loss
indexing          tensors inside the inputs and outputs of a layer
"""
