"""One regularizer on one layer, at run time.

updates           regularizes gradients once per optimizer step
parameters        hooks on parameters, which regularize their gradients
retune            hooks on layers that have a rate already
observe           the hook of an observer
hooks             the hooks that a site puts on its layer
operator          the operators through which compiled code runs a regularizer or an observer
act               runs a regularizer on one activation or gradient, and counts
site              `Site`: a regularizer on a layer, and its state
counter           `Counter`: totals that only grow, and windows of them; histograms of norms
run               `Run`: the time, the switches and the loss scale of an attachment; closes windows
grad_scaler       the GradScaler that multiplies the loss
indexing          tensors inside the inputs and outputs of a layer
"""
