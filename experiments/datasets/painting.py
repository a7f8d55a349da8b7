"""How a canvas is made: digits and clutter are drawn, painted, and hidden again.

Digits are enlarged bilinearly from 8x8, and lie in boxes that do not overlap. Clutter is patches
cut from enlarged digits, anywhere. Where things meet, the brighter pixel counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Generator, Tensor
from torch.nn.functional import interpolate

COPIES = 3
SIDES = range(14, 25)
OCCLUDERS = (0.75, 1.0, 1.5)
GRAY = 128

Numbers = NDArray[np.int64]
Digits = Sequence[Numbers]
"""Numbers of scikit-learn's digits, class by class."""


@dataclass(frozen=True)
class Clutter:
    """How many patches, and the sides that they may have, in pixels."""

    count: int
    sides: range


@cache
def scikit_digits() -> Any:
    """What scikit-learn reads from its file: images, values 0 to 16, and target."""
    return load_digits()


def draw_digits(numbers: Numbers, size: int, generator: Generator) -> Numbers:
    """Three different ones of the numbers, with their boxes."""
    chosen = numbers[torch.randperm(len(numbers), generator=generator)[:COPIES].numpy()]
    sides = _draw_sides(SIDES, COPIES, generator)
    return np.column_stack([chosen, draw_boxes(sides.tolist(), size, generator)])


def _draw_sides(among: range, count: int, generator: Generator) -> Numbers:
    return torch.randint(among[0], among[-1] + 1, (count,), generator=generator).numpy()


def draw_boxes(sides: list[int], size: int, generator: Generator) -> list[tuple[int, int, int]]:
    """Top, left and side of squares that do not overlap.

    Each is as likely at every place that those before it leave; if they leave none, all are
    drawn again.
    """
    while True:
        placed: list[tuple[int, int, int]] = []
        for side in sides:
            free = np.ones((size - side + 1, size - side + 1), dtype=bool)
            for top, left, taken in placed:
                rows = slice(max(0, top - side + 1), top + taken)
                free[rows, max(0, left - side + 1) : left + taken] = False
            places = np.flatnonzero(free)
            if not len(places):
                break
            drawn = torch.randint(len(places), (1,), generator=generator).item()
            top, left = divmod(int(places[int(drawn)]), len(free))
            placed.append((top, left, side))
        else:
            return placed


def draw_clutter(digits: Digits, kind: Clutter, size: int, generator: Generator) -> Numbers:
    """Patches of digits of any class, cut and put anywhere."""
    every = np.concatenate(digits)
    numbers = every[torch.randint(len(every), (kind.count,), generator=generator).numpy()]
    enlarged, sides = (_draw_sides(among, kind.count, generator) for among in (SIDES, kind.sides))
    within = torch.rand(4, kind.count, generator=generator, dtype=torch.float64).numpy()
    rooms = np.stack([enlarged - sides, enlarged - sides, size - sides, size - sides]) + 1
    cut_top, cut_left, top, left = (within * rooms).astype(np.int64)
    return np.column_stack([numbers, enlarged, cut_top, cut_left, sides, top, left])


def paint(digits: Numbers, clutter: Numbers, size: int) -> NDArray[np.uint8]:
    """One canvas (size, size), black where nothing is; elsewhere the brightest of what is there.

    Args:
        digits: (3, 4), as in `canvas.Canvases`.
        clutter: (patches, 7), as in `canvas.Canvases`.
        size: side of the canvas, in pixels.
    """
    canvas = np.zeros((size, size), dtype=np.uint8)
    table = enlarged_digits()
    for number, top, left, side in digits.tolist():
        place = canvas[top : top + side, left : left + side]
        np.maximum(place, table[side][number], out=place)
    for number, enlarged, cut_top, cut_left, side, top, left in clutter.tolist():
        patch = table[enlarged][number, cut_top : cut_top + side, cut_left : cut_left + side]
        place = canvas[top : top + side, left : left + side]
        np.maximum(place, patch, out=place)
    return canvas


@cache
def enlarged_digits() -> dict[int, NDArray[np.uint8]]:
    """Side -> all digits (1797, side, side), enlarged bilinearly to it."""
    images = torch.from_numpy(scikit_digits().images).div(16).unsqueeze(1)
    table: dict[int, NDArray[np.uint8]] = {}
    for side in SIDES:
        large = interpolate(images, (side, side), mode="bilinear", align_corners=False)
        table[side] = large[:, 0].mul(255).round().to(torch.uint8).numpy()
    return table


def occluders(boxes: Tensor) -> Tensor:
    """The squares that hide digits: (n, 3, 3) of top, left and side.

    Each has the middle of its digit's box. Its side is .75, 1 or 1.5 times that of the box: in
    each image each of the three, and which digit has which goes round with the image's number.
    The largest may leave the canvas, and hide some of another digit.

    Args:
        boxes: (n, 3, 3) of top, left and side of the digits.

    Example:
        >>> occluders(torch.tensor([[[0, 0, 16], [0, 30, 16], [30, 0, 16]]]))[0].tolist()
        [[2, 2, 12], [0, 30, 16], [26, -4, 24]]
    """
    order = torch.arange(len(boxes)).unsqueeze(1) + torch.arange(COPIES)
    factors = torch.tensor(OCCLUDERS, dtype=torch.float64)[order % len(OCCLUDERS)]
    sides = (boxes[..., 2] * factors).round().long()
    corners = boxes[..., :2] + ((boxes[..., 2] - sides) // 2).unsqueeze(-1)
    return torch.cat([corners, sides.unsqueeze(-1)], dim=-1)


def occlude(images: Tensor, boxes: Tensor) -> Tensor:
    """Each image three times: image 3 n + d is image n with its digit d behind mid-gray."""
    hidden = images.repeat_interleave(COPIES, dim=0)
    pixels = hidden.numpy()  # of the same memory
    squares = occluders(boxes).flatten(0, 1).tolist()
    for image, (top, left, side) in zip(pixels, squares, strict=True):
        image[:, max(0, top) : top + side, max(0, left) : left + side] = GRAY
    return hidden
