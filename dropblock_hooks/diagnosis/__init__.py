"""Finds what is wrong with an attachment, and why.

now        everything that is wrong now, for ``verify``, and faults of an epoch that ends
first      what the first training forward of an epoch shows, such as a tensor without a batch axis
idle       why a site did nothing: one function for each cause
routed     lists from whose layers a model chooses some, such as experts
behind     layers that compiled code has almost stopped to call
skipped    updates of the optimizer that `SkipUpdate` has left out
lost       sites that can't act any more, because the layer or the parameter is another one
endings    what is wrong with a training as a whole, such as a rate that was always 0
ranks      the findings of several processes, and how the processes differ
sights     the layers that a `Watchdog` watches, with their numbers
alerts     when these numbers are judged, and the first cause of what is found
rules      the rules about gradients and activations
updated    the rule about parameters that updates do not change
nonfinite  the rule about NaN and Inf: the layer that made the first of them

``messages`` has the texts of the findings.
"""
