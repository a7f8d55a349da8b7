"""The 1,797 digits of scikit-learn, enlarged from 8x8: the default, which needs no download."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torchvision.transforms import v2

from experiments.data import Data, Tensors
from experiments.seeds import own_generator


def digits(
    seed: int,
    train_images: int = 1000,
    validation: float = 0.0,
    label_noise: float = 0.0,
    image_size: int = 32,
) -> Data:
    """Draw digits to train on by the seed; all other digits are the test.

    Args:
        seed: draws the split and the wrong labels.
        train_images: images for training and validation together, from 10 to 1,796.
        validation: share of these images for the validation set.
        label_noise: share of these labels that are wrong.
        image_size: side of the images in pixels.

    Raises:
        ValueError: if `train_images` or a share is outside its range.
    """
    source = load_digits()
    if not 10 <= train_images < len(source.target):
        raise ValueError(f"train_images must be from 10 to 1796, got {train_images}")
    _check_share("validation", validation)
    _check_share("label_noise", label_noise)

    images = torch.from_numpy(source.images).float().div(16).unsqueeze(1)
    images = v2.Resize((image_size, image_size))(images).clamp(0, 1)
    targets = torch.from_numpy(source.target).long()

    order = torch.randperm(len(targets), generator=own_generator(seed, "split"))
    chosen = order[:train_images]
    others = order[train_images:]
    chosen_images = images[chosen]
    chosen_labels = noisy_labels(targets[chosen], label_noise, own_generator(seed, "noise"))

    kept = train_images - round(validation * train_images)
    held = None
    if validation:
        held = Tensors(chosen_images[kept:], chosen_labels[kept:])
    return Data(
        train=Tensors(chosen_images[:kept], chosen_labels[:kept]),
        tests=tests_of(images[others], targets[others], others.tolist(), noise=0.25),
        validation=held,
        classes=10,
    )


def _check_share(name: str, share: float) -> None:
    """Refuse a share of all images, and numbers that are no share."""
    if not 0 <= share < 1:
        raise ValueError(f"{name} must be in [0, 1), got {share}")


def noisy_labels(labels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return a copy in which this share of the labels is another one of the ten classes."""
    if not share:
        return labels
    count = round(share * len(labels))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    shift = torch.randint(1, 10, (len(chosen),), generator=generator)
    noisy = labels.clone()
    noisy[chosen] = (noisy[chosen] + shift) % 10
    return noisy


def tests_of(
    images: Tensor, labels: Tensor, numbers: list[int], noise: float
) -> dict[str, Tensors]:
    """Return three tests of the same images: clean, with a hidden square, and with noise.

    The damage follows from the number of the image alone, so it is the same for all seeds.

    Args:
        images: (N, C, H, W) with values in [0, 1].
        labels: (N,).
        numbers: the numbers of the images in their data set.
        noise: standard deviation of the noise.
    """
    hidden = images.clone()
    noisy = images.clone()
    image_side = images.shape[-1]
    side = image_side // 2  # the side of the square

    for index, number in enumerate(numbers):
        generator = own_generator(number, "occluded")
        top, left = torch.randint(0, image_side - side + 1, (2,), generator=generator).tolist()
        hidden[index, :, top : top + side, left : left + side] = 0.5

        drawn = torch.randn(images[index].shape, generator=own_generator(number, "noisy"))
        noisy[index].add_(noise * drawn).clamp_(0, 1)

    return {
        "clean": Tensors(images, labels),
        "occluded": Tensors(hidden, labels),
        "noisy": Tensors(noisy, labels),
    }
