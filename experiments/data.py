"""Training, validation and test images of a config.

Nothing here draws from torch's, numpy's or random's global generators: split and label noise
follow from the seed. `loaders` makes batches of the images.

    >>> data = load_data(Config(train_images=100), Path("data"))
    >>> len(data.train), list(data.tests)
    (100, ['clean', 'occluded', 'noisy'])
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from experiments.config import Config
from experiments.datasets.corruption import CORRUPTIONS
from experiments.datasets.images import Images, TestImages, TrainImages
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
