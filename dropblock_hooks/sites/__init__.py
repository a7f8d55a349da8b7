"""One regularizer on one layer, at run time.

updates      gradients that accumulate, regularized when the optimizer begins its step
parameters   hooks of parameters, whose gradients they regularize
retune       hooks of layers that drop by themselves, and of rates that modules hold
hooks        the hooks that a site puts on its layer
act          what a site does in one call of its layer: eager or traced, activation or gradient
site         `Site`: the state of one
identity     the identity whose backward regularizes a gradient
record       what a site has counted; a window is the difference of two moments
counts       numbers of calls and elements, at one moment or of a window
meter        what compiled code counts into
shared       what the sites of one Attachment share: the time, the switches, the loss scale
grad_scaler  the GradScaler that multiplies the loss
optimizers   the optimizers of the training loop, found in what wraps them
indexing     one element of what a layer takes or returns
"""
