"""A model with what was attached, called in a way of its own.

sample  `sample`: Monte-Carlo dropout, the mean and spread of many forwards in evaluation
watch   `watch`: a `Watchdog` on the layers of a model, in one line
"""
