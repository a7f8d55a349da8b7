"""A study file: read whole or refused whole, its grid expanded, each run named by what it does."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from PIL import Image

from experiments.config import Config, resolve, run_hash
from experiments.data import make_data
from experiments.datasets.canvas import training_canvases
from experiments.datasets.images import TestImages, TrainImages
from experiments.datasets.sources import fake, load_source
from experiments.study import StudyError, read_study

TINY = """
question: Does it help?
base:
  model_args: {layers: [1, 1, 1, 1], channels: [8, 8, 8, 8], output_stride: 8}
  train_images: 20
  epochs: 1
conditions:
  none:
  Dropout2d: {spec: {"layer4.0": "Dropout2d(p=0.5)"}}
baseline: none
seeds: [7, 8]
"""
GRID = """
base:
  model_args: {layers: [1, 1, 1, 1], channels: [8, 8, 8, 8]}
  train_images: 20
grid:
  factors:
    placement: {stage 2: layer2.0, all: "layer[234].0"}
    rate: [0.1, 0.3]
  fields:
    spec: {"${placement}": {DropBlock2d: {p: "${rate}", block_size: 3}}}
conditions:
  none: {}
  A/A: {replica: 1}
baseline: none
seeds: [1]
"""


@pytest.fixture
def study_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "study.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_runs_come_seed_by_seed_with_the_conditions_fields(study_file):
    study = read_study(study_file(TINY))
    assert (study.name, study.question, study.seeds) == ("study", "Does it help?", (7, 8))
    assert [(run.condition, run.config.seed) for run in study.runs()] == [
        ("none", 7),
        ("Dropout2d", 7),
        ("none", 8),
        ("Dropout2d", 8),
    ]
    assert {run.config.train_images for run in study.runs()} == {20}
    assert len({run.hash for run in study.runs()}) == 4
    assert study.conditions["Dropout2d"].spec == {"layer4.0": {"Dropout2d": {"p": 0.5}}}


def test_a_grid_is_every_combination_of_levels_by_name(study_file):
    study = read_study(study_file(GRID))
    assert list(study.conditions) == [
        "stage 2, 0.1",
        "stage 2, 0.3",
        "all, 0.1",
        "all, 0.3",
        "none",
        "A/A",
    ]
    assert study.factors["all, 0.1"] == {"placement": "all", "rate": "0.1"}
    assert study.factors["none"] == {}
    spec = study.conditions["all, 0.1"].spec
    assert spec == {"layer[234].0": {"DropBlock2d": {"p": 0.1, "block_size": 3}}}


def test_the_command_lines_base_comes_over_that_of_the_file(study_file):
    study = read_study(study_file(TINY), "fake", {"train_images": None, "epochs": 5})
    [config] = {(c.data, c.train_images, c.epochs) for c in study.conditions.values()}
    assert config == ("fake", None, 5)
    with pytest.raises(StudyError, match=r"--base: field 'epoch' is unknown \(closest: epochs"):
        read_study(study_file(TINY), None, {"epoch": 5})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds:", "seed:", "field 'seed' is unknown (closest: seeds"),
        ("seeds: [7, 8]", "seeds: []", "seeds must be .* at least one, got []"),
        ("seeds: [7, 8]", "seeds: [7, 8, 7]", "seeds must differ, got [7] more than once"),
        ("seeds: [7, 8]", "seeds: [7, x]", "seeds must be a list of whole numbers"),
        ("epochs: 1", "epoch: 1", "base: field 'epoch' is unknown (closest: epochs"),
        ("epochs: 1", "epochs: many", "epochs"),
        ("epochs: 1", "epochs: 0", "conditions.none: epochs must be at least 1, got 0"),
        ("epochs: 1", "seed: 1", "base: seed does not belong here"),
        ("epochs: 1", "devices: 2", "one process, got devices 2"),
        ("epochs: 1", "model: resnet81", "unknown model 'resnet81' (closest: "),
        ("epochs: 1", "data: digit", "unknown data 'digit' (closest: digits"),
        ("epochs: 1", "data: imagefolder:nowhere", "nowhere"),
        ("epochs: 1", "model: '${m}'", "base: '${m}': placeholders stand in grid.fields"),
        ("epochs: 1", "epochs: 1\n  epochs: 2", "line 7: the key 'epochs' stands twice"),
        ("baseline: none", "baseline: nine", "condition 'nine' is unknown (closest: none"),
        ("baseline: none", "baseline: 3", "condition 3 is unknown; known: none, Dropout2d"),
        ("baseline: none", "", "baseline must name the condition"),
        ("  none:", "  Dropout2d:", "the key 'Dropout2d' stands twice"),
        ("  none:", "  none: {spec: {layer4.0: Dropout2d(p=0.5)}}", "'Dropout2d' are the same"),
        ("  none:", "  other: {replica: 0}\n  none:", "'other' and 'none' are the same"),
        ("  none:", "  other: {spec: {}}\n  none:", "conditions.other: "),
        ("  none:", "  none: 3", "conditions.none must map fields of Config to values, got 3"),
        ("  none:", "  no: {}\n  none:", "conditions: a name must be text, got False; quote it"),
        ("layer4.0", "layer5.0", "layer5.0"),
        ("(p=0.5)", "(p=1.5)", "1.5"),
        ("[8, 8, 8, 8]", "[8]", "conditions.none: resnet18 fails on a 32x32 image"),
        ("train_images: 20", "train_images: 5000", "5000"),
        ("question: Does it help?", "question: [3]", "question must be text, got [3]"),
        ("baseline: none", "baseline: [none", "line 1"),
        ("  none:", '  "": {}\n  none:', "conditions: a name must be a line of text .* got ''"),
        ("  none:", '  " \t": {}\n  none:', "a name must be a line of text, not blank, got"),
        ("  none:", '  "a\\nb": {}\n  none:', "must be a line of text, not blank, got 'a\\nb'"),
        ("  none:", '  "a\\n": {}\n  none:', "must be a line of text, not blank, got 'a\\n'"),
        ("conditions:", "conditions: &c\n  again: *c", "an alias stands within what it names"),
        ("conditions:", "question2: &q [*q, *q]\nconditions:", "an alias stands within"),
    ],
)
def test_a_faulty_study_is_refused(study_file, old, new, message):
    assert TINY.count(old) == 1
    with pytest.raises(StudyError) as error:
        read_study(study_file(TINY.replace(old, new)))
    for part in message.split(".*"):
        assert part.strip() in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rate: [0.1, 0.3]", "rate: []", "grid.factors.rate must have at least one level, got []"),
        ("rate: [0.1, 0.3]", "rate: {}", "grid.factors.rate must have at least one level, got {}"),
        ("rate: [0.1, 0.3]", "rate: 3", "grid.factors.rate must have at least one level, got 3"),
        ("rate: [0.1, 0.3]", "rate: [0.1, 0.1]", "grid.factors.rate: the level 0.1 stands twice"),
        ("rate: [0.1, 0.3]", "rate: [{a: 1}]", "needs a name: write name: value"),
        ("rate: [0.1, 0.3]", "rate: {no: 0.1}", "a level must be text, got False; quote it"),
        (
            "rate: [0.1, 0.3]",
            "rate: [2020-01-01]",
            "grid.factors.rate: levels must be text, numbers, true/false or null, got datetime",
        ),
        ("rate: [0.1, 0.3]", "rate: {x: [2020-01-01]}", "true/false or null, got datetime"),
        ("rate: [0.1, 0.3]", 'rate: ["", 0.1]', "level must be a line of text, not blank, got ''"),
        ("rate: [0.1, 0.3]", 'rate: {" ": 0.1}', "must be a line of text, not blank, got ' '"),
        ("rate: [0.1, 0.3]", 'rate: {"a\\nb": 0.1}', "line of text, not blank, got 'a\\nb'"),
        (
            "rate: [0.1, 0.3]",
            "rate: {x: 0.1, y: 0.1}",
            "'stage 2, x' and 'stage 2, y' are the same",
        ),
        ("rate: [0.1, 0.3]", "rate: [0.1, 1.3]", "conditions.stage 2, 1.3: "),
        ("rate: [0.1, 0.3]", "rate: [0.1]\n    size: [3]", "'size' stands nowhere in grid.fields"),
        ('"${rate}"', '"${rat}"', "factor 'rat' is unknown (closest: rate"),
        ('"${rate}"', '"${rate"', "the placeholder in '${rate' is not closed"),
        ('"${rate}"', '"${}"', "factor '' is unknown; known: placement, rate"),
        ('"${placement}":', '"${placement}": {}, layer2.0:', "become the same: ['layer2.0']"),
        (
            "  none: {}",
            '  none: {model_args: {"${train_images}": 1, 20: 2}}',
            "keys of ['${train_images}', 20] become the same: [20]",
        ),
        ("layer2.0", "layer7.0", "layer7.0"),
        ("layer2.0", "[layer2.0]", "['layer2.0'] can't be a key, in ['${placement}']"),
        ("    spec:", "    spek:", "grid.fields: field 'spek' is unknown (closest: spec"),
        ("    spec:", "    seed: 3\n    spec:", "grid.fields: seed does not belong here"),
        ("  fields:", "  felds:", "grid: field 'felds' is unknown (closest: fields"),
        ("  none: {}", "  all, 0.1: {}", "conditions.all, 0.1: the grid has a condition of"),
        (
            "baseline: none",
            "baseline: all 0.1",
            "condition 'all 0.1' is unknown (closest: all, 0.1",
        ),
    ],
)
def test_a_faulty_grid_is_refused(study_file, old, new, message):
    assert old in GRID
    with pytest.raises(StudyError) as error:
        read_study(study_file(GRID.replace(old, new, 1)))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("{}", "grid.factors must name at least one factor, got None"),
        ("[]", "grid must have factors and fields, got []"),
        ("{factors: {}, fields: {lr: 1}}", "grid.factors must name at least one factor, got {}"),
        ("{factors: {lr: [1]}}", "grid.fields must map fields of Config to values, got None"),
    ],
)
def test_an_empty_grid_is_refused(study_file, grid, message):
    with pytest.raises(StudyError) as error:
        read_study(study_file(TINY + f"grid: {grid}\n"))
    assert message in str(error.value)


ARMS = """
base:
  model_args: {layers: [1, 1, 1, 1], channels: [8, 8, 8, 8]}
  train_images: 20
grid:
  factors:
    arm:
      none: {lr: 0.1, spec: null}
      Dropout2d:
        lr: 0.2
        spec: {layer4.0: "Dropout2d(p=LinearSchedule(start=0.0, stop=0.5, epochs=${epochs}))"}
    epochs: [3, 7]
  fields: {lr: "${arm.lr}", spec: "${arm.spec}", epochs: "${epochs}"}
baseline: none, 3
seeds: [1]
"""


def test_a_level_may_set_several_fields_and_take_other_levels(study_file):
    study = read_study(study_file(ARMS))
    assert study.factors["Dropout2d, 7"] == {"arm": "Dropout2d", "epochs": "7"}
    found = {name: (config.lr, config.epochs) for name, config in study.conditions.items()}
    assert found == {
        "none, 3": (0.1, 3),
        "none, 7": (0.1, 7),
        "Dropout2d, 3": (0.2, 3),
        "Dropout2d, 7": (0.2, 7),
    }
    assert study.conditions["none, 7"].spec is None
    for epochs in (3, 7):
        spec = study.conditions[f"Dropout2d, {epochs}"].spec
        assert spec["layer4.0"]["Dropout2d"]["p"]["LinearSchedule"]["epochs"] == epochs


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr: 0.1, ", "", "'${arm.lr}': factor 'arm.lr' is unknown (closest: arm, arm.spec)"),
        ("none: {lr: 0.1, spec: null}", "none: 3", "factor 'arm.lr' is unknown (closest: arm)"),
        ("epochs=${epochs}", "epochs=${epoch}", "grid.factors.arm.Dropout2d: 'Dropout2d(p="),
        ("epochs=${epochs}", "epochs=${arm}", "factor 'arm' is unknown; known: epochs"),
        ("epochs=${epochs}", "epochs=${epochs", "is not closed: ${factor}"),
        ('lr: "${arm.lr}", spec: "${arm.spec}"', "lr: 1", "'arm' stands nowhere in grid.fields"),
    ],
)
def test_a_faulty_level_of_several_fields_is_refused(study_file, old, new, message):
    assert ARMS.count(old) == 1
    with pytest.raises(StudyError) as error:
        read_study(study_file(ARMS.replace(old, new)))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["", "3", "[none]", "conditions: {}\nbaseline: a\nseeds: [1]", "baseline: a\nseeds: [1]"],
)
def test_an_empty_study_is_refused(study_file, text):
    with pytest.raises(
        StudyError, match=r"it is empty|mapping of conditions|must name at least one"
    ):
        read_study(study_file(text))


def test_all_problems_come_at_once(study_file):
    text = TINY.replace("epochs", "epoch").replace("[7, 8]", "[]").replace("question", "qestion")
    with pytest.raises(StudyError) as error:
        read_study(study_file(text))
    assert str(error.value).count("\n  - ") == 3


def test_the_name_of_a_run_depends_on_the_data_not_on_where_they_are():
    here, there = (resolve(Config(data=f"imagefolder:{path}")) for path in ("here", "there"))
    assert run_hash(here, "imagefolder-1") == run_hash(there, "imagefolder-1")
    assert run_hash(here, "imagefolder-1") != run_hash(here, "imagefolder-2")


def test_a_record_tells_conditions_factors_and_runs(study_file):
    record = read_study(study_file(GRID)).record("python ablate.py study.yaml")
    condition = record["conditions"]["all, 0.3"]
    assert condition["factors"] == {"placement": "all", "rate": "0.3"}
    assert condition["config"]["spec"]["layer[234].0"]["DropBlock2d"]["p"] == 0.3
    assert list(condition["runs"]) == ["1"]
    config = Config(**{**condition["config"], "seed": 1})
    assert run_hash(config, "digits") == condition["runs"]["1"]
    assert asdict(config)["train_images"] == 20


NUMBERS = (
    GRID.replace('p: "${rate}"', 'p: "${rate}", block_size: "${threads * 3}"').replace(
        ", block_size: 3}", "}"
    )
    + """
  shorter: {epochs: "${epochs * 0.3}", lr: "${lr / 2}"}
""".replace("\n", "", 1)
)
NUMBERS = NUMBERS.replace("baseline: none\nseeds: [1]\n", "") + "baseline: none\nseeds: [1]\n"


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ({"epoch": 3}, "--base: field 'epoch' is unknown (closest: epochs"),
        pytest.param({"epochs": "many"}, "epochs", marks=pytest.mark.slow),
        ({"epochs": None}, "epochs must be int, got None"),
        pytest.param({"lr": [0.1]}, "lr", marks=pytest.mark.slow),
        pytest.param({"threads": True}, "threads", marks=pytest.mark.slow),
        ({"seed": 3}, "--base: seed does not belong here"),
        ({"lr": "${epochs}"}, "--base: '${epochs}': placeholders stand in grid.fields"),
        ({3: 4}, "--base: field 3 is unknown"),
        ([3], "--base must map fields of Config to values, got [3]"),
    ],
)
def test_a_bad_base_is_told_without_false_errors_about_placeholders(study_file, base, problem):
    with pytest.raises(StudyError) as error:
        read_study(study_file(NUMBERS), base=base)
    text = str(error.value)
    assert problem in text
    assert "placeholder" not in text.replace(problem, "")
    told = [line for line in text.splitlines()[1:] if line.startswith("  - ")]
    assert all(problem.partition(":")[0] in line for line in told)


@pytest.mark.slow
def test_the_study_of_these_bases_is_right_without_them(study_file):
    study = read_study(study_file(NUMBERS))
    assert (study.conditions["shorter"].epochs, study.conditions["shorter"].lr) == (3, 0.05)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("base:\n", "base:\n  epoch: 3\n", "base: field 'epoch' is unknown"),
        ("baseline: none", "baseline: nobody", "baseline: condition 'nobody' is unknown"),
        ("A/A: {replica: 1}", "A/A: {replicas: 1}", "conditions.A/A: field 'replicas' is unknown"),
        ("A/A: {replica: 1}", "A/A: {lr: {1: 2, '1': 3}}", "conditions.A/A"),
    ],
)
def test_what_is_wrong_elsewhere_brings_no_false_errors_about_placeholders(
    study_file, old, new, problem
):
    assert old in NUMBERS
    with pytest.raises(StudyError) as error:
        read_study(study_file(NUMBERS.replace(old, new, 1)))
    assert problem in str(error.value)
    assert "placeholder" not in str(error.value)


def test_another_data_set_or_base_is_another_study(study_file):
    study = read_study(study_file(TINY), data="fake")
    assert study.name == "study-fake"
    assert {config.data for config in study.conditions.values()} == {"fake"}
    names = {
        read_study(study_file(TINY), base=base).name for base in (None, {"lr": 0.2}, {"lr": 0.3})
    }
    assert len(names) == 3
    assert "study" in names


def test_numbers_of_the_base_stand_in_conditions_and_grids(study_file):
    text = GRID.replace("conditions:", "conditions:\n  short: {epochs: '${epochs * 0.3}'}", 1)
    study = read_study(study_file(text), base={"epochs": 45})
    assert study.conditions["short"].epochs == round(45 * 0.3)
    spec = {"layer4.0": "Dropout2d(p=LinearSchedule(start=0.0, stop=0.5, epochs=${epochs}))"}
    text = TINY.replace('{"layer4.0": "Dropout2d(p=0.5)"}', str(spec))
    (schedule,) = (
        read_study(study_file(text), base={"epochs": 7}).conditions["Dropout2d"].spec.values()
    )
    assert schedule["Dropout2d"]["p"]["LinearSchedule"]["epochs"] == 7


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("  none: {}", "  none: {data: digits}", "conditions.none"),
        ("    spec:", "    data: digits\n    spec:", "grid.fields"),
    ],
)
def test_data_that_the_command_line_cannot_replace_are_told(study_file, old, new, where):
    text = GRID.replace(old, new)
    read_study(study_file(text))
    with pytest.raises(StudyError) as error:
        read_study(study_file(text), data="fake")
    assert f"{where}: data is set here, where --data fake can't replace it" in str(error.value)
    assert str(error.value).count("\n  - ") == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("mixup: 0.2, batch_size: 15", "mixup takes batches of an even number"),
        ("optimizer_args: {epsilon: 1}", "optimizer_args do not fit sgd"),
        ("lr_schedule_args: {cycles: 1}", "lr_schedule onecycle can't be made"),
    ],
)
def test_what_does_not_fit_the_training_is_told_before_any_run(study_file, fields, message):
    with pytest.raises(StudyError, match=f"conditions.Dropout2d: {message}"):
        read_study(study_file(TINY.replace("{spec: {", f"{{{fields}, spec: {{")))


def test_a_share_of_validation_that_does_not_fit_is_told_whatever_others_have(study_file):
    text = TINY.replace("baseline:", "  held: {validation: 0.1}\nbaseline:")
    with pytest.raises(StudyError, match=r"conditions\.held: with seed 7, validation must leave"):
        read_study(study_file(text))


@pytest.mark.parametrize(
    ("data", "count", "noise"), [("fake", 80, 0.2), ("digits", 80, 0.0), ("imagefolder:", 4, 0.0)]
)
def test_a_share_of_validation_is_tried_with_each_seed_of_the_study(
    study_file, tmp_path, data, count, noise
):
    if data == "imagefolder:":
        data += str(tmp_path)
        for name in ("train/a/1", "train/a/2", "train/b/1", "train/b/2", "val/a/1", "val/b/1"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 9)).save(tmp_path / f"{name}.png")
    fields = {"data": data, "train_images": count, "validation": 0.5, "label_noise": noise}
    config = Config(**fields, image_size=8)
    source, fine, wrong = load_source(config, tmp_path), [], {}
    for seed in range(40):
        try:
            make_data(source, replace(config, seed=seed))
            fine.append(seed)
        except ValueError as error:
            wrong[seed] = str(error)
    first, second, *_ = wrong
    base = "".join(f"  {name}: {value}\n" for name, value in {**fields, "image_size": 8}.items())
    text = TINY.replace("  train_images: 20\n", base)
    assert read_study(study_file(text.replace("[7, 8]", str(fine)))).seeds == tuple(fine)
    with pytest.raises(StudyError) as caught:
        read_study(study_file(text.replace("[7, 8]", f"[{fine[0]}, {second}, {first}]")))
    assert f"conditions.none: with seed {second}, {wrong[second]}" in str(caught.value)


def test_seeds_are_tried_without_an_image(study_file, monkeypatch):
    def refuse(*_):
        raise AssertionError("an image is made")

    for kind in (TrainImages, TestImages):
        monkeypatch.setattr(kind, "__getitems__", refuse)
    source = fake(8)
    made = []
    monkeypatch.setattr("experiments.datasets.sources.fake", lambda size: made.append(1) or source)
    base = "train_images: 512\n  data: fake\n  image_size: 8\n  validation: 0.5"
    text = TINY.replace("train_images: 20", base).replace("[7, 8]", str([*range(40)]))
    assert len(read_study(study_file(text)).seeds) == 40
    assert made == [1]


def test_canvas_has_every_class_with_any_seed_and_is_made_for_the_first_alone(
    study_file, monkeypatch
):
    made = []

    def training(seed, *rest):
        made.append(seed)
        return training_canvases(seed, *rest)

    monkeypatch.setattr("experiments.datasets.sources.training_canvases", training)
    base = "train_images: 20\n  data: canvas\n  image_size: 48\n  validation: 0.5"
    read_study(study_file(TINY.replace("train_images: 20", base)))
    assert made == [7]
