"""Experiments with dropblock_hooks: a task, a training run, a study of several, and its table.

Read in this order:

- `data`: scikit-learn's digits as a small task with noisy labels, all from one seed
- `train`: `train(Config(...)) -> Result`, one readable loop
- `study`: a YAML file of conditions and seeds, and running it
- `report`: paired statistics over the seeds, as a table and a CSV file

The commands are `scripts/train.py` and `scripts/ablate.py`.
"""
