"""Functions that run a model, or watch it, in one line.

All but `watch` leave no hook on the model.

- `sample`: `sample`, Monte-Carlo dropout: mean and spread of many forwards in evaluation.
- `batched`: the forwards of `sample` in one batch.
- `capture`: `capture`, activations and gradients of layers in one call.
- `gradcam`: `gradcam`, the positions of an image that a class score depends on.
- `watch`: `watch`, a `Watchdog` on the layers of a model.
- `once`: one call with observers, and runs that leave no trace, for the other modules.
"""
