"""Finds the faults of an attachment and their causes.

- `now`: all faults at this moment, for ``verify``; the faults of an epoch that ends.
- `first`: checks after the first training forward of an epoch, such as for a batch axis.
- `idle`: why a site did nothing, with one function for each cause.
- `routed`: lists of layers from which a model chooses some, such as experts.
- `behind`: layers that compiled code has almost stopped calling.
- `skipped`: updates of the optimizer that `SkipUpdate` has left out.
- `blocks`: blocks of DropBlock that are as large as the map.
- `lost`: sites that can't act any more, because their layer or parameter was replaced.
- `late`: calls of ``step(epoch)`` at the end of each epoch.
- `endings`: faults of a whole training, such as a rate that was always 0.
- `at_end`: reports these and the faults of the last epoch, also when the process ends.
- `ranks`: the findings of several processes, and differences between the processes.
- `sights`: the layers that a `Watchdog` watches, with their numbers.
- `alerts`: applies the rules to these numbers, and finds the first cause of the findings.
- `rules`: the rules about gradients and activations.
- `updated`: the rules about parameters that do not change, and gradients that are not cleared.
- `nonfinite`: the rule about NaN and Inf, which names the layer that made them first.

The texts of the findings are in ``messages``.
"""
