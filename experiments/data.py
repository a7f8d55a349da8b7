"""Training and test images of a config, and the loaders that make batches of them.

Nothing here draws from torch's, numpy's or random's global generators. The split and the label
noise follow from the seed; the order of an epoch from seed, replica and epoch; the augmentation
of an image from these and its index. So two conditions of one seed see the same batches, however
many masks are drawn in between, and an epoch can be taken up at any batch.

    >>> data = load_data(Config(train_images=100), Path("data"))
    >>> loader = train_loader(data, Config(train_images=100), Runtime())
    >>> loader.begin(epoch=0, first_batch=1)
    >>> [images.shape for images, labels in loader]
    [torch.Size([50, 1, 32, 32])]
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from experiments.config import Config, Runtime
from experiments.datasets.corruption import CORRUPTIONS
from experiments.datasets.images import Draw, Images, TestImages, TrainImages
from experiments.datasets.sources import Pool, Source, load_source
from experiments.seeds import own_generator


@dataclass(frozen=True)
class Data:
    """What is trained on, with noisy labels, and what is tested on, with clean ones.

    Args:
        name: of the data set, without a path.
        train: the training images.
        tests: the test images: clean, occluded and noisy, and what else the source has; none where
            nothing is tested.
        classes: how many.
        channels: of each image.
        image_size: side of each image, in pixels.
        validation: the images that epochs are chosen by, with noisy labels; None without any.
    """

    name: str
    train: Images
    tests: dict[str, Images]
    classes: int
    channels: int
    image_size: int
    validation: Images | None = None


def load_data(config: Config, data_dir: Path) -> Data:
    """The images of a config; nothing is downloaded.

    Args:
        config: decides what is loaded, the splits, the label noise and the augmentation.
        data_dir: folder of the CIFAR files.

    Raises:
        ValueError: if files are missing or damaged, or `train_images`, `label_noise` or
            `validation` do not fit the data.
    """
    return make_data(load_source(config, data_dir), config)


def make_data(source: Source, config: Config) -> Data:
    """The images of a config, of a source that was loaded for it.

    Example:
        >>> config = Config(data="fake", train_images=100, validation=0.5)
        >>> data = make_data(load_source(config, Path()), config)
        >>> len(data.train), len(data.validation), len(data.tests["clean"])
        (50, 50, 64)

    Raises:
        ValueError: if `train_images`, `label_noise` or `validation` do not fit the data.
    """
    chosen, rest, labels = _drawn(source, config)
    share = config.validation if source.validation is None else 0.0
    kept = _kept(labels, share, source.classes)
    train = TrainImages(source, config, chosen[:kept], labels[:kept])
    validation = _validation(source, config, chosen[kept:], labels[kept:])
    tests = _tests(source, rest) if config.test else {}
    sizes = (source.classes, source.channels, source.image_size)
    return Data(config.data.partition(":")[0], train, tests, *sizes, validation)


def check_validation(source: Source, config: Config, seeds: Iterable[int]) -> None:
    """Refuse a share of validation that leaves a class empty with any of the seeds.

    Only labels are drawn: no image is made. A source with validation images of its own has them of
    every class, whatever the seed.

    Example:
        >>> config = Config(data="fake", train_images=90, validation=0.5)
        >>> check_validation(load_source(config, Path()), config, seeds=[1, 2, 3])
        Traceback (most recent call last):
            ...
        ValueError: with seed 3, validation must leave images of every class ...

    Raises:
        ValueError: naming the first seed with which a class is empty, and the class.
    """
    if source.validation is not None or not config.validation:
        return
    for seed in seeds:
        *_, labels = _drawn(source, replace(config, seed=seed))
        try:
            _kept(labels, config.validation, source.classes)
        except ValueError as error:
            raise ValueError(f"with seed {seed}, {error}") from error


def _drawn(source: Source, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of the images to train on, with those for validation, and to test on; their labels.

    The labels are of the first, and have the config's noise.
    """
    chosen, rest = _split(source, config, config.data.partition(":")[0])
    return chosen, rest, _labels(source.train.labels[chosen], config, source.classes, "noise")


def _tests(source: Source, numbers: Tensor) -> dict[str, Images]:
    """The test images with these numbers, clean and damaged; the source's own takes its place."""
    test = source.test or source.train
    damaged = {name: TestImages(source, test, numbers, one) for name, one in CORRUPTIONS.items()}
    own = {
        name: TestImages(source, pool, torch.arange(len(pool.labels)))
        for name, pool in source.variants.items()
    }
    return {"clean": TestImages(source, test, numbers), **damaged, **own}


def _labels(labels: Tensor, config: Config, classes: int, purpose: str) -> Tensor:
    """The labels with the config's noise."""
    if not config.label_noise:
        return labels
    return noisy_labels(labels, config.label_noise, classes, own_generator(config.seed, purpose))


def _kept(labels: Tensor, share: float, classes: int) -> int:
    """How many images are trained on, the first ones; the seed has drawn their order.

    Raises:
        ValueError: naming a class that would be empty in training or validation.
    """
    if not share:
        return len(labels)
    kept = len(labels) - round(share * len(labels))
    for part, of_part in (("training", labels[:kept]), ("validation", labels[kept:])):
        counts = of_part.bincount(minlength=classes)
        if not counts.all():
            raise ValueError(
                f"validation must leave images of every class in training and validation, got "
                f"{share} of {len(labels)} images: class {counts.argmin().item()} has none of the "
                f"{len(of_part)} in {part}; take another share, or more train_images"
            )
    return kept


def _validation(source: Source, config: Config, held: Tensor, labels: Tensor) -> Images | None:
    """The images that epochs are chosen by: the source's own, or those held out."""
    if source.validation is not None:
        own = source.validation
        noisy = _labels(own.labels, config, source.classes, "validation noise")
        return TestImages(source, Pool(own.images, noisy), torch.arange(len(noisy)))
    if not len(held):
        return None
    every = source.train.labels.clone()
    every[held] = labels
    return TestImages(source, Pool(source.train.images, every), held)


def _split(source: Source, config: Config, name: str) -> tuple[Tensor, Tensor]:
    """Numbers of the images to train on, and of those to test on."""
    available = len(source.train.labels)
    most = available if source.test else available - 1
    count = config.train_images or source.default_images or available
    if source.validation is not None:
        count = available
    if count > most:
        reason = "" if source.test else f" (some of the {available} images are for the test)"
        raise ValueError(
            f"train_images must be between 1 and {most} for {name}{reason}, got {count}"
        )
    order = torch.randperm(available, generator=own_generator(config.seed, "split"))
    test = torch.arange(len(source.test.labels)) if source.test else order[count:]
    return order[:count], test


def noisy_labels(labels: Tensor, share: float, classes: int, generator: torch.Generator) -> Tensor:
    """A copy in which `share` of the labels, rounded to a count, are another class.

    Symmetric noise: which labels change is drawn without replacement, and the new class
    uniformly from the others.
    """
    if classes < 2:
        raise ValueError(f"label_noise needs at least 2 classes, the data have {classes}")
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    shift = torch.randint(1, classes, (len(chosen),), generator=generator)
    noisy = labels.clone()
    noisy[chosen] = (noisy[chosen] + shift) % classes
    return noisy


class Batches:
    """The order of the training images: for each batch of an epoch, the draws of one process.

    Each process has its slice of a batch. A last batch that can't be shared evenly is filled up
    with the first images of the epoch.
    """

    def __init__(self, images: int, config: Config, rank: int, processes: int) -> None:
        self.images, self.config = images, config
        self.rank, self.processes = rank, processes
        self.epoch = self.first_batch = 0

    def __len__(self) -> int:
        return math.ceil(self.images / self.config.batch_size)

    def __iter__(self) -> Iterator[list[Draw]]:
        purpose = f"order/{self.epoch}"
        generator = own_generator(self.config.seed, purpose, self.config.replica)
        order = torch.randperm(self.images, generator=generator)
        batches = order.split(self.config.batch_size)[self.first_batch :]
        return iter([self._share(batch, order) for batch in batches])

    def _share(self, batch: Tensor, order: Tensor) -> list[Draw]:
        each = math.ceil(len(batch) / self.processes)
        fill = order.repeat(self.processes)[: each * self.processes - len(batch)]
        mine = torch.cat([batch, fill])[self.rank * each : (self.rank + 1) * each]
        return [(self.epoch, index) for index in mine.tolist()]


def share_sizes(config: Config, images: int) -> tuple[int, int]:
    """How many images one process has of a batch, and of an epoch's last one."""
    whole = min(config.batch_size, images)
    last = images % whole or whole
    return math.ceil(whole / config.processes), math.ceil(last / config.processes)


class Loader:
    """Training batches of one epoch after another: `begin`, then iterate.

    The length is the number of batches in a whole epoch.
    """

    def __init__(self, images: Images, batches: Batches, config: Config, runtime: Runtime) -> None:
        self._batches = batches
        persistent = runtime.loader_workers > 0
        self._loader = _data_loader(images, batches, config, runtime, persistent_workers=persistent)

    def begin(self, epoch: int, first_batch: int = 0) -> None:
        """Go to a batch of an epoch; those before it are not loaded.

        Raises:
            ValueError: if the epoch has no such batch (one past the last is allowed).
        """
        if not 0 <= first_batch <= len(self):
            raise ValueError(f"first_batch must be between 0 and {len(self)}, got {first_batch}")
        self._batches.epoch, self._batches.first_batch = epoch, first_batch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._loader)


def train_loader(
    data: Data, config: Config, runtime: Runtime, rank: int = 0, processes: int = 1
) -> Loader:
    """The training batches, or one process's slices of them; it stands at epoch 0, batch 0."""
    batches = Batches(len(data.train), config, rank, processes)
    return Loader(data.train, batches, config, runtime)


def test_loader(
    images: Images,
    config: Config,
    runtime: Runtime,
    rank: int = 0,  # noqa: PT028  (no test, in spite of the function's name)
    processes: int = 1,  # noqa: PT028
) -> Iterable[tuple[Tensor, Tensor]]:
    """Every test image once, in their order; of several processes, each has every n-th.

    The batches are four times as large as in training: there are no gradients to hold.
    """
    draws = [(0, index) for index in range(rank, len(images), processes)]
    size = 4 * max(1, config.batch_size // processes)
    batches = [draws[first : first + size] for first in range(0, len(draws), size)]
    return _data_loader(images, batches, config, runtime)


test_loader.__test__ = False  # type: ignore[attr-defined]  # pytest takes the name for a test


def _data_loader(
    images: Any, batches: Any, config: Config, runtime: Runtime, **options: Any
) -> DataLoader[Any]:
    return DataLoader(
        images,
        batch_sampler=batches,
        collate_fn=_as_is,
        num_workers=runtime.loader_workers,
        pin_memory=config.accelerator != "cpu" and torch.cuda.is_available(),
        worker_init_fn=_leave_signals,
        generator=torch.Generator(),  # else it draws from the global one, which makes masks
        **options,
    )


def _as_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def _leave_signals(worker: int) -> None:
    """Keep a stop from killing the loading processes before the training one has heeded it.

    Signals to a whole process group (Ctrl-C, `timeout`) do not reach them in a group of their
    own, and those that schedulers send to every process are ignored. SIGTERM itself must go on
    working: by it Python ends its workers; when the training process is gone, they end too.
    """
    os.setpgrp()
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
