"""One regularizer on one layer, parameter or rate, at run time.

The class of a hook decides everything about its kind of target.

updates           regularizes gradients once per optimizer step, also by their common norm
held              hooks of what a module holds: parameters, and rates
hooks             the hook of a layer, from which the others inherit, and that of an observer
operator          operators through which compiled code runs a regularizer, and its backward
act               runs a regularizer on one activation or gradient, and counts
site              `Site`: a regularizer on a layer, and its state
counter           `Counter`: totals that only grow, and windows of them; histograms of norms
run               `Run`: the time, the switches and the loss scale of an attachment; its windows
indexing          tensors inside the inputs and outputs of a layer
"""
