"""The task: a split that loses no digit, noise as symmetric as asked, all from the seed alone."""

import pytest
import torch
from torch import Tensor

from experiments.data import derive_seed, digits, digits_split, noisy_labels, own_generator


def rows(images: Tensor) -> list[bytes]:
    return sorted(image.numpy().tobytes() for image in images)


def test_split_has_every_digit_once():
    images, labels = digits()
    split = digits_split(500, 0.0, seed=3)
    assert images.shape == (1797, 1, 32, 32)
    assert images.min() == 0
    assert images.max() == 1
    assert len(split.train_images) == 500
    assert rows(torch.cat([split.train_images, split.test_images])) == rows(images)
    both = torch.cat([split.train_labels, split.test_labels])
    assert torch.equal(both.bincount(), labels.bincount())


def test_labels_stay_with_their_images():
    images, labels = digits()
    label_of = {
        image.numpy().tobytes(): int(label) for image, label in zip(images, labels, strict=True)
    }
    split = digits_split(500, 0.0, seed=3)
    for some, theirs in (
        (split.train_images, split.train_labels),
        (split.test_images, split.test_labels),
    ):
        assert [label_of[image.numpy().tobytes()] for image in some] == theirs.tolist()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_noise_changes_the_share_asked_for(share):
    clean, noisy = digits_split(500, 0.0, seed=3), digits_split(500, share, seed=3)
    assert (clean.train_labels != noisy.train_labels).sum() == round(share * 500)
    assert torch.equal(clean.train_images, noisy.train_images)
    assert torch.equal(clean.test_labels, noisy.test_labels)


def test_noise_is_uniform_over_the_other_classes():
    labels = torch.zeros(90_000, dtype=torch.long)
    counts = noisy_labels(labels, 1.0, own_generator(0, "noise")).bincount(minlength=10)
    assert counts[0] == 0
    z = (counts[1:] - 10_000) / (90_000 * (1 / 9) * (8 / 9)) ** 0.5
    assert z.abs().max() < 4


def test_the_seed_decides_and_the_global_generator_does_not():
    torch.manual_seed(1)
    one = digits_split(100, 0.4, seed=3)
    torch.rand(17)
    same, other = digits_split(100, 0.4, seed=3), digits_split(100, 0.4, seed=4)
    assert torch.equal(one.train_images, same.train_images)
    assert torch.equal(one.train_labels, same.train_labels)
    assert not torch.equal(one.train_images, other.train_images)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    digits_split(100, 0.4, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_purposes_have_unrelated_seeds():
    purposes = ("split", "noise", "weights", "order", "masks")
    assert len({derive_seed(seed, purpose) for seed in range(20) for purpose in purposes}) == 100


@pytest.mark.parametrize("count", [0, 1797, 5000])
def test_a_split_that_is_empty_on_one_side_is_refused(count):
    with pytest.raises(ValueError, match=f"between 1 and 1796 .* got {count}"):
        digits_split(count, 0.4, seed=3)
