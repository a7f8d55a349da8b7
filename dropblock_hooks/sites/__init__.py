"""One regularizer on one layer, parameter or rate, at run time.

The class of a hook decides everything about its kind of target.

updates           regularizes gradients once per optimizer step, also by their common norm, all
                  gradients of an entry together
held              the hooks of parameters, of rates, and of the modes of norms
hooks             the hooks of layers and observers, and their order
shards            gradients of which each process holds a part: norms of wholes from those of parts
memories          regularizers that remember the norms of earlier updates, of a whole entry at once
model_hook        `ModelHook`: the hook of the model, which counts forwards and asks for checks
ticker            the clock of a `Watchdog` in compiled code, which counts without Python
compiled          what torch.compile traces for a regularizer, into the graph of the model
observed          what it traces for an observer
board             `Board`: the rates that compiled code reads, and the counts to which it adds
operator          operators that call Python in compiled code, for classes that it can't trace
public            `Site`: what a user reads of a site
site              `LiveSite`: a regularizer on a layer, its state, and its calls, which it counts
                  unless a checkpoint recomputes them
counter           `Counter`: totals that only grow, and windows of them; histograms of norms;
                  `JointCounts`: what is counted for several sites at once
run               `Run`: the state that the sites of an attachment share: the time, the switches
windows           what was counted in an epoch
scaler            the GradScaler of the training loop, and its scale
processes         the number of processes, and what each of them has
indexing          tensors inside the inputs and outputs of a layer
"""
