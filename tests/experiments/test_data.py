"""Data sets: splits that share no item, damage that follows from the image, wrong files."""

import hashlib

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from experiments import page
from experiments.config import Run
from experiments.data import Tensors, load_data
from experiments.data.canvas import COPIES, clean_canvases, occluders, split_digits
from experiments.data.digits import digits, noisy_labels
from experiments.data.vision import NORMS
from experiments.factories import FactoryError
from experiments.plots import save


def rows(dataset):
    return {x.numpy().tobytes() for x in dataset.inputs}


def test_digits_are_split_by_the_seed():
    first, again, other = digits(1, 200, 0.25), digits(1, 200, 0.25), digits(2, 200, 0.25)
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert not torch.equal(first.train.inputs, other.train.inputs)
    assert (len(first.train), len(first.validation), len(first.tests["clean"])) == (150, 50, 1597)
    train, test = rows(first.train), rows(first.tests["clean"])
    assert len(train & test) <= 2  # some digits of the data set are equal
    assert set(first.tests) == {"clean", "occluded", "noisy"}


def test_the_damage_of_an_image_is_the_same_for_all_seeds():
    def by_clean(data, test):
        pairs = zip(data.tests["clean"].inputs, data.tests[test].inputs, strict=True)
        return {clean.numpy().tobytes(): damaged for clean, damaged in pairs}

    for test in ("occluded", "noisy"):
        first, second = by_clean(digits(1, 1700), test), by_clean(digits(2, 1700), test)
        common = [key for key in first if key in second]
        assert common
        assert all(torch.equal(first[key], second[key]) for key in common)


def test_the_square_and_the_noise_are_as_stated():
    tests = digits(0, 1000).tests
    clean, hidden, noisy = (tests[name].inputs for name in ("clean", "occluded", "noisy"))
    changed = (clean != hidden).flatten(1).sum(1)
    assert (hidden[clean != hidden] == 0.5).all()
    assert changed.max() <= 16 * 16
    inside = (clean > 0.4) & (clean < 0.6)
    assert (noisy - clean)[inside].std().item() == pytest.approx(0.24, abs=0.02)
    assert noisy.min() >= 0
    assert noisy.max() <= 1


@pytest.mark.parametrize("share", [0.0, 0.25, 1 / 3])
def test_label_noise_changes_that_share(share):
    labels = torch.arange(10).repeat(90)
    noisy = noisy_labels(labels, share, torch.Generator().manual_seed(0))
    assert (noisy != labels).sum() == round(share * 900)
    assert noisy.min() >= 0
    assert noisy.max() <= 9


@pytest.mark.parametrize(
    ("args", "told"),
    [({"train_images": 5}, "from 10 to 1796"), ({"validation": 1.0}, r"in \[0, 1\)"),
     ({"label_noise": -1}, r"in \[0, 1\)"), ({"images": 3}, "unexpected keyword")],
)  # fmt: skip
def test_arguments_are_checked(args, told):
    with pytest.raises(FactoryError, match=told):
        load_data(Run(data_args=args))


def test_bytes_become_floats():
    data = Tensors(torch.tensor([[0], [51], [255]], dtype=torch.uint8), torch.tensor([0, 1, 2]))
    inputs, targets = data.batch([2, 1])
    assert inputs.flatten().tolist() == pytest.approx([1.0, 0.2])
    assert targets.tolist() == [2, 1]
    assert data[1][0].item() == pytest.approx(0.2)


def test_canvas_has_no_digit_in_two_splits():
    for seed in (0, 5):
        splits = split_digits(seed, 0.4)
        parts = [set(np.concatenate(numbers).tolist()) for numbers in splits.values()]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 1797


@pytest.mark.slow
def test_canvas_is_made_by_the_seed():
    run = Run(data="canvas", data_args={"train_images": 60, "validation": 0.4}, seed=3)
    first, again = load_data(run), load_data(run)
    other = load_data(run.model_copy(update={"seed": 4}))
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert not torch.equal(first.train.inputs, other.train.inputs)
    assert (len(first.train), len(first.validation)) == (36, 24)
    sizes = {name: len(one) for name, one in first.tests.items()}
    assert sizes == {"clean": 1000, "occluded": 3000, "noisy": 1000, "clutter": 1000}
    for name, one in first.tests.items():
        assert torch.equal(one.inputs, again.tests[name].inputs), name
        assert (one.inputs == other.tests[name].inputs).flatten(1).all(1).sum() == 0, name
    assert torch.equal(first.tests["clutter"].targets, first.tests["clean"].targets)


@pytest.mark.slow
def test_an_occluder_hides_its_digit_alone():
    clean, _, digits = clean_canvases()
    hidden = load_data(Run(data="canvas", data_args={"train_images": 20})).tests["occluded"].inputs
    squares = occluders(torch.from_numpy(digits[:, :, 1:]))
    for index in (0, 7, 500):
        for digit in range(COPIES):
            top, left, side = squares[index, digit].tolist()
            mask = torch.zeros(64, 64, dtype=torch.bool)
            mask[max(0, top) : top + side, max(0, left) : left + side] = True
            image = hidden[COPIES * index + digit, 0]
            assert (image[mask] == 128).all()
            assert torch.equal(image[~mask], clean[index, 0][~mask])


def fingerprints(run):
    """A hash of each data set, as bytes, so that the last digits of floats do not count."""
    data, found = load_data(run), {}
    for name, one in {"train": data.train, "validation": data.validation, **data.tests}.items():
        x = one.inputs if one.inputs.dtype == torch.uint8 else one.inputs.mul(255).round().byte()
        text = x.numpy().tobytes() + one.targets.numpy().tobytes()
        found[name] = hashlib.sha256(text).hexdigest()[:12]
    return found


def test_the_digits_of_the_committed_results():
    args = {"train_images": 800, "validation": 0.4, "label_noise": 0.4}
    assert fingerprints(Run(data_args=args, seed=1)) == {
        "train": "563951e54464",
        "validation": "367da77d4247",
        "clean": "d504cad09cf0",
        "occluded": "033300096b38",
        "noisy": "251454e71ca4",
    }


@pytest.mark.slow
def test_the_canvases_stay_the_same():
    args = {"train_images": 1500, "validation": 0.4}
    assert fingerprints(Run(data="canvas", data_args=args, seed=7201)) == {
        "train": "9ac9dbd87520",
        "validation": "b9a7b673027a",
        "clean": "02713e9ef824",
        "occluded": "1b21de1a1370",
        "noisy": "c7a92d19ccf0",
        "clutter": "16b40bf41600",
    }


@pytest.mark.slow
def test_the_picture_of_canvas_shows_its_tests(tmp_path):
    figure = page.canvases()
    axes = iter(figure.axes)
    tests = load_data(Run(data="canvas", data_args={"train_images": 20})).tests
    for name, one in tests.items():
        for label in range(10):
            number = COPIES * label + label % COPIES if name == "occluded" else label
            shades = one[number][0][0].mul(15).round()  # the picture has 16 shades
            (image,) = next(axes).get_images()
            assert np.array_equal(image.get_array(), shades), (name, label)
    assert list(axes) == []

    save(figure, tmp_path / "canvas.png")
    made, committed = (
        Image.open(folder / "canvas.png").resize((80, 32)).convert("L")
        for folder in (tmp_path, page.RESULTS)
    )
    difference = np.asarray(made, dtype=float) - np.asarray(committed, dtype=float)
    assert abs(difference).mean() < 2


@pytest.mark.parametrize("args", [{"train_images": 5}, {"validation": 0.999}])
def test_a_canvas_that_can_not_be_made(args):
    with pytest.raises(FactoryError, match="canvas"):
        load_data(Run(data="canvas", data_args=args))


@pytest.fixture
def images(tmp_path):
    generator = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 2)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 255, (20, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{index}.png")
    return tmp_path


def make_run(root, **args):
    return Run(data="imagefolder", data_args={"root": str(root), "image_size": 16, **args})


def test_image_folders(images):
    data = load_data(make_run(images, validation=0.25, augmentation="resized-crop-flip"))
    assert (len(data.train), len(data.validation), len(data.tests["clean"])) == (9, 3, 4)
    assert data.classes == 2
    assert data.train[0][0].shape == data.tests["clean"][0][0].shape == (3, 16, 16)
    assert not torch.equal(data.train[0][0], data.train[0][0])  # augmented anew
    assert torch.equal(data.tests["clean"][0][0], data.tests["clean"][0][0])


def test_small_images_are_not_enlarged_without_being_asked(images):
    run = make_run(images)
    del run.data_args["image_size"]
    with pytest.raises(FactoryError, match="the first image has 30 x 20 pixels.*image_size=20"):
        load_data(run)

    (shown, _) = load_data(make_run(images, image_size=20)).tests["clean"][0]
    image = v2.functional.to_image(Image.open(images / "val/cat/0.png"))
    center = v2.functional.center_crop(v2.functional.to_dtype(image, scale=True), [20, 20])
    mean, std = NORMS["ImageFolder"]
    assert torch.equal(shown, v2.functional.normalize(center, mean, std)), "no pixel is resampled"
    assert load_data(make_run(images, image_size=40)).tests["clean"][0][0].shape == (3, 40, 40)


def test_image_folders_that_are_wrong(images):
    with pytest.raises(FactoryError, match="augmentation must be one of"):
        load_data(make_run(images, augmentation="mixup"))
    (images / "val/dog").rename(images / "val/wolf")
    with pytest.raises(FactoryError, match=r"the same classes, they differ in \['dog', 'wolf'\]"):
        load_data(make_run(images))
    with pytest.raises(FactoryError, match="train/CLASS"):
        load_data(make_run(images / "nothing"))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_without_files(name, tmp_path):
    with pytest.raises(FactoryError, match=r"download=True\) leaves"):
        load_data(Run(data=name, data_args={"root": str(tmp_path)}))
