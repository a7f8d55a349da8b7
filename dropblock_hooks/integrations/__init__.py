"""What fits the package to trainers; each module is imported only when asked for.

driver        `TrainerDriver`: attach, move the time, warn, remove; what all callbacks share
lightning     `Regularize`, a callback for the Trainer of Lightning, under both of its names
transformers  `Regularize`, a callback for the Trainer of Transformers
timm          the Attachment in the checkpoints of timm's ``train.py``
"""
