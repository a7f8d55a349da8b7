"""Observers of layers. All take `when`, and the options of `Regularizer`.

base      `Observer`: three methods; `Watch`: the states of a site
stats     `ActivationStats`, `GradientStats`, `WeightStats`, and the sums of values that they keep
capture   `Capture`: keeps activations and gradients
watchdog  `Watchdog`: names the first layer where something goes wrong; the state of its sites
"""
