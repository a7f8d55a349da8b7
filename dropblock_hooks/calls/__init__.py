"""A model with what was attached, called in a way of its own.

capture  `capture`: the activations and gradients of layers in one call
sample   `sample`: Monte-Carlo dropout, the mean and spread of many forwards in evaluation
"""
