"""scikit-learn's digits on a canvas: three of one class, at random places and scales, in clutter.

Each image shows three different handwritings of the class that is its label, enlarged bilinearly
from 8x8 to a random side, apart from each other, and patches cut from enlarged digits of any
class; where they meet, the brighter pixel counts. So what tells the class is there three times,
and at three places. This follows the cluttered digits of Mnih et al. 2014, "Recurrent models of
visual attention" (NIPS), and Jaderberg et al. 2015, "Spatial transformer networks" (NIPS), which
have one digit in an image.

No digit is in two splits, its pieces in the clutter included. The digits of the test, a third of
each class, are the same for all seeds, and so are its images; from the other two thirds, a run's
seed draws those for training and for validation. One person may have written digits of several
splits: the data name no writers.

Image `number` of a split depends on the split's digits and on its number, not on how many images
are made. What is made is kept for the runs to come in the process: it must not be changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from experiments.datasets.painting import (
    COPIES,
    SIDES,
    Clutter,
    Digits,
    Numbers,
    draw_clutter,
    draw_digits,
    occlude,
    paint,
    scikit_digits,
)
from experiments.seeds import own_generator

CLASSES = 10
SIZE = 64
DEFAULT_IMAGES, MOST_IMAGES, TEST_IMAGES = 2000, 100_000, 1000
CHANGED = ("occluded", "clutter")  # the changed tests that are canvas' own
LEAST_SIZE = 2 * SIDES[-1]  # one row less, and not even two of the largest digits are sure to fit
CLUTTER = Clutter(6, range(8, 9))
OTHER_CLUTTER = Clutter(16, range(4, 13))


@dataclass(frozen=True)
class Canvases:
    """Images of one split, and how they were made.

    Args:
        images: (n, 1, size, size), bytes.
        labels: (n,).
        digits: (n, 3, 4): number of a digit in scikit-learn's data, top, left and side of its box.
        clutter: (n, patches, 7): number of a digit, the side it was enlarged to, top and left
            of the patch in it, side of the patch, top and left on the canvas.
    """

    images: Tensor
    labels: Tensor
    digits: Numbers
    clutter: Numbers


def boxes(size: int = SIZE) -> Tensor:
    """Where the digits of the test images are: (1000, 3, 3) of top, left and side, in pixels.

    They are at the same places in the noisy images and among other clutter. Image 3 n + d of the
    occluded ones is image n, with its digit d hidden behind `painting.occluders(boxes())[n, d]`.

    Args:
        size: side of the canvas.

    Example:
        >>> boxes().shape
        torch.Size([1000, 3, 3])
    """
    return torch.from_numpy(tested_canvases(size).digits[:, :, 1:].copy())


def split_digits(seed: int, validation: float) -> dict[str, list[Numbers]]:
    """The digits of the splits train, validation and test, class by class.

    Args:
        seed: draws validation and training digits; the test has the same for all.
        validation: share of each class's digits outside of the test, rounded to a count.
    """
    splits: dict[str, list[Numbers]] = {"train": [], "validation": [], "test": []}
    targets = scikit_digits().target
    for label in range(CLASSES):
        numbers = _shuffled(np.flatnonzero(targets == label), 0, f"canvas test digits/{label}")
        test, rest = np.split(numbers, [round(len(numbers) / 3)])
        rest = _shuffled(np.sort(rest), seed, f"canvas validation digits/{label}")
        held_out, train = np.split(rest, [round(validation * len(rest))])
        for split, part in zip(splits, (train, held_out, test), strict=True):
            splits[split].append(np.sort(part))
    return splits


def _shuffled(numbers: Numbers, seed: int, purpose: str) -> Numbers:
    return numbers[torch.randperm(len(numbers), generator=own_generator(seed, purpose)).numpy()]


@lru_cache(maxsize=8)
def training_canvases(
    seed: int, count: int, validation: float, size: int
) -> tuple[Canvases, Canvases | None]:
    """The images of a seed to train on, and those to choose by, if any.

    Args:
        seed: decides which digits are in which of both, and all images.
        count: of the images of both together.
        validation: share of the images, and of the digits outside of the test, to choose by.
        size: side of the canvas, in pixels.

    Raises:
        ValueError: if a class would lack digits or images, a digit its place, or there are too
            many images.
    """
    _check(count, validation, size)
    splits = split_digits(seed, validation)
    held_out = round(validation * count)
    train = compose("train", splits["train"], count - held_out, size, seed)
    if not held_out:
        return train, None
    return train, compose("validation", splits["validation"], held_out, size, seed)


@lru_cache(maxsize=2)
def tested_canvases(size: int) -> Canvases:
    """The 1,000 images of the test, 100 of each class, whatever the seed of a run."""
    _check_size(size)
    return compose("test", split_digits(0, 0.0)["test"], TEST_IMAGES, size)


@lru_cache(maxsize=2)
def changed_canvases(size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Images and labels of the changed tests.

    - occluded: each test image three times, each time with another of its digits hidden
    - clutter: the same digits at the same places among other patches: 16 of 4 to 12 pixels
    """
    test = tested_canvases(size)
    digits = split_digits(0, 0.0)["test"]
    cluttered = np.empty_like(test.images.numpy())
    for number, shown in enumerate(test.digits):
        generator = own_generator(0, f"canvas/other clutter/{number}")
        clutter = draw_clutter(digits, OTHER_CLUTTER, size, generator)
        cluttered[number, 0] = paint(shown, clutter, size)
    return {
        "occluded": (occlude(test.images, boxes(size)), test.labels.repeat_interleave(COPIES)),
        "clutter": (torch.from_numpy(cluttered), test.labels),
    }


def compose(split: str, digits: Digits, count: int, size: int, seed: int = 0) -> Canvases:
    """The first `count` images of a split; image n shows the class n modulo 10."""
    images = np.empty((count, 1, size, size), dtype=np.uint8)
    shown = np.empty((count, COPIES, 4), dtype=np.int64)
    clutter = np.empty((count, CLUTTER.count, 7), dtype=np.int64)
    for number in range(count):
        generator = own_generator(seed, f"canvas/{split}/{number}")
        shown[number] = draw_digits(digits[number % CLASSES], size, generator)
        clutter[number] = draw_clutter(digits, CLUTTER, size, generator)
        images[number, 0] = paint(shown[number], clutter[number], size)
    return Canvases(torch.from_numpy(images), torch.arange(count) % CLASSES, shown, clutter)


def _check(count: int, validation: float, size: int) -> None:
    _check_size(size)
    least = CLASSES * (2 if validation else 1)
    if not least <= count <= MOST_IMAGES:
        parts = ", for training and for validation" if validation else ""
        raise ValueError(
            f"train_images must be between {least} (one of each class{parts}) and {MOST_IMAGES} "
            f"for canvas, got {count}"
        )
    rest = min(map(len, split_digits(0, 0.0)["train"]))
    low = math.ceil(1000 * max(COPIES / rest, CLASSES / count)) / 1000
    high = round(1 - low, 3)
    if validation and not low <= validation <= high:
        raise ValueError(
            f"validation must be 0, or between {low:g} and {high:g} for {count} images of "
            f"canvas, so that each class has {COPIES} digits and an image in both parts, "
            f"got {validation:g}"
        )


def _check_size(size: int) -> None:
    if size < LEAST_SIZE:
        raise ValueError(
            f"image_size must be at least {LEAST_SIZE} for canvas, or {COPIES} digits of "
            f"{SIDES[-1]} pixels may not fit beside each other, got {size}"
        )
