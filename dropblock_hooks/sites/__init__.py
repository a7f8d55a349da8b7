"""One regularizer on one layer, parameter or rate, at run time.

The class of a hook decides everything about its kind of target.

- `updates`: regularizes gradients once per optimizer step, all gradients of an entry together.
- `held`: the hooks of parameters, of rates, and of the modes of norms.
- `hooks`: the hooks of layers and observers, and their order.
- `shards`: gradients that are spread over processes, and their norms.
- `memories`: regularizers that remember the norms of earlier updates.
- `model_hook`: `ModelHook`, the hook of the model, which counts forwards and starts the checks.
- `ticker`: the clock of a `Watchdog` in compiled code, which counts without Python.
- `compiled`: the functions that torch.compile traces for a regularizer.
- `observed`: the functions that torch.compile traces for an observer.
- `board`: `Board`, the rates that compiled code reads and the counts to which it adds.
- `operator`: operators that call Python in compiled code, for classes that can't be traced.
- `public`: `Site`, the public interface to a site.
- `site`: `LiveSite`, a regularizer on a layer with its state and its calls.
- `counter`: `Counter`, the totals and windows of a site; `JointCounts`, for several sites.
- `history`: the rows of the epochs that have ended.
- `run`: `Run`, the state that all sites of an attachment share, such as the time.
- `seeds`: seeds of masks that are drawn again.
- `windows`: the counts of an epoch.
- `scaler`: the GradScaler of the training loop, and its scale.
- `processes`: the number of processes, and objects gathered from all of them.
- `indexing`: finds tensors in the inputs and outputs of a layer.
"""
