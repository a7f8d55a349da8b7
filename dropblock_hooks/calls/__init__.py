"""A model, run in a way of its own.

sample       `sample`: Monte-Carlo dropout, the mean and spread of many forwards in evaluation
capture      `capture`: the activations and gradients of layers in one call
gradcam      `gradcam`: the places of an image that speak for a class
explained    the layer that it looks at: what it gives, and the gradient there
scores       what it explains: one score for each image
candidates   the layers that it can look at, the best ones first
watch        `watch`: a `Watchdog` on the layers of a model, in one line
undisturbed  a model in evaluation for a while, and afterwards as it was
"""
