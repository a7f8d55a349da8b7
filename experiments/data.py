"""scikit-learn's digits as a small task with noisy labels.

Everything follows from the seed through generators of its own: drawing from torch's global
generator, as dropout masks do, moves neither the split nor the noise.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

CLASSES = 10
IMAGE_SIZE = 32


@dataclass(frozen=True)
class Split:
    """A training set with noisy labels and a clean test set.

    Args:
        train_images: (n, 1, 32, 32), values in [0, 1].
        train_labels: (n,), noise included.
        test_images: (m, 1, 32, 32), values in [0, 1].
        test_labels: (m,), clean.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def derive_seed(seed: int, purpose: str) -> int:
    """A seed for one purpose ("split", "weights", ...), unrelated to those of other purposes."""
    digest = hashlib.sha256(f"{purpose}/{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def own_generator(seed: int, purpose: str) -> torch.Generator:
    """A generator for one purpose, independent of torch's global one."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose))


def digits() -> tuple[Tensor, Tensor]:
    """The 1,797 digits, enlarged bilinearly from 8x8: (1797, 1, 32, 32) in [0, 1], and labels."""
    data = load_digits()
    images = torch.from_numpy(data.images).float().div(16).unsqueeze(1)
    size = (IMAGE_SIZE, IMAGE_SIZE)
    images = nn.functional.interpolate(images, size=size, mode="bilinear", align_corners=False)
    return images, torch.from_numpy(data.target).long()


def noisy_labels(labels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A copy in which `share` of the labels, rounded to a count, are another class.

    Symmetric noise: which labels change is drawn without replacement, and the new class
    uniformly from the nine others.
    """
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    shift = torch.randint(1, CLASSES, (len(chosen),), generator=generator)
    noisy = labels.clone()
    noisy[chosen] = (noisy[chosen] + shift) % CLASSES
    return noisy


def digits_split(train_images: int, label_noise: float, seed: int) -> Split:
    """Some digits for training, with label noise, and all others for the test.

    Args:
        train_images: how many are trained on.
        label_noise: share of the training labels that are wrong, in [0, 1].
        seed: decides which images are trained on, and the noise.

    Raises:
        ValueError: if `train_images` leaves nothing to train on or nothing to test on.
    """
    images, labels = digits()
    if not 0 < train_images < len(labels):
        raise ValueError(
            f"train_images must be between 1 and {len(labels) - 1} (some of the {len(labels)} "
            f"digits are for the test), got {train_images}"
        )
    order = torch.randperm(len(labels), generator=own_generator(seed, "split"))
    train, test = order[:train_images], order[train_images:]
    noisy = noisy_labels(labels[train], label_noise, own_generator(seed, "noise"))
    return Split(images[train], noisy, images[test], labels[test])
