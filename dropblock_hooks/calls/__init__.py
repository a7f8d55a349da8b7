"""Functions that run a model once or several times, and put nothing on it that stays.

sample   `sample`: Monte-Carlo dropout, mean and spread of many forwards in evaluation
batched  the forwards of `sample` in one batch
capture  `capture`: activations and gradients of layers in one call
gradcam  `gradcam`: the positions of an image that a class score depends on
watch    `watch`: a `Watchdog` on the layers of a model, in one line
once     what these share: one call with observers, and runs that leave no trace
"""
