"""How far a map spreads: its entropy, and the boxes that it touches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

THRESHOLD = 0.2  # of a map's largest value

Box = tuple[int, int, int]  # top, left and side, in pixels
Boxes = Sequence[Sequence[Box]]


def entropies(maps: Tensor) -> Tensor:
    """The entropy of each map (n, h, w), as a share of that of a map that is the same everywhere.

    Example:
        >>> one, half, even = torch.zeros(4, 4), torch.ones(4, 4), torch.ones(4, 4)
        >>> one[1, 2], half[:2] = 7.0, 0.0
        >>> entropies(torch.stack([one, half, even]))
        tensor([0.0000, 0.7500, 1.0000], dtype=torch.float64)

    Returns:
        (n,), NaN for a map that is zero everywhere.

    Raises:
        ValueError: for maps of a single place, and for values that are negative or not finite.
    """
    _check_maps(maps)
    places = maps.shape[1] * maps.shape[2]
    if places == 1:
        raise ValueError("a map of 1x1 has no spread: name a layer (--layer) with a larger map")
    flat = maps.double().flatten(1)
    shares = flat / flat.sum(1, keepdim=True)  # 0 / 0 is NaN
    return torch.special.entr(shares).sum(1) / math.log(places)


def touched(
    maps: Tensor, boxes: Boxes, size: tuple[int, int], threshold: float = THRESHOLD
) -> list[list[bool]]:
    """For each box of each image, whether its map touches it; see the module.

    Example:
        >>> left = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
        >>> touched(left, [[(0, 0, 4), (2, 6, 2)]], size=(8, 8))
        [[True, False]]

    Args:
        maps: (n, h, w).
        boxes: for each map at least one of (top, left, side), in pixels of the image.
        size: height and width of the images.
        threshold: the least mean in a box, as a share of the map's largest value.

    Raises:
        ValueError: for images without boxes, and boxes that are not in the image.
    """
    _check_maps(maps)
    if len(boxes) != len(maps):
        raise ValueError(f"there must be boxes for each of {len(maps)} images, got {len(boxes)}")
    large = interpolate(maps[:, None].double(), size, mode="bilinear", align_corners=False)[:, 0]
    found = []
    for number, (map_, of_one) in enumerate(zip(large, boxes, strict=True)):
        _check_boxes(number, of_one, size)
        least = threshold * maps[number].max().item()
        means = [map_[top : top + side, left : left + side].mean() for top, left, side in of_one]
        found.append([least > 0 and mean.item() >= least for mean in means])
    return found


def _check_maps(maps: Tensor) -> None:
    if maps.ndim != 3 or not bool(maps.isfinite().all()) or bool((maps < 0).any()):
        raise ValueError(
            f"maps must be (n, h, w) of numbers that are 0 or more, got {tuple(maps.shape)}"
        )


def _check_boxes(number: int, boxes: Sequence[Box], size: tuple[int, int]) -> None:
    if not boxes:
        raise ValueError(f"image {number} has no box")
    for top, left, side in boxes:
        inside = min(top, left) >= 0 and top + side <= size[0] and left + side <= size[1]
        if side < 1 or not inside:
            raise ValueError(
                f"image {number}: the box {(top, left, side)} (top, left, side) is not in the "
                f"image of {size[0]}x{size[1]}"
            )
