"""Damaged copies of test images: a patch hidden, or noise added.

What is damaged depends on the number of the image alone, so all runs of all seeds are tested on
the same damage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from experiments.seeds import own_generator

Corruption = Callable[[Tensor, Sequence[int], float], Tensor]


def occlude(images: Tensor, numbers: Sequence[int], noise: float = 0.0) -> Tensor:
    """Hide a square of half the side, at a place of its own in each image, behind mid-gray.

    Args:
        images: (n, channels, side, side), values in [0, 1].
        numbers: of the images in their data set; each decides the place in its image.
        noise: not used.

    Example:
        >>> images = torch.zeros(1, 1, 8, 8)
        >>> occlude(images, [3]).sum() == 4 * 4 * 0.5
        tensor(True)
    """
    side = images.shape[-1]
    patch = side // 2
    hidden = images.clone()
    for image, number in zip(hidden, numbers, strict=True):
        generator = own_generator(number, "occluded")
        top, left = torch.randint(0, side - patch + 1, (2,), generator=generator).tolist()
        image[:, top : top + patch, left : left + patch] = 0.5
    return hidden


def add_noise(images: Tensor, numbers: Sequence[int], noise: float) -> Tensor:
    """Add Gaussian noise, and clip to [0, 1].

    Args:
        images: (n, channels, height, width), values in [0, 1].
        numbers: of the images in their data set; each decides the noise of its image.
        noise: standard deviation before clipping, in units of the range [0, 1].
    """
    drawn = [
        torch.randn(images.shape[1:], generator=own_generator(number, "noisy"))
        for number in numbers
    ]
    return (images + noise * torch.stack(drawn)).clamp(0, 1)


CORRUPTIONS: dict[str, Corruption] = {"occluded": occlude, "noisy": add_noise}
