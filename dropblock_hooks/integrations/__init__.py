"""Callbacks for trainers; users import the module of their trainer.

- `driver`: `TrainerDriver`, which the callbacks share: attach, move the time, warn, remove
- `lightning`: `Regularize`, a callback for the Trainer of Lightning
- `transformers`: `Regularize`, a callback for the Trainer of Transformers
- `ultralytics`: `Regularize`, callbacks for the training of Ultralytics' YOLO models
- `timm`: the Attachment in the checkpoints of timm's ``train.py``
"""
