"""Batches of images as a model takes them: augmented to train on, whole or damaged to test on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from experiments.config import Config
from experiments.datasets.corruption import Corruption
from experiments.datasets.sources import Pictures, Pool, Source
from experiments.seeds import derive_seed

Draw = tuple[int, int]  # (epoch, index of an image)


class Images(Protocol):
    """Labelled images, made by the batch: (n, channels, side, side) float32, and (n,) int64."""

    def __len__(self) -> int: ...

    def __getitems__(self, draws: list[Draw]) -> tuple[Tensor, Tensor]: ...


class TrainImages:
    """Images to train on, augmented as seed, replica, epoch and index say."""

    def __init__(self, source: Source, config: Config, numbers: Tensor, labels: Tensor) -> None:
        self.pictures: Pictures = source.train.images
        self.numbers, self.labels = numbers, labels
        self.fit, self.mean, self.std = source.fit, source.mean, source.std
        self.augment = augmentation(config.augmentation, source)
        self.seed, self.replica = config.seed, config.replica

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, draws: list[Draw]) -> tuple[Tensor, Tensor]:
        indices = [index for _, index in draws]
        pictures = self.pictures[self.numbers[indices].tolist()]
        if self.augment is None:
            images = _fitted(self.fit, pictures)
        else:
            images = torch.stack(self._augmented(pictures, draws))
        return _finished(_as_float(images), self.mean, self.std), self.labels[indices]

    def _augmented(self, pictures: Iterable[Tensor], draws: list[Draw]) -> list[Tensor]:
        """Torchvision's transforms draw from torch's global generator: it is put back."""
        before = torch.get_rng_state()
        augmented = []
        try:
            for picture, (epoch, index) in zip(pictures, draws, strict=True):
                seed = derive_seed(self.seed, f"augmentation/{epoch}/{index}", self.replica)
                # torch.manual_seed would also move the generators of GPUs, which make masks
                torch.default_generator.manual_seed(seed)
                augmented.append(self.augment(picture))
        finally:
            torch.set_rng_state(before)
        return augmented


def augmentation(name: str, source: Source) -> v2.Transform | None:
    """The transform of one training image that makes it fit; None for `source.fit` alone."""
    size, flip = source.image_size, v2.RandomHorizontalFlip()
    if name == "flip":
        return v2.Compose([source.fit, flip])
    if name == "crop-flip":
        return v2.Compose([source.fit, v2.RandomCrop(size, padding=round(size / 8)), flip])
    if name == "resized-crop-flip":
        return v2.Compose([v2.RandomResizedCrop(size), flip])
    return None


class TestImages:
    """Images to test on, whole or damaged; the epoch of a draw does not matter."""

    __test__ = False  # pytest takes the name for a test

    def __init__(
        self, source: Source, pool: Pool, numbers: Tensor, corruption: Corruption | None = None
    ) -> None:
        self.pictures: Pictures = pool.images
        self.numbers, self.labels = numbers, pool.labels[numbers]
        self.fit, self.mean, self.std = source.fit, source.mean, source.std
        self.corruption, self.noise = corruption, source.noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, draws: list[Draw]) -> tuple[Tensor, Tensor]:
        indices = [index for _, index in draws]
        numbers = self.numbers[indices].tolist()
        images = _as_float(_fitted(self.fit, self.pictures[numbers]))
        if self.corruption is not None:
            images = self.corruption(images, numbers, self.noise)
        return _finished(images, self.mean, self.std), self.labels[indices]


def _fitted(fit: v2.Transform, pictures: Sequence[Tensor] | Tensor) -> Tensor:
    if isinstance(pictures, Tensor):
        return fit(pictures)
    return torch.stack([fit(picture) for picture in pictures])


def _as_float(images: Tensor) -> Tensor:
    return functional.to_dtype(images, torch.float32, scale=True)


def _finished(
    images: Tensor, mean: tuple[float, ...] | None, std: tuple[float, ...] | None
) -> Tensor:
    return images if mean is None else functional.normalize(images, list(mean), list(std))
