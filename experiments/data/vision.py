"""CIFAR and image folders, through torchvision. Nothing is downloaded."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from torchvision import datasets
from torchvision.transforms import v2

from experiments.data import Data
from experiments.seeds import own_generator

NORMS = {
    "CIFAR10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "ImageFolder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def _cifar(kind: Any, seed: int, root: str = "data", image_size: int = 32, **options: Any) -> Data:
    """CIFAR from the files that torchvision leaves in `root`; options as of `_data`."""
    try:
        parts = [kind(root, train=train) for train in (True, False)]
    except RuntimeError as error:
        raise ValueError(
            f"{error} In {Path(root).resolve()} must be the files that "
            f"torchvision.datasets.{kind.__name__}(root, download=True) leaves"
        ) from error
    return _data(*parts, seed, image_size, v2.Resize((image_size, image_size)), **options)


cifar10, cifar100 = partial(_cifar, datasets.CIFAR10), partial(_cifar, datasets.CIFAR100)


def imagefolder(seed: int, root: str, image_size: int = 224, **options: Any) -> Data:
    """Images in `root/train/CLASS` and `root/val/CLASS`; options as of `_data`."""
    folder = Path(root).resolve()
    try:
        parts = [datasets.ImageFolder(str(folder / name)) for name in ("train", "val")]
    except OSError as error:
        raise ValueError(
            f"{error} Images must be in {folder}/train/CLASS and {folder}/val/CLASS"
        ) from error
    if differ := sorted({*parts[0].classes} ^ {*parts[1].classes}):
        raise ValueError(
            f"{folder}: train and val must have the same classes, they differ in {differ}"
        )
    fit = v2.Compose([v2.Resize(round(image_size * 256 / 224)), v2.CenterCrop(image_size)])
    return _data(*parts, seed, image_size, fit, **options)


def _data(
    train: Any,
    test: Any,
    seed: int,
    size: int,
    fit: v2.Transform,
    train_images: int | None = None,
    validation: float = 0.0,
    augmentation: str = "none",
) -> Data:
    """Data sets of the images.

    Args:
        train: images to train on.
        test: images to test on.
        seed: draws the images.
        size: side in pixels.
        fit: makes an image square and of that size.
        train_images: images for training and validation together. None takes all.
        validation: share of these images that a search chooses by.
        augmentation: of training images: none, flip, crop-flip or resized-crop-flip.
    """
    flip = v2.RandomHorizontalFlip()
    changes: dict[str, list[v2.Transform]] = {
        "none": [fit],
        "flip": [fit, flip],
        "crop-flip": [fit, v2.RandomCrop(size, padding=round(size / 8)), flip],
        "resized-crop-flip": [v2.RandomResizedCrop(size), flip],
    }
    if augmentation not in changes:
        raise ValueError(f"augmentation must be one of {list(changes)}, got {augmentation!r}")
    norm = v2.Normalize(*NORMS[type(train).__name__])
    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), norm]
    chosen = torch.randperm(len(train), generator=own_generator(seed, "split")).tolist()
    chosen = chosen[: train_images or len(chosen)]
    kept = len(chosen) - round(validation * len(chosen))
    plain = v2.Compose([fit, *last])
    changed = v2.Compose([*changes[augmentation], *last])
    return Data(
        Subset(_with(train, changed), chosen[:kept]),
        {"clean": _with(test, plain)},
        Subset(_with(train, plain), chosen[kept:]) if validation else None,
        classes=len(train.classes),
    )


def _with(images: Any, transform: v2.Transform) -> Any:
    """The same images with another transform."""
    changed = copy.copy(images)
    changed.transform = transform
    return changed
