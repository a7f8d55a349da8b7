"""CIFAR and image folders, read from files of the real format that the tests write."""

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from experiments.config import Config, Runtime
from experiments.data import load_data
from experiments.datasets.sources import fingerprint
from experiments.loaders import scoring_loader, train_loader

FILES = {
    "cifar10": [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"],
    "cifar100": ["train", "test", "meta"],
}
KINDS = {"cifar10": CIFAR10, "cifar100": CIFAR100}


class Python2Pickler(pickle._Pickler):
    """Writes what Python 2 and its NumPy wrote: byte strings, `numpy.core`, numbers for bools."""

    def __init__(self, file):
        super().__init__(file, protocol=2)

    def save_text(self, text):
        raw = text if isinstance(text, bytes) else text.encode("latin1")
        short = len(raw) < 256
        head = b"U" + bytes([len(raw)]) if short else b"T" + len(raw).to_bytes(4, "little")
        self.write(head + raw)
        self.memoize(text)

    dispatch: ClassVar = {**pickle._Pickler.dispatch, str: save_text, bytes: save_text}

    def save_global(self, obj, name=None):
        if getattr(obj, "__name__", "") != "_reconstruct":
            return super().save_global(obj, name)
        self.write(b"cnumpy.core.multiarray\n_reconstruct\n")
        return self.memoize(obj)

    def reducer_override(self, obj):
        if isinstance(obj, np.dtype):
            return np.dtype, (obj.str[1:], 0, 1), (3, "|", None, None, None, -1, -1, 0)
        return NotImplemented


def write_cifar(root, name, each=4):
    """Files with the names, keys and layout of the real ones; what images and labels they hold."""
    folder = root / KINDS[name].base_folder
    folder.mkdir()
    numbers, held = np.random.default_rng(0), {}
    classes = 10 if name == "cifar10" else 100
    for file in FILES[name][:-1]:
        data = numbers.integers(0, 256, (each, 3072), dtype=np.uint8)
        labels = numbers.integers(0, classes, each).tolist()
        batch = {"batch_label": f"{file} of {name}", "data": data}
        batch["filenames"] = [f"image_{i}.png" for i in range(each)]
        if name == "cifar10":
            batch["labels"] = labels
        else:
            batch["fine_labels"], batch["coarse_labels"] = labels, [i // 5 for i in labels]
        write_pickle(folder / file, batch)
        held[file] = data.reshape(each, 3, 32, 32), labels
    names = [f"class {i}" for i in range(classes)]
    meta = {"num_cases_per_batch": each, "label_names": names, "num_vis": 3072}
    if name == "cifar100":
        meta = {"fine_label_names": names, "coarse_label_names": names[:20]}
    write_pickle(folder / FILES[name][-1], meta)
    return held


def write_pickle(path, value):
    with path.open("wb") as file:
        Python2Pickler(file).dump(value)


@pytest.fixture
def _small_cifar(monkeypatch, tmp_path):
    """CIFAR files of a few images in `tmp_path`; torchvision is told their checksums."""
    for name, kind in KINDS.items():
        write_cifar(tmp_path, name)
        folder = tmp_path / kind.base_folder
        sums = {file: hashlib.md5((folder / file).read_bytes()).hexdigest() for file in FILES[name]}
        *train, test, meta = FILES[name]
        monkeypatch.setattr(kind, "train_list", [[file, sums[file]] for file in train])
        monkeypatch.setattr(kind, "test_list", [[test, sums[test]]])
        monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": sums[meta]})


def test_pickles_are_as_python_2_wrote_them(tmp_path):
    write_cifar(tmp_path, "cifar10")
    raw = (tmp_path / CIFAR10.base_folder / "data_batch_1").read_bytes()
    assert raw.startswith(b"\x80\x02")
    assert b"cnumpy.core.multiarray\n_reconstruct" in raw
    assert b"U\x02u1" in raw
    assert b"X" + (2).to_bytes(4, "little") not in raw  # no unicode
    assert isinstance(pickle.loads(pickle.dumps("x")), str)


@pytest.mark.usefixtures("_small_cifar")
@pytest.mark.parametrize(("name", "train", "classes"), [("cifar10", 20, 10), ("cifar100", 4, 100)])
def test_cifar_is_read_as_it_was_written(name, train, classes, tmp_path):
    (tmp_path / "again").mkdir()
    held = write_cifar(tmp_path / "again", name)
    config = Config(data=name, batch_size=7)
    data = load_data(config, tmp_path)
    assert (data.name, data.classes, data.channels, data.image_size) == (name, classes, 3, 32)
    assert (len(data.train), len(data.tests["clean"])) == (train, 4)
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (data.train.mean, data.train.std))
    *files, test = held.values()
    parts = {
        "train": (data.train, files, data.train.numbers.tolist()),
        "test": (data.tests["clean"], [test], range(4)),
    }
    for images, from_files, numbers in parts.values():
        pixels = np.concatenate([data for data, _ in from_files])
        labels = [label for _, labels in from_files for label in labels]
        made, made_labels = images.__getitems__([(0, i) for i in range(len(images))])
        assert made_labels.tolist() == [labels[number] for number in numbers]
        expected = torch.from_numpy(pixels[list(numbers)]) / 255
        torch.testing.assert_close(made * std + mean, expected, atol=1e-6, rtol=0)
    assert sorted(data.train.numbers.tolist()) == list(range(train))
    assert len(list(train_loader(data, config, Runtime()))) == -(-train // 7)


@pytest.mark.usefixtures("_small_cifar")
def test_cifar_damage_is_done_before_normalization(tmp_path):
    data = load_data(Config(data="cifar10", image_size=24), tmp_path)
    draws = [(0, index) for index in range(4)]
    images = {split: data.tests[split].__getitems__(draws)[0] for split in data.tests}
    gray = (0.5 - torch.tensor(data.train.mean)) / torch.tensor(data.train.std)
    hidden = (images["occluded"] != images["clean"]).all(1)
    assert (hidden.flatten(1).sum(1) == 144).all()
    for image, mask in zip(images["occluded"], hidden, strict=True):
        torch.testing.assert_close(image[:, mask], gray.view(3, 1).expand(3, 144))
    std, mean = (torch.tensor(part).view(3, 1, 1) for part in (data.train.std, data.train.mean))
    noisy = images["noisy"] * std + mean
    assert noisy.min() > -1e-6
    assert noisy.max() < 1 + 1e-6


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_that_is_not_there(name, tmp_path):
    folder = tmp_path / KINDS[name].base_folder
    with pytest.raises(ValueError, match=f"data {name}: no files in {folder}; expected .*download"):
        load_data(Config(data=name), tmp_path)


@pytest.mark.usefixtures("_small_cifar")
def test_cifar_with_a_file_missing(tmp_path):
    for file in ("data_batch_2", "batches.meta"):
        (tmp_path / CIFAR10.base_folder / file).unlink()
    with pytest.raises(ValueError, match="lacks data_batch_2, batches.meta; expected there"):
        load_data(Config(data="cifar10"), tmp_path)


@pytest.mark.usefixtures("_small_cifar")
@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_cifar_with_a_damaged_file(file, tmp_path):
    path = tmp_path / CIFAR10.base_folder / file
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match=rf"damaged in .*: {file}; expected there"):
        load_data(Config(data="cifar10"), tmp_path)


def test_cifar_files_with_other_contents_are_damaged(tmp_path):
    write_cifar(tmp_path, "cifar100")
    with pytest.raises(ValueError, match="damaged in .*: train, test, meta; expected there"):
        load_data(Config(data="cifar100"), tmp_path)


def write_folders(root, classes=("cat", "dog"), train=3, val=2):
    """PNG and JPEG files of several modes and sizes."""
    shades = {"L": 90, "RGB": (200, 30, 60), "RGBA": (10, 200, 30, 255), "P": 5, "1": 1}
    for part, count in (("train", train), ("val", val)):
        for name in classes:
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                mode = list(shades)[number % len(shades)]
                image = Image.new(mode, (40 + 9 * number, 30 + 5 * number), shades[mode])
                suffix = "jpg" if mode in ("L", "RGB") and number % 2 else "png"
                image.save(folder / f"{number}.{suffix}")
    return Config(data=f"imagefolder:{root}", image_size=28, batch_size=4)


@pytest.mark.parametrize("augmentation", ["none", "flip", "crop-flip", "resized-crop-flip"])
def test_image_folders(augmentation, tmp_path):
    write_folders(tmp_path, train=6)
    config = Config(
        data=f"imagefolder:{tmp_path}", image_size=28, batch_size=4, augmentation=augmentation
    )
    data = load_data(config, Path())
    assert (data.name, data.classes, data.channels, data.image_size) == ("imagefolder", 2, 3, 28)
    assert data.train.labels.bincount().tolist() == [6, 6]
    batches = list(train_loader(data, config, Runtime()))
    assert [images.shape for images, _ in batches] == [(4, 3, 28, 28)] * 3
    for split in data.tests:
        [(images, labels)] = scoring_loader(data.tests[split], config, Runtime())
        assert images.shape == (4, 3, 28, 28)
        assert labels.tolist() == [0, 0, 1, 1]


def test_image_folders_hold_what_was_written(tmp_path):
    config = write_folders(tmp_path)
    data = load_data(config, Path())
    images, _ = data.tests["clean"].__getitems__([(0, 0), (0, 1)])
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    for image, shade in zip(images, ((90, 90, 90), (200, 30, 60)), strict=True):
        expected = torch.tensor(shade).view(3, 1, 1).expand(3, 28, 28)
        seen = ((image * std + mean) * 255).round()
        assert (seen - expected).abs().max() <= 3  # JPEG's loss


def test_photographs_are_held_out_for_validation(tmp_path):
    config = replace(write_folders(tmp_path, train=6), validation=0.5, augmentation="flip")
    data = load_data(config, Path())
    assert (len(data.train), len(data.validation)) == (6, 6)
    numbers = torch.cat([data.train.numbers, data.validation.numbers])
    assert sorted(numbers.tolist()) == list(range(12))
    images, labels = data.validation.__getitems__([(0, 2), (0, 4)])
    assert images.shape == (2, 3, 28, 28)
    assert torch.equal(labels, (data.validation.numbers[[2, 4]] >= 6).long())
    assert torch.equal(images, data.validation.__getitems__([(9, 2), (9, 4)])[0])  # not augmented
    with pytest.raises(ValueError, match="class 0 has none of the 1 in validation"):
        load_data(replace(config, validation=0.1, seed=1), Path())


def test_photographs_are_resized_and_cropped_in_the_middle(tmp_path):
    """A picture of 448 x 256 whose middle 224 columns are white: the crop shows only these."""
    write_folders(tmp_path)
    pixels = np.zeros((256, 448, 3), dtype=np.uint8)
    pixels[:, 112:336] = 255
    Image.fromarray(pixels).save(tmp_path / "val" / "cat" / "0.png")
    data = load_data(Config(data=f"imagefolder:{tmp_path}"), Path())
    assert data.image_size == 224
    image = data.tests["clean"].__getitems__([(0, 0)])[0][0]
    assert image.shape == (3, 224, 224)
    assert image[0].min() > 2  # (1 - mean) / std


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_folder_that_is_missing_or_has_no_class(part, tmp_path):
    config = write_folders(tmp_path)
    (tmp_path / part).rename(tmp_path / "elsewhere")
    for act in (load_data, fingerprint):
        with pytest.raises(ValueError, match=f"{tmp_path / part}'.*; expected are .*per class"):
            act(config, Path())
    (tmp_path / part).mkdir()
    for act in (load_data, fingerprint):
        with pytest.raises(ValueError, match=r"any class folder in .*; expected are .*per class"):
            act(config, Path())
    (tmp_path / part / "cat").mkdir()
    with pytest.raises(ValueError, match=r"valid file for the classes cat.*; expected are"):
        load_data(config, Path())


def test_a_path_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"data imagefolder:.*nowhere.*; expected are .*val"):
        load_data(Config(data=f"imagefolder:{tmp_path / 'nowhere'}"), Path())


@pytest.mark.parametrize(("part", "other"), [("train", "val"), ("val", "train")])
def test_a_class_that_only_one_part_has(part, other, tmp_path):
    config = write_folders(tmp_path)
    (tmp_path / part / "cat").rename(tmp_path / part / "ant")
    with pytest.raises(ValueError, match=f"{other} lacks 'ant', which is in {part} .2 classes"):
        load_data(config, Path())


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_file_that_is_no_image_is_named(workers, tmp_path):
    config = write_folders(tmp_path)
    (tmp_path / "train" / "dog" / "0.png").write_bytes(b"no image")
    data = load_data(config, Path())
    with pytest.raises(ValueError, match=r"can't read the image .*dog/0\.png"):
        list(train_loader(data, config, Runtime(loader_workers=workers)))


def test_more_photographs_than_there_are(tmp_path):
    write_folders(tmp_path)
    config = Config(data=f"imagefolder:{tmp_path}", train_images=7)
    with pytest.raises(ValueError, match="train_images must be between 1 and 6 .*, got 7"):
        load_data(config, Path())


def test_fingerprints(tmp_path):
    names = ("digits", "canvas", "cifar10", "cifar100", "fake")
    assert [fingerprint(Config(data=name), Path()) for name in names] == list(names)
    names = ("here", "there", "more", "other", "edited")
    here, there, more, other, edited = (tmp_path / name for name in names)
    marks = [
        fingerprint(write_folders(here), Path()),
        fingerprint(write_folders(there), Path()),
        fingerprint(write_folders(more, val=3), Path()),
        fingerprint(write_folders(other, classes=("cat", "eel")), Path()),
    ]
    config = write_folders(edited)
    image = next((edited / "train").rglob("*.png"))
    Image.new("RGB", (90, 70)).save(image)
    marks.append(fingerprint(config, Path()))
    assert marks[0] == marks[1]
    assert len(set(marks)) == 4
    assert all(mark.startswith("imagefolder-") for mark in marks)
    assert not any(str(tmp_path) in mark for mark in marks)
