"""Looking at test images with the networks of a study's finished runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dropblock_hooks import gradcam
from experiments.checkpoint import read_weights
from experiments.config import Config
from experiments.data import load_data
from experiments.datasets.images import Images
from experiments.field_checks import closest
from experiments.models import prepare
from experiments.running.records import Run, StudyRecord
from experiments.saliency.spread import THRESHOLD, Boxes, entropies, touched
from experiments.seeds import own_generator

BATCH = 64  # images


@dataclass(frozen=True)
class Saliency:
    """What the maps of one run's test images are like.

    Args:
        condition: of the run.
        seed: of the run.
        layer: that the maps are of.
        images: how many there are.
        empty: how many maps are zero everywhere; they are no part of the means.
        entropy: mean, in [0, 1]; None if all maps are empty.
        share: of an image's objects that are touched, mean; None without boxes, too.
    """

    condition: str
    seed: int
    layer: str
    images: int
    empty: int
    entropy: float | None
    share: float | None


@dataclass(frozen=True)
class Picture:
    """Maps of the same few images, as several networks give them.

    Args:
        seed: of the runs.
        numbers: of the images in the test set.
        labels: their classes.
        images: (n, C, H, W).
        boxes: of their objects; None if unknown.
        maps: condition -> (n, h, w).
    """

    seed: int
    numbers: list[int]
    labels: list[int]
    images: Tensor
    boxes: Boxes | None
    maps: dict[str, Tensor]


@dataclass(frozen=True)
class Measured:
    """What came of a study's runs.

    Args:
        study: its name.
        conditions: those that were asked for; the first is what others are compared to.
        runs: one for each finished run.
        absent: runs that are not finished, in words.
        threshold: of a box that is touched.
        drawn_by: the number that draws images and the seed of the picture.
        picture: None where no seed has finished runs of all conditions.
    """

    study: str
    conditions: tuple[str, ...]
    runs: tuple[Saliency, ...]
    absent: tuple[str, ...]
    threshold: float
    drawn_by: int
    picture: Picture | None


def measure(
    record: StudyRecord,
    runs: Sequence[Run],
    conditions: Sequence[str] = (),
    *,
    images: int | None = None,
    rows: int = 4,
    drawn_by: int = 0,
    layer: str | None = None,
    threshold: float = THRESHOLD,
    boxes_of: Callable[[Config], Boxes | None] | None = None,
    data_dir: Path = Path("data"),
    on_run: Callable[[Saliency], None] = lambda found: None,
) -> Measured:
    """Look at the test images with the networks of a study's finished runs.

    Args:
        record: of the study.
        runs: of the study, read from their directories.
        conditions: whose networks; all of them by default.
        images: how many of the test images, drawn; all by default.
        rows: how many images the picture has, drawn from these.
        drawn_by: the number that draws them, and the seed whose networks the picture shows.
        layer: a selector of the layer whose maps are taken; the last feature stage by default.
        threshold: share of its largest value that a map has, on average, in a box it touches.
        boxes_of: gives the boxes of the test images; by default those of data that have them.
        data_dir: folder of the CIFAR files.
        on_run: called with each run that was looked at.

    Raises:
        ValueError: for a condition that the study does not have, conditions of unlike data,
            without a finished run, and for what does not fit the networks.
        CheckpointDamaged: if a run's weights can't be read.
        OSError: likewise.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be in (0, 1], got {threshold}")
    for name, number in (("images", images), ("rows", rows)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    names = _chosen(record, conditions)
    of_names = [run for name in names for run in runs if run.condition == name]
    _check_same_data(of_names)
    finished = [run for run in of_names if run.status == "finished"]
    if not finished:
        raise ValueError(f"no run of {', '.join(names)} is finished: there are no networks")
    absent = [f"{run.condition}, seed {run.seed}: {run.status}" for run in of_names]
    absent = [text for text, run in zip(absent, of_names, strict=True) if run not in finished]
    boxes = (boxes_of or known_boxes)(finished[0].config)
    lens = _Lens(layer, threshold, boxes, drawn_by, images, data_dir)
    found = []
    for run in finished:
        found.append(lens.look(run))
        on_run(found[-1])
    layers = sorted({one.layer for one in found})
    if len(layers) > 1:
        raise ValueError(f"the networks' maps are of unlike layers, {', '.join(layers)}: name one")
    by_seed: dict[int, list[Run]] = {}
    for run in finished:
        by_seed.setdefault(run.seed, []).append(run)
    whole = [seed for seed in record.seeds if len(by_seed.get(seed, ())) == len(names)]
    order = torch.randperm(len(whole), generator=own_generator(drawn_by, "saliency seed"))
    picture = lens.picture(by_seed[whole[order[0]]], rows) if whole else None
    return Measured(record.name, names, tuple(found), tuple(absent), threshold, drawn_by, picture)


def known_boxes(config: Config) -> Boxes | None:
    """The boxes of the objects in the test images, of data that know them."""
    if config.data != "canvas":
        return None
    from experiments.datasets.canvas import SIZE, boxes

    return [[tuple(box) for box in of_one] for of_one in boxes(config.image_size or SIZE).tolist()]


def _chosen(record: StudyRecord, conditions: Sequence[str]) -> tuple[str, ...]:
    """The conditions asked for, the baseline first if it is one of them."""
    names = tuple(dict.fromkeys(conditions or record.conditions))
    for name in names:
        if name not in record.conditions:
            known = ", ".join(record.conditions)
            hint = closest(name, record.conditions) or f"; known: {known}"
            raise ValueError(f"{record.name} has no condition {name!r}{hint}")
    return tuple(sorted(names, key=lambda name: name != record.baseline))


def _check_same_data(runs: Sequence[Run]) -> None:
    """Refuse conditions whose test images differ: a comparison would be of the images."""
    fields = ("data", "image_size", "train_images")
    first = runs[0]
    for run in runs:
        for name in fields:
            if (ours := getattr(run.config, name)) != (theirs := getattr(first.config, name)):
                raise ValueError(
                    f"the conditions must have the same test images: {name} is {theirs!r} in "
                    f"{first.condition!r}, and {ours!r} in {run.condition!r}"
                )


@dataclass(frozen=True)
class _Seen:
    """A batch of test images, and their maps."""

    numbers: list[int]
    images: Tensor
    labels: list[int]
    maps: Tensor
    layer: str

    @property
    def size(self) -> tuple[int, int]:
        return self.images.shape[2], self.images.shape[3]


@dataclass(frozen=True)
class _Lens:
    """How runs are looked at."""

    layer: str | None
    threshold: float
    boxes: Boxes | None
    drawn_by: int
    images: int | None
    data_dir: Path

    def look(self, run: Run) -> Saliency:
        """The numbers of one run."""
        model, tests = self._loaded(run)
        numbers = sorted(self._order(tests)[: self.images])
        spread, shares, empty, layer = [], [], 0, ""
        for seen in self._seen(model, tests, numbers):
            full, layer = seen.maps.flatten(1).any(1).tolist(), seen.layer
            empty += full.count(False)
            of_part = [entropies(seen.maps).tolist(), self._shares(seen)]
            for found, values in zip((spread, shares), of_part, strict=True):
                found += [value for value, counts in zip(values, full, strict=False) if counts]
        means = [sum(found) / len(found) if found else None for found in (spread, shares)]
        return Saliency(run.condition, run.seed, layer, len(numbers), empty, *means)

    def _shares(self, seen: _Seen) -> list[float]:
        """For each image the share of its boxes that are touched; none without boxes."""
        if self.boxes is None:
            return []
        boxes = [self.boxes[number] for number in seen.numbers]
        of_images = touched(seen.maps, boxes, seen.size, self.threshold)
        return [sum(hits) / len(hits) for hits in of_images]

    def picture(self, runs: Sequence[Run], rows: int) -> Picture:
        """Maps of some images, by runs of one seed."""
        maps = {}
        for run in runs:
            model, tests = self._loaded(run)
            numbers = self._order(tests)[: self.images][:rows]
            [seen] = self._seen(model, tests, numbers, len(numbers))
            maps[run.condition] = seen.maps
        boxes = None if self.boxes is None else [self.boxes[number] for number in numbers]
        return Picture(runs[0].seed, numbers, seen.labels, seen.images, boxes, maps)

    def _loaded(self, run: Run) -> tuple[nn.Module, Images]:
        """The network that was tested, and its clean test images."""
        assert run.directory is not None
        data = load_data(replace(run.config, test=True), self.data_dir)  # also of a search's runs
        model, _ = prepare(run.config, data)
        path = run.directory / "checkpoint.pt"
        try:
            model.load_state_dict(read_weights(path, run.config))
        except RuntimeError as error:  # torch's, of other names or shapes
            raise ValueError(f"{path} does not fit {run.config.model}: {error}") from error
        tests = data.tests["clean"]
        if self.boxes is not None and len(self.boxes) != len(tests):
            raise ValueError(
                f"there must be boxes for each of {len(tests)} test images, got {len(self.boxes)}"
            )
        return model, tests

    def _order(self, tests: Images) -> list[int]:
        """The numbers of the test images, as they are drawn."""
        generator = own_generator(self.drawn_by, "saliency images")
        order: list[int] = torch.randperm(len(tests), generator=generator).tolist()
        return order

    def _seen(
        self, model: nn.Module, tests: Images, numbers: Sequence[int], batch: int = BATCH
    ) -> Iterator[_Seen]:
        """The maps, batch by batch."""
        layer = self.layer
        for first in range(0, len(numbers), batch):
            part = list(numbers[first : first + batch])
            images, labels = tests.__getitems__([(0, number) for number in part])
            with warnings.catch_warnings():  # they are counted
                warnings.filterwarnings("ignore", message="no place at layer")
                cam = gradcam(model, images, layer, labels.tolist())
            layer = layer or cam.layer  # the first batch chooses for all
            yield _Seen(part, images, labels.tolist(), cam.raw.detach(), cam.layer)
