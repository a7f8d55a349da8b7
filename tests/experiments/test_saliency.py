"""How far Grad-CAM spreads: the two numbers, and what is written of a study's finished runs."""

import csv
import json
import math
import sys
import warnings
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from dropblock_hooks import gradcam
from experiments import checkpoint
from experiments.config import Runtime
from experiments.data import load_data
from experiments.models import prepare
from experiments.recounting.numbers import read_study
from experiments.recounting.saliency import recount_saliency
from experiments.report import write_report
from experiments.reporting.plot_style import own_settings
from experiments.reporting.tables import p_text
from experiments.running.launch import launch
from experiments.running.records import read_runs
from experiments.saliency.measure import known_boxes, measure
from experiments.saliency.picture import plot_saliency
from experiments.saliency.report import describe, write
from experiments.saliency.spread import entropies, touched
from tests.experiments.launches import DROP, TINY, begin, make_study

BIG = replace(TINY, image_size=16, model_args={"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8]})
LAYER = "layer2"  # of 2x2 places


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The directory of a study whose runs are finished, but for one."""
    directory = tmp_path_factory.mktemp("runs") / "study"
    made = make_study(1, (1, 2, 3), none=BIG, drop=replace(BIG, spec=DROP, ema=0.5))
    begin(made, directory)
    assert launch(made, directory, Runtime(), backend="sequential").failed == []
    _, runs = read_runs(directory)
    [one] = [run for run in runs if (run.condition, run.seed) == ("drop", 2)]
    (one.directory / "done.json").unlink()
    return directory


def boxes_of(config):
    """Two boxes in each of the fake test images."""
    return [[(0, 0, 6), (number % 10, 8, 6)] for number in range(len(clean_of(config)))]


def clean_of(config):
    return load_data(config, None).tests["clean"]


def maps_of(run):
    """Maps and images of a run, by the shortest way."""
    model, _ = prepare(run.config, load_data(run.config, None))
    state = torch.load(run.directory / "checkpoint.pt", weights_only=True)
    model.load_state_dict(state["average" if run.config.ema else "model"])
    tests = clean_of(run.config)
    images, labels = tests.__getitems__([(0, number) for number in range(len(tests))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gradcam(model, images, LAYER, labels.tolist()).raw.numpy(), images


def in_numpy(maps, boxes, size, threshold):
    """Entropy and touched boxes of each map, or None, from the definitions."""
    found = []
    for map_, of_one in zip(maps.astype(np.float64), boxes, strict=True):
        if not map_.any():
            found.append(None)
            continue
        p = map_.ravel() / map_.sum()
        entropy = -sum(x * math.log(x) for x in p if x > 0) / math.log(p.size)
        large, hits = enlarged(map_, size), []
        for top, left, side in of_one:
            mean = large[top : top + side, left : left + side].mean()
            hits.append(bool(mean >= threshold * map_.max()))
        found.append((entropy, hits))
    return found


def enlarged(map_, size):
    """Bilinear, with pixels as squares: beyond the middle of the outer ones it goes on level."""
    rows, columns = (
        (np.arange(large) + 0.5) * small / large - 0.5
        for large, small in zip(size, map_.shape, strict=True)
    )
    across = np.array([np.interp(columns, np.arange(map_.shape[1]), line) for line in map_])
    return np.array([np.interp(rows, np.arange(map_.shape[0]), line) for line in across.T]).T


def test_the_numbers_are_those_of_the_definitions():
    rng = np.random.default_rng(0)
    maps = rng.random((40, 5, 7)) ** 6
    maps[3] = 0
    boxes = [
        [(int(rng.integers(0, 30)), int(rng.integers(0, 40)), int(rng.integers(1, 11)))
         for _ in range(3)]
        for _ in maps
    ]  # fmt: skip
    found = in_numpy(maps, boxes, (40, 50), 0.2)
    entropy = entropies(torch.tensor(maps))
    hits = touched(torch.tensor(maps), boxes, (40, 50), 0.2)
    assert entropy[3].isnan()
    assert hits[3] == [False] * 3
    for number, expected in enumerate(found):
        if expected is not None:
            assert entropy[number].item() == pytest.approx(expected[0], abs=1e-12)
            assert hits[number] == expected[1]
    flat = [hit for of_one in hits for hit in of_one]
    assert 20 < sum(flat) < 100


def test_a_map_times_a_number_has_the_same_numbers():
    maps = torch.rand(20, 4, 4) ** 5
    boxes = [[(0, 0, 5), (3, 9, 7)]] * 20
    for factor in (1e-6, 1e6):
        assert torch.allclose(entropies(maps), entropies(factor * maps), atol=1e-6)
        assert touched(maps, boxes, (16, 16)) == touched(factor * maps, boxes, (16, 16))


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (lambda: entropies(torch.ones(2, 1, 1)), "1x1 has no spread"),
        (lambda: entropies(-torch.ones(2, 2, 2)), "0 or more"),
        (lambda: entropies(torch.full((1, 2, 2), math.nan)), "0 or more"),
        (lambda: entropies(torch.ones(2, 2)), r"\(n, h, w\)"),
        (lambda: touched(torch.ones(2, 2, 2), [[(0, 0, 1)]], (4, 4)), "each of 2 images, got 1"),
        (lambda: touched(torch.ones(1, 2, 2), [[]], (4, 4)), "image 0 has no box"),
        (lambda: touched(torch.ones(1, 2, 2), [[(0, 2, 3)]], (4, 4)), r"\(0, 2, 3\).*4x4"),
        (lambda: touched(torch.ones(1, 2, 2), [[(-1, 2, 2)]], (4, 4)), "not in the image"),
        (lambda: touched(torch.ones(1, 2, 2), [[(0, 0, 0)]], (4, 4)), "not in the image"),
    ],
)
def test_what_has_no_numbers_is_refused(work, error):
    with pytest.raises(ValueError, match=error):
        work()


def test_runs_are_measured_with_the_weights_that_were_tested(study):
    record, runs = read_runs(study)
    measured = measure(record, runs, layer=LAYER, boxes_of=boxes_of, threshold=0.3)
    finished = [run for run in runs if run.status == "finished"]
    assert len(measured.runs) == len(finished) == 5
    assert measured.conditions == ("none", "drop")
    assert measured.absent == ("drop, seed 2: missing",)
    empty = 0
    for found in measured.runs:
        [run] = [r for r in finished if (r.condition, r.seed) == (found.condition, found.seed)]
        maps, images = maps_of(run)
        each = in_numpy(maps, boxes_of(run.config), tuple(images.shape[2:]), 0.3)
        full = [one for one in each if one is not None]
        assert (found.images, found.empty) == (len(maps), len(maps) - len(full))
        assert found.layer == LAYER
        assert found.entropy == pytest.approx(np.mean([one[0] for one in full]), abs=1e-5)
        shares = [np.mean(hits) for _, hits in full]
        assert found.share == pytest.approx(np.mean(shares), abs=1e-9)
        empty += found.empty
    assert empty > 0


def test_without_boxes_there_is_the_entropy_alone(study):
    measured = measure(*read_runs(study), ["none"], layer=LAYER)
    assert {run.share for run in measured.runs} == {None}
    assert "objects" not in describe(measured)


def test_images_and_seed_are_drawn_by_the_number(study):
    def drawn(**how):
        picture = measure(*read_runs(study), layer=LAYER, images=5, rows=3, **how).picture
        return picture.seed, picture.numbers

    assert drawn() == drawn()
    found = [drawn(drawn_by=number) for number in range(4)]
    assert {seed for seed, _ in found} <= {1, 3}  # of which both conditions have a network
    assert len({tuple(numbers) for _, numbers in found}) == 4
    measured = measure(*read_runs(study), ["drop"], layer=LAYER, images=5, rows=9)
    assert {run.images for run in measured.runs} == {5}
    assert len(measured.picture.numbers) == 5


def test_the_conditions_of_a_picture_show_the_same_images(study):
    record, runs = read_runs(study)
    measured = measure(record, runs, layer=LAYER, rows=2, boxes_of=boxes_of)
    picture = measured.picture
    for name, maps in picture.maps.items():
        [run] = [run for run in runs if (run.condition, run.seed) == (name, picture.seed)]
        every, images = maps_of(run)
        assert np.allclose(maps.numpy(), every[picture.numbers], atol=1e-6)
        assert torch.equal(picture.images, images[picture.numbers])


def test_text_table_and_picture_are_written(study, tmp_path):
    measured = measure(*read_runs(study), layer=LAYER, boxes_of=boxes_of)
    text = write(measured, tmp_path).read_text()
    with (tmp_path / "saliency.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["condition"], line["seed"]) for line in lines] == [
        (run.condition, str(run.seed)) for run in measured.runs
    ]
    assert [float(line["entropy"]) for line in lines] == [run.entropy for run in measured.runs]
    assert {(line["threshold"], line["number"]) for line in lines} == {("0.2", "0")}
    shown = {line["seed"]: line["shown"] for line in lines if line["shown"]}
    assert shown == {str(measured.picture.seed): " ".join(map(str, measured.picture.numbers))}
    by_seed = {(run.condition, run.seed): run.entropy for run in measured.runs}
    differences = [by_seed["drop", seed] - by_seed["none", seed] for seed in (1, 3)]
    mean = 100 * np.mean([by_seed["drop", seed] for seed in (1, 3)])
    points = f"{100 * np.mean(differences):+.2f}"
    assert f"| drop | 2 | {mean:.2f} ±" in text
    assert f"| {points} |" in text
    assert f"- **drop** minus none: {points} points over 2 seeds: too few for an interval" in text
    empty = sum(run.empty for run in measured.runs)
    assert f"{empty} of {sum(run.images for run in measured.runs)} maps are zero everywhere" in text
    assert "drop, seed 2: missing" in text
    assert "at least 20 % of its largest value" in text
    path = tmp_path / "saliency.png"
    assert path.stat().st_size < 100_000
    with Image.open(path) as image:
        assert image.width < 1000


def test_differences_are_tested_as_those_of_accuracies(study):
    measured = measure(*read_runs(study), ["none"], layer=LAYER)
    [none] = {run.condition: run for run in measured.runs}.values()
    rng, runs, scores = np.random.default_rng(1), [], {}
    for name, gain in (("none", 0.0), ("a", 0.02), ("b", 0.0)):
        scores[name] = 0.5 + gain + rng.normal(0, 0.01, 6)
        for seed, entropy in enumerate(scores[name]):
            runs.append(replace(none, condition=name, seed=seed, entropy=float(entropy)))
    text = describe(replace(measured, conditions=("none", "a", "b"), runs=tuple(runs)))
    found = {name: stats.ttest_rel(scores[name], scores["none"]) for name in ("a", "b")}
    p, other = (found[name].pvalue for name in ("a", "b"))
    assert 2 * p < 0.05 < other
    for name, corrected in (("a", 2 * p), ("b", other)):
        low, high = (100 * end for end in found[name].confidence_interval())
        mean = 100 * np.mean(scores[name] - scores["none"])
        ends = f"[{low:+.2f}, {high:+.2f}]"
        holm = p_text(corrected)
        said = f"- **{name}** minus none: {mean:+.2f} points {ends}, n 6, Holm p {holm}: "
        assert said + ("higher." if name == "a" else "no difference shown; up to ") in text
        assert f"| {mean:+.2f} {ends} | " in text
        assert f" | {holm} |" in text
    assert "over the 2 comparisons of this table" in text


@pytest.mark.usefixtures("unrendered")
def test_what_is_written_beside_a_report_is_what_its_runs_tell(study, tmp_path):
    write_report(study, tmp_path)
    measured = measure(*read_runs(study), layer=LAYER, boxes_of=boxes_of, threshold=0.3)
    text = write(measured, tmp_path / "saliency")
    assert recount_saliency(read_study(tmp_path)) == []
    text.write_text(text.read_text().replace("30 % of its largest", "20 % of its largest"))
    (fault,) = recount_saliency(read_study(tmp_path))
    assert "at least 30 %" in fault.recounted


def test_a_seed_without_all_networks_makes_no_picture(study, tmp_path):
    record, runs = read_runs(study)
    (tmp_path / "saliency.png").write_bytes(b"of an earlier state")
    some = [run for run in runs if run.seed == 2]
    measured = measure(replace(record, seeds=(2,)), some, layer=LAYER)
    assert measured.picture is None
    assert "saliency.png" not in write(measured, tmp_path).read_text()
    assert not (tmp_path / "saliency.png").exists()


def test_the_picture_says_which_boxes_are_touched_and_which_maps_are_empty(study):
    measured = measure(*read_runs(study), layer=LAYER, rows=3, boxes_of=boxes_of)
    maps = {name: found.clone() for name, found in measured.picture.maps.items()}
    maps["none"][0] = 0
    maps["none"][1] = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    picture = replace(measured.picture, maps=maps, boxes=[[(0, 0, 6), (9, 9, 6)]] * 3)
    with own_settings():
        figure = plot_saliency(picture, 0.2, "a study")
    assert f"a study: Grad-CAM of the images' classes, seed {picture.seed}" in figure.get_suptitle()
    cells = [axes for axes in figure.axes if axes.get_xlabel()]
    assert len(cells) == 9
    assert cells[1].get_xlabel() == "empty map, 0 of 2"
    assert cells[4].get_xlabel() == "entropy 0.00, 1 of 2"
    assert [patch.get_linestyle() == "-" for patch in cells[4].patches] == [True, False]
    titles = [axes.get_title() for axes in cells]
    assert titles == ["image", "none", "drop"] + [""] * 6
    assert cells[3].get_xlabel() == f"image {picture.numbers[1]}, class {picture.labels[1]}"


def test_boxes_of_canvases_are_known(monkeypatch):
    canvas = ModuleType("canvas")
    canvas.SIZE, canvas.boxes = 64, lambda size: torch.full((2, 3, 3), size)
    monkeypatch.setitem(sys.modules, "experiments.datasets.canvas", canvas)
    config = replace(TINY, image_size=None)
    object.__setattr__(config, "data", "canvas")
    assert known_boxes(config) == [[(64, 64, 64)] * 3] * 2
    assert known_boxes(TINY) is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"conditions": ["drip"]}, r"study has no condition 'drip' \(closest: drop\)"),
        ({"threshold": 0.0}, r"threshold must be in \(0, 1\], got 0"),
        ({"images": 0}, "images must be at least 1, got 0"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"layer": "layer4"}, "its map is 1x1, which has no positions to compare"),
        ({"layer": "layer9"}, "layer9"),
        ({"boxes_of": lambda config: [[(0, 0, 1)]], "layer": LAYER}, "test images, got 1"),
    ],
)
def test_bad_input_is_refused(study, options, error):
    with pytest.raises(ValueError, match=error):
        measure(*read_runs(study), **options)


def test_conditions_of_unlike_images_are_refused(study):
    record, runs = read_runs(study)
    changed = [
        replace(run, config=replace(run.config, train_images=10)) if run.condition == "drop"
        else run for run in runs
    ]  # fmt: skip
    with pytest.raises(ValueError, match="train_images is 20 in 'none', and 10 in 'drop'"):
        measure(record, changed, layer=LAYER)


def test_without_a_finished_run_there_is_nothing_to_look_at(study):
    record, runs = read_runs(study)
    runs = [replace(run, status="failed") for run in runs]
    with pytest.raises(ValueError, match="no run of none, drop is finished"):
        measure(record, runs)


def test_runs_that_were_not_tested_are_looked_at_as_the_others(study, tmp_path):
    made = make_study(1, (1,), none=replace(BIG, test=False))
    begin(made, tmp_path)
    assert launch(made, tmp_path, Runtime(), backend="sequential").failed == []
    [untested] = measure(*read_runs(tmp_path), layer=LAYER).runs
    assert untested in measure(*read_runs(study), ["none"], layer=LAYER).runs


def test_damaged_weights_and_those_of_others_are_refused(study, tmp_path):
    _, runs = read_runs(study)
    run = next(run for run in runs if run.status == "finished")
    data = bytearray((run.directory / "checkpoint.pt").read_bytes())
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(data)
    with pytest.raises(checkpoint.AnotherRun, match="seed is 1 there, and 2 here"):
        checkpoint.read_weights(path, replace(run.config, seed=2))
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointDamaged, match="digest does not match"):
        checkpoint.read_weights(path, run.config)


def test_the_command_writes_and_says_what_it_found(study, call, capsys):
    args = (study, "--conditions", "drop", "none", "--layer", LAYER, "--rows", "2", "--images", "9")
    assert call("saliency.py", *args) == 0
    out, err = capsys.readouterr()
    assert out.count("entropy") == 5
    assert "drop, seed 2: missing: it does not count" in err
    assert (study / "saliency" / "saliency.png").is_file()
    assert call("saliency.py", study.parent) == 2
    assert "is not a study's directory" in capsys.readouterr().err
    assert json.loads((study / "study.json").read_text())["name"] == "study"
