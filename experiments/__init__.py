"""Studies with dropblock_hooks: the effect of a regularizer on a training, and its cost.

- `config`: the fields of a run with their checks, and the name of a run
- `factories`: `package.module:name`, for a model, data set, loss or metric of your own
- `seeds`: a generator for each purpose
- `data`: data sets of a seed: digits, canvas, CIFAR, image folders
- `loading`: batches whose order and augmentation do not depend on masks
- `models`: the model of a run, with its spec attached
- `metrics`: the metric of a run, computed batch by batch
- `train`: one training run, readable from top to bottom
- `checkpoint`: the state at the end of an epoch
- `runs`: the folder of a run: claimed, begun, finished or failed
- `engine`: workers that pull runs, on this machine or on Ray
- `trial`: a try of each condition with a few items, before its first run
- `study`: a YAML file as conditions and seeds
- `search`: the same number of runs for each condition, ranked over seeds
- `stats`: paired differences with simultaneous intervals
- `plots`: the two pictures of a report
- `report`: the report of a study
- `page`: the generated parts of the page of findings
- `commands`: functions that the commands in `scripts` share
- `overhead`: the cost of attaching: works, paired timings, peers, memory
"""
