"""CIFAR and image folders, through torchvision. Nothing is downloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
_IMAGENET_SIZE = 224  # pixels


def _cifar(kind: Any, seed: int, root: str = "data", image_size: int = 32, **options: Any) -> Data:
    """Load CIFAR from the files that torchvision leaves in `root`; for options see `_data`."""
    try:
        train = kind(root, train=True)
        test = kind(root, train=False)
    except RuntimeError as error:
        raise ValueError(
            f"{error} In {Path(root).resolve()} must be the files that "
            f"torchvision.datasets.{kind.__name__}(root, download=True) leaves"
        ) from error
    fit = v2.Resize((image_size, image_size))
    return _data(train, test, seed, image_size, fit, **options)


cifar10 = partial(_cifar, datasets.CIFAR10)
cifar100 = partial(_cifar, datasets.CIFAR100)


def imagefolder(seed: int, root: str, image_size: int | None = None, **options: Any) -> Data:
    """Load images in `root/train/CLASS` and `root/val/CLASS`; for options see `_data`.

    Without `image_size` the size is 224, and images that are smaller are refused.

    Raises:
        ValueError: if a folder is missing, the classes differ, or the images are too small.
    """
    folder = Path(root).resolve()
    try:
        train = datasets.ImageFolder(str(folder / "train"))
        test = datasets.ImageFolder(str(folder / "val"))
    except OSError as error:
        raise ValueError(
            f"{error} Images must be in {folder}/train/CLASS and {folder}/val/CLASS"
        ) from error

    different = sorted(set(train.classes) ^ set(test.classes))
    if different:
        raise ValueError(
            f"{folder}: train and val must have the same classes, they differ in {different}"
        )

    if image_size is None:
        _refuse_small_images(train)
        image_size = _IMAGENET_SIZE
    fit = partial(_center, size=image_size)
    return _data(train, test, seed, image_size, fit, **options)


def _refuse_small_images(images: Any) -> None:
    """Refuse a folder whose first image is smaller than the default size."""
    width, height = images[0][0].size
    edge = min(width, height)
    if edge < _IMAGENET_SIZE:
        raise ValueError(
            f"the first image has {width} x {height} pixels, and image_size is {_IMAGENET_SIZE} by "
            f"default: set image_size={edge}, or image_size={_IMAGENET_SIZE} to enlarge the images"
        )


def _center(image: Any, size: int) -> Any:
    """Return the center of an image, as in the evaluation on ImageNet.

    The shorter edge is resized to 256/224 of the size before the crop. An image whose shorter edge
    is not that long is resized to the size itself, so it is not enlarged more than was asked for.
    """
    edge = round(size * 256 / _IMAGENET_SIZE)
    if min(image.size) < edge:
        edge = size
    resized = v2.functional.resize(image, [edge])
    return v2.functional.center_crop(resized, [size, size])


def _data(
    train: Any,
    test: Any,
    seed: int,
    size: int,
    fit: Callable[[Any], Any],
    train_images: int | None = None,
    validation: float = 0.0,
    augmentation: str = "none",
) -> Data:
    """Make data sets of the images.

    Args:
        train: images to train on.
        test: images to test on.
        seed: draws the images.
        size: side in pixels.
        fit: makes an image square and of that size.
        train_images: images for training and validation together. None takes all.
        validation: share of these images for the validation set.
        augmentation: changes of training images: none, flip, crop-flip or resized-crop-flip.
    """
    flip = v2.RandomHorizontalFlip()
    changes: dict[str, list[Callable[[Any], Any]]] = {
        "none": [fit],
        "flip": [fit, flip],
        "crop-flip": [fit, v2.RandomCrop(size, padding=round(size / 8)), flip],
        "resized-crop-flip": [v2.RandomResizedCrop(size), flip],
    }
    if augmentation not in changes:
        raise ValueError(f"augmentation must be one of {list(changes)}, got {augmentation!r}")

    normalize = v2.Normalize(*NORMS[type(train).__name__])
    as_floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalize]
    plain = v2.Compose([fit, *as_floats])
    augmented = v2.Compose([*changes[augmentation], *as_floats])

    order = torch.randperm(len(train), generator=own_generator(seed, "split")).tolist()
    chosen = order[: train_images or len(order)]
    kept = len(chosen) - round(validation * len(chosen))
    held = None
    if validation:
        held = Subset(_with(train, plain), chosen[kept:])
    return Data(
        train=Subset(_with(train, augmented), chosen[:kept]),
        tests={"clean": _with(test, plain)},
        validation=held,
        classes=len(train.classes),
    )


def _with(images: Any, transform: v2.Transform) -> Any:
    """Return the same images with another transform."""
    changed = copy.copy(images)
    changed.transform = transform
    return changed
