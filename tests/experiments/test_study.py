"""A study file: read whole or refused whole, and run seed by seed."""

from pathlib import Path

import pytest

from experiments.study import StudyError, make_config, read_study, run_study

QUICK = Path(__file__).parents[2] / "experiments" / "configs" / "quick.yaml"
TINY = """
base:
  model_args: {layers: [1, 1, 1, 1], channels: [8, 8, 8, 8], output_stride: 8}
  train_images: 20
  epochs: 1
  threads: 1
conditions:
  none:
  Dropout2d: {spec: {"layer4.0": "Dropout2d(p=0.5)"}}
baseline: none
seeds: [7, 8]
"""


@pytest.fixture
def study_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "study.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_quick_study_is_four_conditions_with_four_seeds():
    study = read_study(QUICK)
    assert list(study.conditions) == [
        "none",
        "Dropout2d",
        "DropBlock2d",
        "none, 12 epochs",
    ]
    assert study.baseline == "none"
    assert len(study.seeds) == 4
    assert [config.epochs for config in study.conditions.values()] == [40, 40, 40, 12]
    assert {config.label_noise for config in study.conditions.values()} == {0.4}


def test_runs_come_seed_by_seed_with_the_conditions_fields(study_file):
    runs = list(run_study(read_study(study_file(TINY))))
    assert [(run.condition, run.config.seed) for run in runs] == [
        ("none", 7),
        ("Dropout2d", 7),
        ("none", 8),
        ("Dropout2d", 8),
    ]
    assert [run.config.train_images for run in runs] == [20] * 4
    assert runs[0].result.nominal == {}
    assert runs[1].result.nominal == {"layer4.0/Dropout2d": [0.5]}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds:", "seed:", "field 'seed' is unknown; did you mean 'seeds'?"),
        ("seeds: [7, 8]", "seeds: []", "seeds must be .* at least one, got []"),
        ("seeds: [7, 8]", "seeds: [7, 8, 7]", "seeds must differ, got [7] more than once"),
        ("seeds: [7, 8]", "seeds: [7, x]", "seeds must be a list of whole numbers"),
        ("epochs: 1", "epoch: 1", "base: field 'epoch' is unknown; did you mean 'epochs'?"),
        ("epochs: 1", "epochs: many", "epochs"),
        ("epochs: 1", "epochs: 0", "conditions.none: epochs must be at least 1, got 0"),
        ("epochs: 1", "seed: 1", "base: seed does not belong here"),
        ("epochs: 1", "epochs: 1\n  epochs: 2", "line 6: the key 'epochs' stands twice"),
        ("baseline: none", "baseline: nine", "condition 'nine' is unknown; did you mean 'none'?"),
        ("baseline: none", "baseline: 3", "condition 3 is unknown; known: none, Dropout2d"),
        ("baseline: none", "", "baseline must name the condition"),
        ("  none:", "  Dropout2d:", "the key 'Dropout2d' stands twice"),
        ("  none:", "  none: {spec: {layer4.0: Dropout2d(p=0.5)}}", "are the same"),
        ("  none:", "  none: 3", "conditions.none must map fields of Config to values, got 3"),
        ("  none:", "  no: {}\n  none:", "conditions: a name must be text, got False; quote it"),
        ("layer4.0", "layer5.0", "layer5.0"),
        ("(p=0.5)", "(p=1.5)", "1.5"),
        ("train_images: 20", "train_images: 5000", "train_images must be between 1 and 1796"),
        ("baseline: none", "baseline: [none", "line 11"),
    ],
)
def test_a_faulty_study_is_refused(study_file, old, new, message):
    assert TINY.count(old) == 1
    with pytest.raises(StudyError) as error:
        read_study(study_file(TINY.replace(old, new)))
    parts = message.split(".*")
    assert all(part.strip() in str(error.value) for part in parts)


@pytest.mark.parametrize("text", ["", "3", "[none]", "conditions: {}\nbaseline: a\nseeds: [1]"])
def test_an_empty_study_is_refused(study_file, text):
    with pytest.raises(
        StudyError, match=r"it is empty|mapping of conditions|must name at least one"
    ):
        read_study(study_file(text))


def test_all_problems_come_at_once(study_file):
    text = TINY.replace("epochs", "epoch").replace("[7, 8]", "[]").replace("e: none", "e: nine")
    with pytest.raises(StudyError) as error:
        read_study(study_file(text))
    assert str(error.value).count("\n  - ") == 3


def test_types_are_checked_and_numbers_read_as_numbers():
    assert make_config({"weight_decay": "5e-4"}).weight_decay == 5e-4
    with pytest.raises(ValueError, match=r"label_noise.*many"):
        make_config({"label_noise": "many"})
