"""CIFAR and image folders, through torchvision. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from torchvision import datasets
from torchvision.transforms import v2

from experiments.data import Data
from experiments.seeds import own_generator

Augmentation = Literal["none", "flip", "crop-flip", "resized-crop-flip"]
NORMS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagefolder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def cifar10(seed: int, root: str = "data", **options: Any) -> Data:
    """CIFAR-10 from the files that torchvision leaves in `root`; options as of `_data`."""
    return _cifar(datasets.CIFAR10, "cifar10", seed, root, **options)


def cifar100(seed: int, root: str = "data", **options: Any) -> Data:
    """CIFAR-100 from the files that torchvision leaves in `root`; options as of `_data`."""
    return _cifar(datasets.CIFAR100, "cifar100", seed, root, **options)


def _cifar(
    kind: Any, name: str, seed: int, root: str, image_size: int = 32, **options: Any
) -> Data:
    try:
        parts = [kind(root, train=train) for train in (True, False)]
    except RuntimeError as error:
        raise ValueError(
            f"{error} In {Path(root).resolve()} must be the files that "
            f"torchvision.datasets.{kind.__name__}(root, download=True) leaves"
        ) from error
    return _data(*parts, name, seed, image_size, v2.Resize((image_size, image_size)), **options)


def imagefolder(seed: int, root: str, image_size: int = 224, **options: Any) -> Data:
    """Images in `root/train/CLASS` and `root/val/CLASS`; options as of `_data`."""
    parts = []
    for name in ("train", "val"):
        try:
            parts.append(datasets.ImageFolder(str(Path(root) / name)))
        except OSError as error:
            raise ValueError(
                f"{error} Images must be in {root}/train/CLASS and {root}/val/CLASS"
            ) from error
    if parts[0].classes != parts[1].classes:
        differ = sorted({*parts[0].classes} ^ {*parts[1].classes})
        raise ValueError(
            f"{root}: train and val must have the same classes, they differ in {differ}"
        )
    fit = v2.Compose([v2.Resize(round(image_size * 256 / 224)), v2.CenterCrop(image_size)])
    return _data(*parts, "imagefolder", seed, image_size, fit, **options)


def _data(
    train: Any,
    test: Any,
    name: str,
    seed: int,
    size: int,
    fit: v2.Transform,
    train_images: int | None = None,
    validation: float = 0.0,
    augmentation: Augmentation = "none",
) -> Data:
    """Data sets of the images, with these options.

    Args:
        train: images to train on.
        test: images to test on.
        name: decides mean and standard deviation of the channels.
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
    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*NORMS[name])]
    order = torch.randperm(len(train), generator=own_generator(seed, "split")).tolist()
    chosen = order[: train_images or len(order)]
    kept = len(chosen) - round(validation * len(chosen))
    plain = v2.Compose([fit, *last])
    return Data(
        Changed(Subset(train, chosen[:kept]), v2.Compose([*changes[augmentation], *last])),
        {"clean": Changed(test, plain)},
        Changed(Subset(train, chosen[kept:]), plain) if validation else None,
        classes=len(train.classes),
    )


class Changed(Dataset[tuple[Tensor, int]]):
    """A data set whose images go through a transform."""

    def __init__(self, images: Any, transform: v2.Transform) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        assert isinstance(self.images, Sized)
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        return self.transform(image), label
