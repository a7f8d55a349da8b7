"""Observers of layers. All take `when`, and the options of `Regularizer`.

- `base`: `Observer`, a class with three methods, and `Watch`, the state of an observer at a site
- `stats`: `ActivationStats`, `GradientStats`, `WeightStats`, and the sums of values that they keep
- `capture`: `Capture`, which keeps activations and gradients
- `watchdog`: `Watchdog`, with its rules and limits, and the numbers of its sites, which
  ``diagnosis.alerts`` judges
- `updates`: for the rules of `Watchdog` about parameters, whether updates have changed them
- `batches`: for its rule about inputs, whether batches of the model are equal
- `rows`: the last measured calls of a layer, which `Watchdog` shows before NaN or Inf
"""
