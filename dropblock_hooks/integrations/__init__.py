"""What fits the package to trainers; each module is imported only when asked for.

timm          the Attachment in the checkpoints of timm's ``train.py``
transformers  `Regularize`, a callback for the Trainer of Transformers
"""
