"""Three of scikit-learn's digits, all of the same class, on a canvas with clutter.

Each image shows three handwritings of its class, enlarged from 8x8 to a random side, apart from
each other. It also shows patches cut from enlarged digits of any class. Where digits and patches
meet, the brighter pixel counts. So the evidence for the class is there three times. This follows
the cluttered digits of Mnih et al. 2014, "Recurrent models of visual attention", which have one
digit in an image.

No digit is in two splits. A third of each class is for the tests, the same for all seeds. The seed
of a run draws training and validation from the rest, and all images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Generator, Tensor
from torch.nn.functional import interpolate

from experiments.data import Data, Tensors
from experiments.data.digits import tests_of
from experiments.seeds import own_generator

CLASSES = 10
COPIES = 3  # digits in an image
TEST_IMAGES = 1000
SIZE = 64  # the side of an image, in pixels
SIDES = range(14, 25)  # the sides of enlarged digits, in pixels
OCCLUDERS = (0.75, 1.0, 1.5)  # sides of the squares that hide digits, as shares of the digit's box
GRAY = 128

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Clutter:
    """The patches of an image: their number, and their sides in pixels."""

    count: int
    sides: range


CLUTTER = Clutter(6, range(8, 9))
OTHER_CLUTTER = Clutter(16, range(4, 13))


class Canvases(NamedTuple):
    """Images with their contents.

    Attributes:
        images: bytes (count, 1, 64, 64).
        labels: (count,).
        digits: (count, 3, 4): number of the digit, and top, left and side of its box.
    """

    images: Tensor
    labels: Tensor
    digits: Numbers


class Box(NamedTuple):
    """A square on the canvas, in pixels."""

    top: int
    left: int
    side: int


def canvas(seed: int, train_images: int = 2000, validation: float = 0.0) -> Data:
    """Make images to train on and four tests, all from the seed.

    The tests are ``clean``, ``occluded``, ``noisy`` and ``clutter``. In ``occluded`` each image
    comes three times, each time with another digit hidden. ``clutter`` has other patches.

    Args:
        seed: decides which digits are in training and validation, and all their images.
        train_images: images for training and validation together.
        validation: share of the images, and of the digits outside of the test, for a search.

    Raises:
        ValueError: if a class would lack digits or images.
    """
    digits = split_digits(seed, validation)
    held = round(validation * train_images)
    kept = train_images - held
    fewest_digits = min(len(numbers) for numbers in digits["train"] + digits["validation"])

    is_possible = kept >= CLASSES
    if validation:
        is_possible = is_possible and held >= CLASSES and fewest_digits >= COPIES
    if not is_possible:
        raise ValueError(
            f"each class of canvas needs {COPIES} digits and an image in training and in "
            f"validation, got train_images {train_images} and validation {validation:g}"
        )

    train = compose("train", digits["train"], kept, seed)
    order = torch.randperm(kept, generator=own_generator(seed, "split"))
    validation_set = None
    if held:
        canvases = compose("validation", digits["validation"], held, seed)
        validation_set = Tensors(canvases.images, canvases.labels)

    return Data(
        train=Tensors(train.images[order], train.labels[order]),
        tests=_tests(seed),
        validation=validation_set,
        classes=CLASSES,
    )


@lru_cache(maxsize=1)
def _tests(seed: int) -> dict[str, Tensors]:
    """Return the tests of a seed, of the same images."""
    clean = clean_canvases(seed)
    labels = clean.labels

    boxes = torch.from_numpy(clean.digits[:, :, 1:])
    hidden = occluded(clean.images, boxes)
    labels_of_hidden = labels.repeat_interleave(COPIES)

    first = seed * TEST_IMAGES
    numbers = list(range(first, first + TEST_IMAGES))  # each image of each seed has its own noise
    shades = clean.images.float().mul(1 / 255)
    damaged = tests_of(shades, labels, numbers, noise=0.25)

    cluttered = _with_other_clutter(clean, seed)
    return {
        "clean": Tensors(clean.images, labels),
        "occluded": Tensors(hidden, labels_of_hidden),
        "noisy": damaged["noisy"],
        "clutter": Tensors(cluttered, labels),
    }


def _with_other_clutter(canvases: Canvases, seed: int) -> Tensor:
    """Return the images again, with more patches of other sizes."""
    digits = split_digits(0, 0.0)["test"]
    images = torch.empty_like(canvases.images)
    for number, shown in enumerate(canvases.digits):
        generator = own_generator(seed, f"canvas/other clutter/{number}")
        patches = _draw_clutter(digits, OTHER_CLUTTER, generator)
        image = _paint(shown, patches)
        images[number, 0] = torch.from_numpy(image)
    return images


def clean_canvases(seed: int = 0) -> Canvases:
    """Return the 1,000 images of a test."""
    return compose("test", split_digits(0, 0.0)["test"], TEST_IMAGES, seed)


_scikit_digits = cache(load_digits)


def split_digits(seed: int, validation: float) -> dict[str, list[Numbers]]:
    """Return the numbers of the digits in train, validation and test, class by class.

    Args:
        seed: draws validation and training digits; the test digits are the same for all seeds.
        validation: share of each class's digits outside of the test.
    """
    splits: dict[str, list[Numbers]] = {
        "train": [],
        "validation": [],
        "test": [],
    }
    for label in range(CLASSES):
        numbers = np.flatnonzero(_scikit_digits().target == label)
        numbers = _shuffled(numbers, 0, f"canvas test digits/{label}")
        tests = round(len(numbers) / 3)

        others = np.sort(numbers[tests:])
        others = _shuffled(others, seed, f"canvas validation digits/{label}")
        held = round(validation * len(others))

        splits["train"].append(np.sort(others[held:]))
        splits["validation"].append(np.sort(others[:held]))
        splits["test"].append(np.sort(numbers[:tests]))
    return splits


def _shuffled(numbers: Numbers, seed: int, purpose: str) -> Numbers:
    """Return the numbers in random order, which follows from the seed and the purpose."""
    order = torch.randperm(len(numbers), generator=own_generator(seed, purpose))
    return numbers[order.numpy()]


def compose(split: str, digits: Sequence[Numbers], count: int, seed: int = 0) -> Canvases:
    """Return the first images of a split.

    Image n shows the class n modulo 10. It depends on n, not on how many images are made.
    """
    images = np.empty((count, 1, SIZE, SIZE), dtype=np.uint8)
    shown = np.empty((count, COPIES, 4), dtype=np.int64)
    for number in range(count):
        generator = own_generator(seed, f"canvas/{split}/{number}")
        shown[number] = _draw_digits(digits[number % CLASSES], generator)
        patches = _draw_clutter(digits, CLUTTER, generator)
        images[number, 0] = _paint(shown[number], patches)

    labels = torch.arange(count) % CLASSES
    return Canvases(torch.from_numpy(images), labels, shown)


def _draw_digits(numbers: Numbers, generator: Generator) -> Numbers:
    """Draw three of the numbers, with top, left and side of boxes that do not overlap."""
    order = torch.randperm(len(numbers), generator=generator)
    chosen = numbers[order[:COPIES].numpy()]
    sides = _draw_sides(SIDES, COPIES, generator).tolist()

    boxes = None
    while boxes is None:
        boxes = _draw_boxes(sides, generator)
    return np.column_stack([chosen, boxes])


def _draw_boxes(sides: Sequence[int], generator: Generator) -> list[Box] | None:
    """Draw a box for each side, apart from the others; None if there is no more place."""
    boxes: list[Box] = []
    for side in sides:
        free = _free_corners(side, boxes)
        places = np.flatnonzero(free)
        if len(places) == 0:
            return None

        drawn = torch.randint(len(places), (1,), generator=generator)
        place = int(places[int(drawn)])
        top, left = divmod(place, len(free))
        boxes.append(Box(top, left, side))
    return boxes


def _free_corners(side: int, boxes: Sequence[Box]) -> NDArray[np.bool_]:
    """Return a mask of the places for the upper left corner of another box: (rows, columns)."""
    corners = SIZE - side + 1
    free = np.ones((corners, corners), dtype=bool)
    for box in boxes:
        rows = slice(max(0, box.top - side + 1), box.top + box.side)
        columns = slice(max(0, box.left - side + 1), box.left + box.side)
        free[rows, columns] = False
    return free


def _draw_sides(among: range, count: int, generator: Generator) -> Numbers:
    """Draw sides in pixels, all equally likely."""
    sides = torch.randint(among.start, among.stop, (count,), generator=generator)
    return sides.numpy()


def _draw_clutter(digits: Sequence[Numbers], clutter: Clutter, generator: Generator) -> Numbers:
    """Draw patches of enlarged digits.

    The columns are the number of the digit and its enlarged side, the top and left of the patch in
    this digit, and the side, top and left of the patch on the canvas.
    """
    count = clutter.count
    every = np.concatenate(digits)
    drawn = torch.randint(len(every), (count,), generator=generator).numpy()
    enlarged = _draw_sides(SIDES, count, generator)
    sides = _draw_sides(clutter.sides, count, generator)
    shares = torch.rand(4, count, generator=generator, dtype=torch.float64).numpy()

    in_digit = enlarged - sides + 1  # places in one direction
    on_canvas = SIZE - sides + 1
    places = shares * np.stack([in_digit, in_digit, on_canvas, on_canvas])
    cut_top, cut_left, top, left = places.astype(np.int64)
    columns = [every[drawn], enlarged, cut_top, cut_left, sides, top, left]
    return np.column_stack(columns)


def _paint(digits: Numbers, clutter: Numbers) -> NDArray[np.uint8]:
    """Paint a canvas (64, 64): black, and where digits and patches meet, the brighter pixel."""
    image = np.zeros((SIZE, SIZE), dtype=np.uint8)
    table = _enlarged_digits()

    for number, top, left, side in digits.tolist():
        place = image[top : top + side, left : left + side]
        np.maximum(place, table[side][number], out=place)

    for number, enlarged, cut_top, cut_left, side, top, left in clutter.tolist():
        digit = table[enlarged][number]
        patch = digit[cut_top : cut_top + side, cut_left : cut_left + side]
        place = image[top : top + side, left : left + side]
        np.maximum(place, patch, out=place)
    return image


@cache
def _enlarged_digits() -> dict[int, NDArray[np.uint8]]:
    """Return side -> all digits (1797, side, side), enlarged bilinearly to it."""
    images = torch.from_numpy(_scikit_digits().images).div(16).unsqueeze(1)
    table = {}
    for side in SIDES:
        large = interpolate(images, (side, side), mode="bilinear", align_corners=False)
        gray = large[:, 0].mul(255).round()
        table[side] = gray.to(torch.uint8).numpy()
    return table


def occluders(boxes: Tensor) -> Tensor:
    """Return the squares that hide digits: (n, 3, 3) of top, left and side.

    Each is in the middle of its digit's box. Its side is 0.75, 1 or 1.5 times the side of the box,
    in turn with the number of the image. The largest may leave the canvas.

    Example:
        >>> occluders(torch.tensor([[[0, 0, 16], [0, 30, 16], [30, 0, 16]]]))[0].tolist()
        [[2, 2, 12], [0, 30, 16], [26, -4, 24]]
    """
    images = torch.arange(len(boxes)).unsqueeze(1)
    order = images + torch.arange(COPIES)
    factors = torch.tensor(OCCLUDERS, dtype=torch.float64)[order % len(OCCLUDERS)]

    box_sides = boxes[..., 2]
    sides = (box_sides * factors).round().long()
    margins = (box_sides - sides) // 2
    corners = boxes[..., :2] + margins.unsqueeze(-1)
    return torch.cat([corners, sides.unsqueeze(-1)], dim=-1)


def occluded(images: Tensor, boxes: Tensor) -> Tensor:
    """Return each image three times: image 3 n + d is image n with its digit d behind gray."""
    hidden = images.repeat_interleave(COPIES, dim=0)
    squares = occluders(boxes).flatten(0, 1).tolist()
    for image, (top, left, side) in zip(hidden, squares, strict=True):
        rows = slice(max(0, top), top + side)
        columns = slice(max(0, left), left + side)
        image[:, rows, columns] = GRAY
    return hidden
