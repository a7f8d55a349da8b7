"""Experiments with dropblock_hooks: a task, a training run, a study of several, and its table.

Read in this order:

- `data`: scikit-learn's digits as a small task with noisy labels, all from one seed
- `train`: `train(Config(...)) -> Result`, one readable loop
- `study`: a YAML file of conditions and seeds, and running it
- `report`: paired statistics over the seeds, as a table and a CSV file

What attaching costs is another matter: `overhead` times works (`overhead_kernels`,
`overhead_others`, `overhead_sites`, `overhead_models`) against `peers`, with their `memory`;
`overhead_report` shows the rows.

The commands are `scripts/train.py`, `scripts/ablate.py` and `scripts/bench_overhead.py`.
"""
