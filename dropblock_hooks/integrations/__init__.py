"""What fits the package to trainers; each module is imported only when asked for.

lightning     `Regularize`, a callback for the Trainer of Lightning, under both of its names
transformers  `Regularize`, a callback for the Trainer of Transformers
timm          the Attachment in the checkpoints of timm's ``train.py``
"""
