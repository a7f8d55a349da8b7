"""Canvases: no digit in two splits, painted as they are drawn, hidden where it is said."""

import math
from itertools import chain, combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from experiments.config import Config, Runtime
from experiments.data import load_data
from experiments.datasets import canvas, painting
from experiments.datasets.corruption import add_noise
from experiments.datasets.sources import load_source, scored_splits
from experiments.loaders import scoring_loader, train_loader
from experiments.seeds import own_generator

NOWHERE = Path("no such folder")
TARGETS = load_digits().target
SEEDS = st.integers(0, 2**31)
SPLITS = ("train", "validation", "test")


def load(**fields):
    config = Config(data="canvas", **{"train_images": 60, "batch_size": 16, **fields})
    return config, load_data(config, NOWHERE)


def training(seed, count=2000, share=0.0, size=64):
    return canvas.training_canvases(seed, count, share, size)


def of(made):
    """All digits that are somewhere in the images, whole or in patches."""
    return set(made.digits[..., 0].ravel()) | set(made.clutter[..., 0].ravel())


def equal(one, other):
    return (
        torch.equal(one.images, other.images)
        and torch.equal(one.labels, other.labels)
        and np.array_equal(one.digits, other.digits)
        and np.array_equal(one.clutter, other.clutter)
    )


@given(SEEDS, st.floats(0, 0.97))
@settings(max_examples=60, deadline=None)
def test_every_digit_is_in_one_split(seed, share):
    splits = canvas.split_digits(seed, share)
    held = {split: np.concatenate(digits).tolist() for split, digits in splits.items()}
    assert sorted(chain(*held.values())) == list(range(1797))
    for digits in splits.values():
        assert all((TARGETS[numbers] == label).all() for label, numbers in enumerate(digits))
    for label, every in enumerate(np.bincount(TARGETS)):
        train, validation, test = (len(splits[split][label]) for split in SPLITS)
        assert test == round(every / 3)
        assert validation == round(share * (train + validation))
    again = canvas.split_digits(seed + 1, 0.5)["test"]
    assert all(map(np.array_equal, splits["test"], again))


def test_no_two_digits_of_scikit_learn_have_the_same_pixels():
    """Else a digit's twin might be in another split."""
    assert len(np.unique(load_digits().images.reshape(1797, 64), axis=0)) == 1797


def test_the_seed_draws_the_digits_to_train_on():
    one, other = (np.concatenate(canvas.split_digits(s, 0.2)["validation"]) for s in (1, 2))
    both = len(set(one) & set(other))
    # of 240 digits, those that another drawing of 240 among 1,198 has, too: 48, deviation 5.5
    assert abs(both - 48) < 4 * 5.5


@given(SEEDS, st.sampled_from([0.0, 0.25, 0.4]), st.integers(48, 90))
@settings(max_examples=25, deadline=None)
def test_images_show_what_their_split_has(seed, share, size):
    train, validation = training(seed, 40, share, size)
    splits = canvas.split_digits(seed, share)
    assert len(train.images) + (len(validation.images) if share else 0) == 40
    assert (validation is None) == (share == 0)
    for split, made in (("train", train), ("validation", validation)):
        if made is not None:
            assert of(made) <= set(np.concatenate(splits[split]).tolist())
            check_layout(made, size)
            counts = made.labels.bincount(minlength=10)
            assert counts.min() >= 1
            assert counts.max() - counts.min() <= 1


def check_layout(made, size):
    for label, digits in zip(made.labels.tolist(), made.digits, strict=True):
        numbers, top, left, side = digits.T
        assert (TARGETS[numbers] == label).all()
        assert len(set(numbers)) == 3
        assert side.min() >= 14
        assert side.max() <= 24
        assert min(top.min(), left.min()) >= 0
        assert (top + side).max() <= size
        assert (left + side).max() <= size
        for i, j in combinations(range(3), 2):
            apart = (
                top[i] + side[i] <= top[j]
                or top[j] + side[j] <= top[i]
                or left[i] + side[i] <= left[j]
                or left[j] + side[j] <= left[i]
            )
            assert apart
    _, enlarged, cut_top, cut_left, side, top, left = made.clutter.reshape(-1, 7).T
    assert min(map(np.min, (cut_top, cut_left, top, left))) >= 0
    assert max((cut_top + side - enlarged).max(), (cut_left + side - enlarged).max()) <= 0
    assert max((top + side).max(), (left + side).max()) <= size


def test_the_test_has_digits_of_its_own_and_a_hundred_images_a_class():
    made = canvas.tested_canvases(64)
    check_layout(made, 64)
    assert made.labels.bincount().tolist() == [100] * 10
    kept = set(np.concatenate(canvas.split_digits(0, 0.0)["test"]).tolist())
    assert of(made) <= kept
    for seed in (0, 1, 7):
        train, validation = training(seed, 300, 0.3)
        assert not of(made) & (of(train) | of(validation))
        assert not of(train) & of(validation)


def test_the_same_again():
    for make in (
        lambda: canvas.training_canvases.__wrapped__(3, 40, 0.25, 64)[0],
        lambda: canvas.training_canvases.__wrapped__(3, 40, 0.25, 64)[1],
        lambda: canvas.tested_canvases.__wrapped__(64),
    ):
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        one, other = make(), make()
        assert equal(one, other)
        assert one.images is not other.images
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.array_equal(np.random.get_state()[1], before[1])
    assert not equal(*(training(seed, 40)[0] for seed in (3, 4)))


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_an_image_does_not_depend_on_how_many_there_are(share):
    few, many = (training(5, count, share) for count in (40, 100))
    for some, more in zip(few, many, strict=True):
        if share or some is not None:
            n = len(some.images)
            assert n < len(more.images)
            cut = canvas.Canvases(
                more.images[:n], more.labels[:n], more.digits[:n], more.clutter[:n]
            )
            assert equal(some, cut)


def test_images_of_training_and_validation_are_drawn_apart():
    train, validation = training(5, 200, 0.5)
    for one, other in ((train.digits, validation.digits), (train.clutter, validation.clutter)):
        assert not (one[..., 1:] == other[..., 1:]).all((1, 2)).any()


def test_the_runs_of_one_seed_share_what_is_made():
    sources = [load_source(Config(data="canvas", train_images=40), NOWHERE) for _ in range(2)]
    assert sources[0].train.images is sources[1].train.images
    assert sources[0].variants["occluded"].images is sources[1].variants["occluded"].images


def z_scores(counts, share):
    """How many standard deviations counts are off, each expected to be a share of all."""
    total = counts.sum()
    return (counts - total * share) / np.sqrt(total * share * (1 - share))


def test_scales_and_patches_are_equally_often_everywhere():
    """Of the test and of 2,000 images to train on; no count is 4.5 deviations off."""
    parts = [canvas.tested_canvases(64), training(0)[0]]
    digits = np.concatenate([made.digits for made in parts]).reshape(-1, 4)
    clutter = np.concatenate([made.clutter for made in parts]).reshape(-1, 7)
    for sides in (digits[:, 3], clutter[:, 1]):
        assert np.abs(z_scores(np.bincount(sides)[14:], 1 / 11)).max() < 4.5
    assert set(clutter[:, 4]) == {8}
    for place in (clutter[:, 5], clutter[:, 6]):
        assert np.abs(z_scores(np.bincount(place, minlength=57), 1 / 57)).max() < 4.5
    for side in range(14, 25):
        for within in (clutter[:, 2], clutter[:, 3]):
            counts = np.bincount(within[clutter[:, 1] == side], minlength=side - 7)
            assert np.abs(z_scores(counts, 1 / (side - 7))).max() < 4.5
    classes = np.bincount(TARGETS[clutter[:, 0]], minlength=10)
    assert np.abs(z_scores(classes, np.bincount(TARGETS) / 1797)).max() < 4.5


def test_all_digits_of_a_class_are_equally_often_shown():
    """The test shows 100 images of each class, 3 digits in each: 4.5 deviations at most."""
    shown = canvas.tested_canvases(64).digits[..., 0]
    for label, numbers in enumerate(canvas.split_digits(0, 0.0)["test"]):
        counts = np.bincount(shown[label::10].ravel(), minlength=1797)[numbers]
        assert counts.sum() == 300
        assert np.abs(z_scores(counts, 1 / len(numbers))).max() < 4.5


def test_digits_lie_everywhere_alike():
    """Middles of boxes: as far to the left as to the right, above as below; all pixels are used."""
    boxes = torch.cat([canvas.boxes(), torch.from_numpy(training(0)[0].digits[..., 1:])])
    middles = boxes[..., :2] + boxes[..., 2:] / 2
    for axis in (0, 1):
        off = middles[..., axis].mean(1) - 32  # one number an image: boxes of one repel each other
        assert abs(off.mean()) < 4 * off.std() / len(off) ** 0.5
    covered = torch.zeros(64, 64)
    for top, left, side in boxes.flatten(0, 1).tolist():
        covered[top : top + side, left : left + side] += 1
    assert covered.min() > 0
    for turned in (covered.flip(0), covered.flip(1), covered.T):
        assert (covered - turned).abs().max() < 6 * (2 * covered.max()) ** 0.5


def expected_places(sides, size):
    """Configuration -> probability: each place as likely as the others that are left."""

    def cells(box):
        top, left, side = box
        return {(top + i, left + j) for i in range(side) for j in range(side)}

    def go(placed):
        if len(placed) == len(sides):
            yield tuple(placed), 1.0
            return
        side = sides[len(placed)]
        taken = set().union(*map(cells, placed)) if placed else set()
        every = product(range(size - side + 1), repeat=2)
        free = [(*place, side) for place in every if not cells((*place, side)) & taken]
        for box in free:
            for rest, chance in go([*placed, box]):
                yield rest, chance / len(free)

    found = dict(go([]))
    whole = sum(found.values())  # of what ends in a configuration, and is not begun anew
    return {places: chance / whole for places, chance in found.items()}, whole


@pytest.mark.parametrize(("sides", "size"), [((2, 1, 1), 3), ((2, 2, 1), 4), ((3, 2, 2), 5)])
def test_places_are_as_likely_as_they_should_be(sides, size):
    expected, whole = expected_places(sides, size)
    assert whole < 1 or sides == (2, 1, 1)  # some drawings have to begin anew
    generator, n = own_generator(0, "places"), 20_000
    drawn = {}
    for _ in range(n):
        places = tuple(painting.draw_boxes(list(sides), size, generator))
        drawn[places] = drawn.get(places, 0) + 1
    assert drawn.keys() <= expected.keys()
    counts = np.array([drawn.get(places, 0) for places in expected])
    chances = np.array(list(expected.values()))
    square = ((counts - n * chances) ** 2 / (n * chances)).sum()
    freedom = len(chances) - 1
    assert abs(square - freedom) < 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("size", [48, 49, 52])
def test_the_largest_digits_find_their_places_on_the_least_canvas(size):
    generator = own_generator(0, "places")
    for _ in range(50):
        boxes = painting.draw_boxes([24, 24, 24], size, generator)
        digits = np.array([(number, *box) for number, box in zip((0, 10, 20), boxes, strict=True)])
        no_clutter = np.zeros((0, 7), dtype=int)
        made = canvas.Canvases(torch.zeros(0), torch.zeros(1).long(), digits[None], no_clutter)
        (top, left, side) = digits[:, 1:].T
        assert (np.maximum(top, left) + side).max() <= size
        for i, j in combinations(range(3), 2):
            assert max(abs(top[i] - top[j]), abs(left[i] - left[j])) >= 24
        assert made.digits.shape == (1, 3, 4)


def enlarged_by_numpy(image, side):
    """Bilinear, the middles of the outer pixels half a pixel from the edge."""
    weights = np.zeros((side, 8))
    for i in range(side):
        at = min(max((i + 0.5) * 8 / side - 0.5, 0), 7)
        low = min(int(at), 6)
        weights[i, low], weights[i, low + 1] = 1 - (at - low), at - low
    return weights @ image @ weights.T


def painted_by_numpy(digits, clutter, size):
    """With loops over pixels, in [0, 1]."""
    source = load_digits().images / 16
    canvas = np.zeros((size, size))
    pieces = [
        (enlarged_by_numpy(source[number], side), top, left) for number, top, left, side in digits
    ]
    for number, enlarged, cut_top, cut_left, side, top, left in clutter:
        whole = enlarged_by_numpy(source[number], enlarged)
        pieces.append((whole[cut_top : cut_top + side, cut_left : cut_left + side], top, left))
    for piece, top, left in pieces:
        for (i, j), value in np.ndenumerate(piece):
            canvas[top + i, left + j] = max(canvas[top + i, left + j], value)
    return canvas


@pytest.mark.parametrize("size", [48, 64, 81])
def test_images_are_what_numpy_paints(size):
    train, validation = training(2, 40, 0.5, size)
    for made in (train, validation):
        assert made.images.dtype == torch.uint8
        assert made.images.shape == (20, 1, size, size)
        for number in range(6):
            painted = painted_by_numpy(made.digits[number], made.clutter[number], size)
            seen = made.images[number, 0].numpy()
            assert np.abs(seen - 255 * painted).max() <= 0.5 + 1e-6
            assert seen.max() > 200


def test_boxes_hold_the_digits_and_the_rest_is_black_or_clutter():
    made, boxes = canvas.tested_canvases(64), canvas.boxes()
    assert boxes.shape == (1000, 3, 3)
    for number in range(0, 1000, 50):
        left_over = made.images[number, 0].clone()
        for digit, (top, left, side) in zip(made.digits[number, :, 0], boxes[number], strict=True):
            place = left_over[top : top + side, left : left + side]
            assert (place.numpy() >= painting.enlarged_digits()[side.item()][digit]).all()
            place.zero_()
        for *_, side, top, left in made.clutter[number].tolist():
            left_over[top : top + side, left : left + side] = 0
        assert left_over.sum() == 0


def test_boxes_are_no_part_of_what_is_kept():
    boxes = canvas.boxes()
    boxes.zero_()
    assert canvas.boxes().min(dim=0).values[:, 2].tolist() == [14, 14, 14]


@pytest.mark.parametrize("size", [48, 64])
def test_each_digit_is_hidden_once_and_nothing_else(size):
    clean, boxes = canvas.tested_canvases(size), canvas.boxes(size)
    hidden, labels = canvas.changed_canvases(size)["occluded"]
    assert hidden.shape == (3000, 1, size, size)
    assert torch.equal(labels, clean.labels.repeat_interleave(3))
    relative = {}
    for n, d in product(range(1000), range(3)):
        top, left, side = boxes[n, d].tolist()
        wanted = (0.75, 1, 1.5)[(n + d) % 3] * side
        square = round(wanted)
        assert abs(square - wanted) <= 0.5
        first_row, first_column = top + (side - square) // 2, left + (side - square) // 2
        expected = clean.images[n, 0].clone()
        rows = slice(max(0, first_row), min(size, first_row + square))
        columns = slice(max(0, first_column), min(size, first_column + square))
        expected[rows, columns] = 128
        assert torch.equal(hidden[3 * n + d, 0], expected)
        relative.setdefault((n % 10, (n + d) % 3), []).append((d, square / side))
    assert {len(shares) for shares in relative.values()} == {100}  # each class has all sizes alike
    for (_, which), shares in relative.items():
        assert len({d for d, _ in shares}) == 3
        assert abs(np.mean([share for _, share in shares]) - (0.75, 1, 1.5)[which]) < 0.02


def test_the_square_of_the_boxs_size_is_the_box():
    boxes = canvas.boxes()
    order = (torch.arange(1000)[:, None] + torch.arange(3)) % 3
    squares = painting.occluders(boxes)
    assert torch.equal(squares[order == 1], boxes[order == 1])
    middles, of_squares = (x[..., :2] + x[..., 2:] / 2 for x in (boxes, squares))
    assert (middles - of_squares).abs().max() <= 0.5


def test_other_clutter_is_more_and_of_other_sizes_around_the_same_digits():
    clean = canvas.tested_canvases(64)
    images, labels = canvas.changed_canvases(64)["clutter"]
    assert torch.equal(labels, clean.labels)
    digits = canvas.split_digits(0, 0.0)["test"]
    sides = []
    for number in range(300):
        generator = own_generator(0, f"canvas/other clutter/{number}")
        patches = painting.draw_clutter(digits, canvas.OTHER_CLUTTER, 64, generator)
        assert patches.shape == (16, 7)
        assert set(patches[:, 0]) <= set(np.concatenate(digits))
        assert not np.array_equal(patches[:6], clean.clutter[number])
        sides += patches[:, 4].tolist()
        if number < 5:
            painted = painted_by_numpy(clean.digits[number], patches, 64)
            assert np.abs(images[number, 0].numpy() - 255 * painted).max() <= 0.5 + 1e-6
    assert np.abs(z_scores(np.bincount(sides)[4:], 1 / 9)).max() < 4.5
    assert len(np.bincount(sides)) == 13
    # more of it: a fifth more light than the 6 patches give
    assert images.float().mean() > 1.1 * clean.images.float().mean()


def whole(images, config):
    parts = zip(*scoring_loader(images, config, Runtime()), strict=True)
    return tuple(torch.cat(part) for part in parts)


def test_a_run_sees_the_canvases():
    config, data = load(label_noise=0.4, validation=0.5, seed=9)
    made, held_out = training(9, 60, 0.5)
    assert (data.name, data.classes, data.channels, data.image_size) == ("canvas", 10, 1, 64)
    assert list(data.tests) == ["clean", "occluded", "noisy", "clutter"]
    assert scored_splits("canvas") == (*data.tests,)
    assert [len(images) for images in data.tests.values()] == [1000, 3000, 1000, 1000]
    assert sorted(data.train.numbers.tolist()) == list(range(30))
    assert (data.train.labels != made.labels[data.train.numbers]).sum() == 12
    batches = list(train_loader(data, config, Runtime()))
    assert [len(labels) for _, labels in batches] == [16, 14]
    images, _ = data.train.__getitems__([(0, i) for i in range(30)])
    torch.testing.assert_close(images, made.images[data.train.numbers] / 255)
    own = load_source(config, NOWHERE).validation
    assert own.images is held_out.images
    assert own.labels is held_out.labels
    clean = canvas.tested_canvases(64)
    expected = {
        "clean": clean.images,
        "occluded": canvas.changed_canvases(64)["occluded"][0],
        "clutter": canvas.changed_canvases(64)["clutter"][0],
    }
    for split, raw in expected.items():
        images, labels = whole(data.tests[split], config)
        torch.testing.assert_close(images, raw / 255)
        assert torch.equal(labels, clean.labels.repeat_interleave(len(raw) // 1000))
    noisy, _ = whole(data.tests["noisy"], config)
    torch.testing.assert_close(noisy, add_noise(clean.images / 255, range(1000), 0.25))


def test_sizes_unless_asked():
    data = load_data(Config(data="canvas"), NOWHERE)
    assert (len(data.train), data.image_size) == (2000, 64)
    assert load_source(Config(data="canvas"), NOWHERE).validation is None


@pytest.mark.parametrize("augmentation", ["flip", "crop-flip", "resized-crop-flip"])
def test_canvases_are_augmented_as_other_images(augmentation):
    config, data = load(augmentation=augmentation)
    before = training(0, 60)[0].images.clone()
    for images, labels in train_loader(data, config, Runtime()):
        assert images.shape == (len(labels), 1, 64, 64)
        assert images.min() >= 0
        assert images.max() <= 1
    draws = [(0, index) for index in range(60)]
    plain, _ = load()[1].train.__getitems__(draws)
    assert not torch.equal(data.train.__getitems__(draws)[0], plain)
    assert torch.equal(training(0, 60)[0].images, before)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"image_size": 32},
            "image_size must be at least 48 for canvas, or 3 digits of 24 pixels .*, got 32$",
        ),
        ({"image_size": 47}, "image_size must be at least 48 for canvas.* got 47$"),
        (
            {"train_images": 9},
            r"train_images must be between 10 \(one of each class\) and 100000 for canvas, got 9$",
        ),
        (
            {"train_images": 19, "validation": 0.5},
            r"between 20 \(one of each class, for training and for validation\) and .* got 19$",
        ),
        ({"train_images": 100_001}, "between 10 .* and 100000 for canvas, got 100001$"),
        (
            {"train_images": 2000, "validation": 0.01},
            "validation must be 0, or between 0.026 and 0.974 for 2000 images of canvas, "
            "so that each class has 3 digits and an image in both parts, got 0.01$",
        ),
        ({"train_images": 2000, "validation": 0.99}, "between 0.026 and 0.974 .* got 0.99$"),
        ({"train_images": 50, "validation": 0.15}, "between 0.2 and 0.8 for 50 images.* got 0.15$"),
    ],
)
def test_what_does_not_fit_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        load(**fields)


@given(st.integers(20, 3000), st.floats(0, 1), SEEDS)
@example(22, 1.0, 0)  # 1 - .455 is a little less than .545
@settings(max_examples=60, deadline=None)
def test_what_is_not_refused_leaves_no_class_empty(count, share, seed):
    if share:
        least = math.ceil(1000 * max(3 / 116, 10 / count)) / 1000
        share = round(least + share * (1 - 2 * least), 3)  # as it is typed
        canvas._check(count, share, 64)
        digits = canvas.split_digits(seed, share)
        assert min(len(numbers) for split in SPLITS for numbers in digits[split]) >= 3
        assert 10 <= round(share * count) <= count - 10


@pytest.mark.parametrize(("size", "fits"), [(47, False), (48, True)])
def test_the_least_size_is_what_three_of_the_largest_digits_need(size, fits):
    """Two squares of 24 are beside each other, or one above the other, only from 48 on."""
    assert canvas.LEAST_SIZE == 48
    places = range(size - 24 + 1)
    assert any(abs(a - b) >= 24 for a in places for b in places) == fits


def test_the_picture_shows_what_runs_are_tested_on(call, tmp_path):
    """The one made now, and the one that is kept, whose shades may differ a little."""
    assert call("canvas.py", tmp_path / "canvas.png") == 0
    kept = Path(__file__).parents[2] / "experiments" / "results" / "canvas.png"
    assert kept.stat().st_size <= 60_000
    pictures = [np.asarray(Image.open(path)) for path in (tmp_path / "canvas.png", kept)]
    _, data = load()
    for picture in pictures:
        height, width = picture.shape
        for (row, split), label in product(enumerate(data.tests), range(10)):
            number = 3 * label + label % 3 if split == "occluded" else label
            image = data.tests[split].__getitems__([(0, number)])[0][0, 0].numpy()
            top, left = height - (4 - row) * 67, width - (10 - label) * 67
            tile = picture[top : top + 64, left : left + 64] / 255
            assert (np.abs(tile - image) <= 0.5 / 15 + 1e-3).mean() > 0.99
