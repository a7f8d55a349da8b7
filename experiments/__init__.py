"""Experiments with dropblock_hooks: what it does to a training, and what it costs.

Read in this order:

- `config`: what a run does, apart from where and how; the hash that names it (`field_checks`);
  `results`: what came of it
- `data`: digits, canvases of them, CIFAR, folders of images, paired by seed (`datasets`, `seeds`);
  `loaders`: batches of them
- `train`: `train(Config(...)) -> Result`, one readable loop (`models`, `optimization`, `totals`
  of an epoch, `checkpoint`, `processes`, `log`, `loggers`)
- `study`: a YAML file of conditions and seeds (`grid`), and of what is compared (`contrasts`),
  checked first (`study_file`); `running`: working on it, anywhere
- `files`: written whole or not at all, telling when they were changed
- `report`: what came of it, with paired statistics, as text, tables and pictures (`reporting`)
- `saliency`: how far Grad-CAM spreads over test images, of a study's networks
- `recounting`: whether what is said of it, in reports and READMEs, is what the runs tell

What attaching costs is another matter: `overhead` times works against `peers`, with their
`memory`. `families` tries every timm family; `retuned`, what each drops by itself.

The commands are in `scripts`: `train.py`, `ablate.py`, `report.py`, `recount.py`, `saliency.py`,
`bench_overhead.py`, `families.py`, `retuned.py`, `matrix.py`, `canvas.py`; `commands`: how each
begins and ends.
"""
