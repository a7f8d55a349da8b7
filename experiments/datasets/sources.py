"""Where images come from: scikit-learn's digits, CIFAR files, image folders, a generator.

A `Source` is what there is, before anything is drawn by a seed or augmented.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100, ImageFolder
from torchvision.datasets.utils import check_integrity
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from experiments.config import Config
from experiments.datasets.canvas import (
    CHANGED,
    CLASSES,
    DEFAULT_IMAGES,
    SIZE,
    Canvases,
    changed_canvases,
    tested_canvases,
    training_canvases,
)
from experiments.datasets.corruption import CORRUPTIONS
from experiments.seeds import own_generator

CIFAR = {"cifar10": CIFAR10, "cifar100": CIFAR100}


class Pictures(Protocol):
    """Images by number: a tensor (n, channels, height, width), or files of any size."""

    def __getitem__(self, numbers: list[int]) -> Sequence[Tensor] | Tensor: ...


@dataclass(frozen=True)
class Pool:
    """Images and their labels (n,), as they are in memory (float in [0, 1], or bytes) or files."""

    images: Pictures
    labels: Tensor


@dataclass(frozen=True)
class Source:
    """A data set before anything is drawn or augmented.

    Args:
        train: what there is to train on.
        test: what is tested on; None for all of `train` that is not trained on.
        default_images: how many are trained on if nobody says; None for all.
        classes: how many.
        channels: of each image.
        image_size: side of the images after `fit`, in pixels.
        fit: makes any of the images square and of that size.
        mean: of each channel, taken off before training; None leaves images in [0, 1].
        std: of each channel, divided by.
        noise: standard deviation of the noise in the noisy test, in units of [0, 1]; on CIFAR
            and photographs that of the common corruptions (Hendrycks and Dietterich 2019) at
            severities 5 and 3; on digits, which are easier to read, more.
        validation: what epochs are chosen by, of a data set that is split already, where all of
            `train` is trained on; None for a share of the training images, if one is asked for.
        variants: further tests by name, ready; they take the place of the general damage of the
            same name.
    """

    train: Pool
    test: Pool | None
    classes: int
    channels: int
    image_size: int
    fit: v2.Transform
    default_images: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    noise: float = 0.1
    validation: Pool | None = None
    variants: Mapping[str, Pool] = field(default_factory=dict)


def load_source(config: Config, data_dir: Path) -> Source:
    """The data set that a config names.

    Raises:
        ValueError: if its files are missing, damaged, or not laid out as they must be.
    """
    kind, _, path = config.data.partition(":")
    if kind == "digits":
        return digits(config.image_size or 32)
    if kind == "fake":
        return fake(config.image_size or 32)
    if kind == "canvas":
        return canvas(config)
    if kind == "imagefolder":
        return folders(Path(path), config.image_size or 224)
    return cifar(kind, data_dir, config.image_size or 32)


def scored_splits(data: str) -> tuple[str, ...]:
    """The tests that a data set has, by name, without loading it.

    Args:
        data: as in a config.

    Example:
        >>> scored_splits("digits"), scored_splits("canvas")
        (('clean', 'occluded', 'noisy'), ('clean', 'occluded', 'noisy', 'clutter'))
    """
    own = CHANGED if data == "canvas" else ()
    return tuple(dict.fromkeys(("clean", *CORRUPTIONS, *own)))


def digits(size: int) -> Source:
    """The 1,797 digits of scikit-learn, enlarged bilinearly from 8x8; 1,000 to train on."""
    data = load_digits()
    images = torch.from_numpy(data.images).float().div(16).unsqueeze(1)
    fit = v2.Resize((size, size))
    pool = Pool(fit(images).clamp(0, 1), torch.from_numpy(data.target).long())
    return Source(pool, None, 10, 1, size, fit, default_images=1000, noise=0.25)


def canvas(config: Config) -> Source:
    """Three digits of one class on a canvas of 64x64, in clutter; see `datasets.canvas`.

    Raises:
        ValueError: if `image_size`, `train_images` or `validation` is too small or too large.
    """

    def pool(made: Canvases) -> Pool:
        return Pool(made.images, made.labels)

    size, count = config.image_size or SIZE, config.train_images or DEFAULT_IMAGES
    train, held_out = training_canvases(config.seed, count, config.validation, size)
    return Source(
        pool(train),
        pool(tested_canvases(size)),
        CLASSES,
        1,
        size,
        v2.Resize((size, size)),
        noise=0.25,
        validation=held_out and pool(held_out),
        variants={name: Pool(*made) for name, made in changed_canvases(size).items()},
    )


def fake(size: int) -> Source:
    """Random images of ten classes that nobody can tell apart: 512 to train on, 64 to test."""

    def pool(count: int, purpose: str) -> Pool:
        images = torch.empty(count, 3, size, size, dtype=torch.uint8)
        for number, image in enumerate(images):
            image.random_(0, 256, generator=own_generator(number, purpose))
        return Pool(images, torch.arange(count) % 10)

    fit = v2.Resize((size, size))
    return Source(pool(512, "fake train"), pool(64, "fake test"), 10, 3, size, fit)


def cifar(name: str, data_dir: Path, size: int) -> Source:
    """CIFAR-10 or CIFAR-100 from the files that torchvision leaves in a folder.

    Raises:
        ValueError: naming the files that are missing or damaged.
    """
    kind = CIFAR[name]
    try:
        train, test = (kind(str(data_dir), train=part) for part in (True, False))
    except (RuntimeError, OSError) as error:
        raise ValueError(f"data {name}: {_cifar_problem(kind, data_dir, error)}") from error
    pools = []
    for part in (train, test):
        images = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
        pools.append(Pool(images, torch.tensor(part.targets)))
    if name == "cifar10":
        mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    else:
        mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    fit = v2.Resize((size, size))
    return Source(*pools, len(train.classes), 3, size, fit, mean=mean, std=std)


def _cifar_problem(kind: type[CIFAR10], data_dir: Path, error: Exception) -> str:
    folder = data_dir / kind.base_folder
    files = dict([*kind.train_list, *kind.test_list, [kind.meta["filename"], kind.meta["md5"]]])
    missing = [name for name in files if not (folder / name).is_file()]
    if len(missing) == len(files):
        found = f"no files in {folder}"
    elif missing:
        found = f"{folder} lacks {', '.join(missing)}"
    else:
        damaged = [name for name, md5 in files.items() if not _intact(folder / name, md5)]
        found = f"damaged in {folder}: {', '.join(damaged)}" if damaged else str(error)
    return (
        f"{found}; expected there are the files that torchvision's "
        f"{kind.__name__}({str(data_dir)!r}, download=True) leaves (data_dir says where)"
    )


def _intact(path: Path, md5: str) -> bool:
    try:
        return check_integrity(path, md5)
    except OSError:
        return False


class ImageFiles:
    """Images of any size and mode, read from their files as RGB bytes."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __getitem__(self, numbers: list[int]) -> list[Tensor]:
        return [_read(self.paths[number]) for number in numbers]


def _read(path: str) -> Tensor:
    try:
        with Image.open(path) as image:
            return functional.pil_to_tensor(image.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"can't read the image {path}: {error}") from error


def folders(path: Path, size: int) -> Source:
    """Photographs in `path/train` and `path/val`, with a folder per class in each.

    Raises:
        ValueError: if a folder is missing or empty, or the two differ in their classes.
    """
    train, test = (_image_folder(path, part) for part in ("train", "val"))
    differ = set(train.classes) ^ set(test.classes)
    if differ:
        first = min(differ)
        has, lacks = ("train", "val") if first in train.classes else ("val", "train")
        raise ValueError(
            f"data imagefolder:{path}: train and val must have the same classes, but "
            f"{path / lacks} lacks {first!r}, which is in {has} ({len(differ)} classes differ)"
        )
    pools = [
        Pool(ImageFiles([file for file, _ in part.samples]), torch.tensor(part.targets))
        for part in (train, test)
    ]
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    fit = v2.Compose([v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size)])
    return Source(*pools, len(train.classes), 3, size, fit, mean=mean, std=std, noise=0.18)


def _image_folder(path: Path, part: str) -> ImageFolder:
    try:
        return ImageFolder(str(path / part))
    except OSError as error:
        raise ValueError(
            f"data imagefolder:{path}: {error}; expected are {path / 'train'} and "
            f"{path / 'val'}, each with a folder per class that holds its images"
        ) from error


def fingerprint(config: Config, data_dir: Path) -> str:
    """What stands for the data in a run's hash: never a path.

    CIFAR's files are checked by torchvision, so their name says all; of image folders, the names
    and sizes of all files are, not what they hold. They are looked at once in a process.

    Raises:
        ValueError: for image folders that can't be read.
    """
    kind, _, path = config.data.partition(":")
    if kind != "imagefolder":
        return kind
    return f"imagefolder-{_digest(os.path.abspath(path))[:16]}"


@cache
def _digest(path: str) -> str:
    digest = hashlib.sha256()
    for part in ("train", "val"):
        for file, _ in _image_folder(Path(path), part).samples:
            name = Path(file).relative_to(path).as_posix()
            digest.update(f"{name}\n{os.path.getsize(file)}\n".encode())
    return digest.hexdigest()
