"""Three of scikit-learn's digits, all of the same class, on a canvas with clutter.

Each image shows three handwritings of its class, enlarged from 8x8 to a random side, apart from
each other, and patches cut from enlarged digits of any class. Where things meet, the brighter
pixel counts. So the evidence for the class is there three times. This follows the cluttered digits
of Mnih et al. 2014, "Recurrent models of visual attention", which have one digit in an image.

No digit is in two splits. A third of each class is for the tests, the same for all seeds. The seed
of a run draws training and validation from the rest, and all images.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Generator, Tensor
from torch.nn.functional import interpolate

from experiments.data import Data, Tensors
from experiments.data.digits import tests_of
from experiments.seeds import own_generator

CLASSES, COPIES, TEST_IMAGES, SIZE = 10, 3, 1000, 64
SIDES = range(14, 25)  # of an enlarged digit, in pixels
CLUTTER = 6, range(8, 9)  # number of patches, and their sides
OTHER_CLUTTER = 16, range(4, 13)
OCCLUDERS = (0.75, 1.0, 1.5)  # sides of the squares that hide digits, as shares of the digit's box
GRAY = 128

Numbers = NDArray[np.int64]


def canvas(seed: int, train_images: int = 2000, validation: float = 0.0) -> Data:
    """Images to train on and four tests, all made by the seed.

    The tests are clean, occluded (each image three times, with another of its digits hidden),
    noisy, and clutter (other patches).

    Args:
        seed: decides which digits are in training and validation, and all their images.
        train_images: images for training and validation together.
        validation: share of the images, and of the digits outside of the test, for a search.

    Raises:
        ValueError: if a class would lack digits or images.
    """
    digits, held = split_digits(seed, validation), round(validation * train_images)
    fewest = min(
        len(numbers) for part in ("train", "validation") for numbers in digits[part] or [[]]
    )
    if train_images - held < CLASSES or (validation and (held < CLASSES or fewest < COPIES)):
        raise ValueError(
            f"each class of canvas needs {COPIES} digits and an image in training and in "
            f"validation, got train_images {train_images} and validation {validation:g}"
        )
    train, labels, _ = compose("train", digits["train"], train_images - held, seed)
    order = torch.randperm(len(labels), generator=own_generator(seed, "split"))
    parts = compose("validation", digits["validation"], held, seed) if held else None
    return Data(
        Tensors(train[order], labels[order]),
        _tests(seed),
        None if parts is None else Tensors(*parts[:2]),
        classes=CLASSES,
    )


@lru_cache(maxsize=1)
def _tests(seed: int) -> dict[str, Tensors]:
    images, labels, boxes = clean_canvases(seed)
    numbers = [seed * TEST_IMAGES + number for number in range(TEST_IMAGES)]
    noisy = tests_of(images.float().mul(1 / 255), labels, numbers, noise=0.25)
    digits = split_digits(0, 0.0)["test"]
    cluttered = torch.empty_like(images)
    for number, shown in enumerate(boxes):
        generator = own_generator(seed, f"canvas/other clutter/{number}")
        patches = _draw_clutter(digits, OTHER_CLUTTER, generator)
        cluttered[number, 0] = torch.from_numpy(_paint(shown, patches))
    hidden = occluded(images, torch.from_numpy(boxes[:, :, 1:]))
    return {
        "clean": Tensors(images, labels),
        "occluded": Tensors(hidden, labels.repeat_interleave(COPIES)),
        "noisy": noisy["noisy"],
        "clutter": Tensors(cluttered, labels),
    }


def clean_canvases(seed: int = 0) -> tuple[Tensor, Tensor, Numbers]:
    """The 1,000 images of a test, their labels, and their digits with top, left and side."""
    return compose("test", split_digits(0, 0.0)["test"], TEST_IMAGES, seed)


_scikit_digits = cache(load_digits)


def split_digits(seed: int, validation: float) -> dict[str, list[Numbers]]:
    """The numbers of the digits in train, validation and test, class by class.

    Args:
        seed: draws validation and training digits; the test has the same for all.
        validation: share of each class's digits outside of the test.
    """
    splits: dict[str, list[Numbers]] = {"train": [], "validation": [], "test": []}
    for label in range(CLASSES):
        numbers = np.flatnonzero(_scikit_digits().target == label)
        numbers = _shuffled(numbers, 0, f"canvas test digits/{label}")
        test, rest = np.split(numbers, [round(len(numbers) / 3)])
        rest = _shuffled(np.sort(rest), seed, f"canvas validation digits/{label}")
        held, train = np.split(rest, [round(validation * len(rest))])
        for split, part in zip(splits, (train, held, test), strict=True):
            splits[split].append(np.sort(part))
    return splits


def _shuffled(numbers: Numbers, seed: int, purpose: str) -> Numbers:
    return numbers[torch.randperm(len(numbers), generator=own_generator(seed, purpose)).numpy()]


def compose(
    split: str, digits: Sequence[Numbers], count: int, seed: int = 0
) -> tuple[Tensor, Tensor, Numbers]:
    """The first images of a split, bytes (count, 1, 64, 64), their labels and digits.

    Image n shows the class n modulo 10. It depends on n, not on how many images are made.
    """
    images = np.empty((count, 1, SIZE, SIZE), dtype=np.uint8)
    shown = np.empty((count, COPIES, 4), dtype=np.int64)
    for number in range(count):
        generator = own_generator(seed, f"canvas/{split}/{number}")
        shown[number] = _draw_digits(digits[number % CLASSES], generator)
        patches = _draw_clutter(digits, CLUTTER, generator)
        images[number, 0] = _paint(shown[number], patches)
    return torch.from_numpy(images), torch.arange(count) % CLASSES, shown


def _draw_digits(numbers: Numbers, generator: Generator) -> Numbers:
    """Three of the numbers, each with top, left and side of its box; boxes do not overlap."""
    chosen = numbers[torch.randperm(len(numbers), generator=generator)[:COPIES].numpy()]
    sides = _draw_sides(SIDES, COPIES, generator).tolist()
    while True:  # until a place is left for each
        placed: list[tuple[int, int, int]] = []
        for side in sides:
            free = np.ones((SIZE - side + 1, SIZE - side + 1), dtype=bool)
            for top, left, taken in placed:
                rows = slice(max(0, top - side + 1), top + taken)
                free[rows, max(0, left - side + 1) : left + taken] = False
            places = np.flatnonzero(free)
            if not len(places):
                break
            drawn = int(torch.randint(len(places), (1,), generator=generator))
            placed.append((*divmod(int(places[drawn]), len(free)), side))
        else:
            return np.column_stack([chosen, placed])


def _draw_sides(among: range, count: int, generator: Generator) -> Numbers:
    return torch.randint(among[0], among[-1] + 1, (count,), generator=generator).numpy()


def _draw_clutter(
    digits: Sequence[Numbers], kind: tuple[int, range], generator: Generator
) -> Numbers:
    """Patches: digit, its side, top and left in it; side, top and left on the canvas."""
    count, among = kind
    every = np.concatenate(digits)
    numbers = every[torch.randint(len(every), (count,), generator=generator).numpy()]
    enlarged, sides = (_draw_sides(one, count, generator) for one in (SIDES, among))
    within = torch.rand(4, count, generator=generator, dtype=torch.float64).numpy()
    rooms = np.stack([enlarged - sides, enlarged - sides, SIZE - sides, SIZE - sides]) + 1
    cut_top, cut_left, top, left = (within * rooms).astype(np.int64)
    return np.column_stack([numbers, enlarged, cut_top, cut_left, sides, top, left])


def _paint(digits: Numbers, clutter: Numbers) -> NDArray[np.uint8]:
    """One canvas (64, 64): black, and where digits and patches meet, the brighter pixel."""
    made = np.zeros((SIZE, SIZE), dtype=np.uint8)
    table = _enlarged_digits()
    for number, top, left, side in digits.tolist():
        place = made[top : top + side, left : left + side]
        np.maximum(place, table[side][number], out=place)
    for number, enlarged, cut_top, cut_left, side, top, left in clutter.tolist():
        patch = table[enlarged][number, cut_top : cut_top + side, cut_left : cut_left + side]
        place = made[top : top + side, left : left + side]
        np.maximum(place, patch, out=place)
    return made


@cache
def _enlarged_digits() -> dict[int, NDArray[np.uint8]]:
    """Side -> all digits (1797, side, side), enlarged bilinearly to it."""
    images = torch.from_numpy(_scikit_digits().images).div(16).unsqueeze(1)
    table = {}
    for side in SIDES:
        large = interpolate(images, (side, side), mode="bilinear", align_corners=False)
        table[side] = large[:, 0].mul(255).round().to(torch.uint8).numpy()
    return table


def occluders(boxes: Tensor) -> Tensor:
    """The squares that hide digits: (n, 3, 3) of top, left and side.

    Each is in the middle of its digit's box. Its side is 0.75, 1 or 1.5 times the side of the box,
    in turn with the number of the image. The largest may leave the canvas.

    Example:
        >>> occluders(torch.tensor([[[0, 0, 16], [0, 30, 16], [30, 0, 16]]]))[0].tolist()
        [[2, 2, 12], [0, 30, 16], [26, -4, 24]]
    """
    order = torch.arange(len(boxes)).unsqueeze(1) + torch.arange(COPIES)
    factors = torch.tensor(OCCLUDERS, dtype=torch.float64)[order % len(OCCLUDERS)]
    sides = (boxes[..., 2] * factors).round().long()
    corners = boxes[..., :2] + ((boxes[..., 2] - sides) // 2).unsqueeze(-1)
    return torch.cat([corners, sides.unsqueeze(-1)], dim=-1)


def occluded(images: Tensor, boxes: Tensor) -> Tensor:
    """Each image three times: image 3 n + d is image n with its digit d behind mid-gray."""
    hidden = images.repeat_interleave(COPIES, dim=0)
    squares = occluders(boxes).flatten(0, 1).tolist()
    for image, (top, left, side) in zip(hidden, squares, strict=True):
        image[:, max(0, top) : top + side, max(0, left) : left + side] = GRAY
    return hidden
