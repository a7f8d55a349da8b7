"""Observers of layers. All take `when`, and the options of `Regularizer`.

base      `Observer`: three methods; `Watch`: the states of a site
stats     `ActivationStats`, `GradientStats`, `WeightStats`, and the sums of values that they keep
capture   `Capture`: keeps activations and gradients
watchdog  `Watchdog`: the names and limits of its rules, and the numbers of its sites, which
          ``diagnosis.alerts`` judges
updates   what its measured forwards show of the parameters
batches   what they show of the inputs of the model
rows      the last measured calls of a layer, which it shows before NaN or Inf
"""
