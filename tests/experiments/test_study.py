"""Study files: what they stand for, and everything that is wrong with them in one message."""

import pytest
import yaml

from experiments.study import StudyError, fit, read_study


def problems_of(path, **options):
    with pytest.raises(StudyError) as error:
        fit(read_study(path, **options))
    return error.value.problems


def test_conditions_seeds_and_pairs(write):
    study = read_study(write(seeds=3, compare=[["Dropout2d", "none"]]))
    runs = list(study.runs())
    assert [(name, run.seed) for name, run in runs[:3]] == [
        ("none", 1),
        ("Dropout2d", 1),
        ("none", 2),
    ]
    assert len(runs) == 6
    assert study.pairs == [("Dropout2d", "none")]
    dropped = study.conditions["Dropout2d"].spec["conv"]
    assert "0.5" in str(dropped)
    assert "rate" not in str(dropped)
    fit(study)


def test_the_plain_study_is_the_same_study(write, folder):
    study = read_study(write())
    again = folder / "again.yaml"
    again.write_text(yaml.safe_dump(study.plain(), sort_keys=False))
    assert read_study(again).conditions == study.conditions


def test_a_grid_is_every_combination(write):
    study = read_study(
        write(conditions={}, grid={"lr": {"low": 0.1, "high": 0.2}, "epochs": [1, 2]})
    )
    assert list(study.conditions) == ["low, 1", "low, 2", "high, 1", "high, 2"]
    assert study.conditions["high, 1"].lr == 0.2
    assert study.conditions["high, 2"].epochs == 2


def test_changes_and_choices(write, folder):
    path = write()
    study = read_study(path, {"epochs": 9, "data_args.count": 12}, [4])
    run = study.conditions["none"]
    assert (run.epochs, run.data_args, study.seeds) == (9, {"count": 12}, (4,))
    (folder / "study.chosen.yaml").write_text("Dropout2d: {rate: 0.25, lr: 0.3}\n")
    chosen = read_study(path).conditions
    assert "0.25" in str(chosen["Dropout2d"].spec)
    assert (chosen["Dropout2d"].lr, chosen["none"].lr) == (0.3, 0.1)


@pytest.mark.parametrize("text", ["Dropout: {rate: 0.2}\n", "none: {rate: 0.2}\n"])
def test_choices_of_an_earlier_study_are_refused(write, folder, text):
    path = write()
    (folder / "study.chosen.yaml").write_text(text)
    with pytest.raises(StudyError, match=r"study\.chosen\.yaml: .*search again, or delete"):
        read_study(path)


def test_a_spec_may_be_a_file_beside_the_study(write, folder):
    (folder / "spec.yaml").write_text("conv: Dropout2d(0.5)\n")
    study = read_study(write(conditions={"none": {}, "a": {"spec": "spec.yaml"}}))
    assert "Dropout2d" in str(study.conditions["a"].spec)


def test_some_conditions_alone(write):
    assert list(read_study(write(), only=["Dropout2d"]).conditions) == ["Dropout2d"]
    with pytest.raises(StudyError, match="--only: there is no condition 'x'; known: none, Dropout"):
        read_study(write(), only=["x"])


def test_seven_faults_are_told_at_once(write):
    told = problems_of(
        write(
            base={
                "model": "mine:net",
                "data": "mine:stripes",
                "epochs": -3,
                "lr": "big",
                "optimiser": "sgd",
            },
            conditions={
                "none": {"epochs": 2, "lr": 0.1},
                "layer": {"epochs": 2, "lr": 0.1, "spec": {"no_such_layer": "Dropout(0.1)"}},
                "class": {"spec": {"conv": "Dropuot2d(0.1)"}},
                "rate": {"spec": {"conv": "Dropout2d(1.4)"}},
            },
            compare=[["none", "missing"]],
            seeds=0,
            colour="red",
        )
    )
    assert len(told) >= 7
    text = "\n".join(told)
    for expected in ("epochs", "lr", "optimiser", "Dropuot2d", "1.4", "missing", "seeds", "colour"):
        assert expected in text, expected


def test_what_fits_no_layer_is_told_with_the_condition(write):
    conditions = {
        "none": {},
        "layer": {"spec": {"no_such_layer": "Dropout(0.1)"}},
        "model": {"model": "mine:broken"},
        "loss": {"loss": "torch.nn:BCEWithLogitsLoss"},
        "optimizer": {"optimizer": "no_such_optimizer"},
        "again": {},
    }
    told = problems_of(write(conditions=conditions, primary={"blurred": 1.0}))
    text = "\n".join(told)
    for expected in (
        "conditions.layer: ", "no_such_layer", "conditions.model: ", "mine.py:",
        "conditions.loss: ",
        "conditions.optimizer: ", "'none' and 'again' are the same", "has no test 'blurred'",
    ):  # fmt: skip
        assert expected in text, expected


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"seeds": 0},
            "1 problem:\n  - seeds: must be a number of seeds, at least 1, or .*, got 0",
        ),
        ({"seeds": []}, "seeds: must be a number of seeds"),
        ({"seeds": ["a"]}, "seeds: must be a number of seeds"),
        ({"grid": {"lr": 0.1}}, "1 problem:\n  - grid.lr: must be a list or a mapping .*, got 0.1"),
        ({"seeds": [1, 1]}, "different numbers"),
        ({"conditions": {}}, "at least one"),
        ({"search": {"space": {}}}, "space"),
        ({"conditions": {"a": {"spec": {"conv": "Dropout(${p})"}}}}, r"\$\{p\} has no value"),
        ({"base": {"epochs": True}}, "epochs: must be a number, got True"),
    ],
)
def test_one_fault(write, fields, told):
    with pytest.raises(StudyError, match=told):
        read_study(write(**fields))


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "", "a: &x [*x]"])
def test_what_is_no_study(folder, text):
    path = folder / "odd.yaml"
    path.write_text(text)
    with pytest.raises(StudyError):
        read_study(path)


def test_a_missing_file(folder):
    with pytest.raises(OSError, match="nothing"):
        read_study(folder / "nothing.yaml")


def test_factories_that_do_not_hide_each_other(write):
    """A model that is not there hides neither the loss, the metric, the optimizer nor a test."""
    wrong = {
        "model": "mine:nope",
        "loss": "torch.nn:Nope",
        "metric": "mine:none",
        "optimizer": "no",
    }
    path = write(base=wrong, primary={"hidden": 1.0})
    with pytest.raises(StudyError) as told:
        fit(read_study(path))
    assert len(told.value.problems) == 5
    for text in ("'mine:nope'", "'torch.nn:Nope'", "'mine:none'", "'no'", "no test 'hidden'"):
        assert sum(text in problem for problem in told.value.problems) == 1, text
    assert sum("none, Dropout2d: " in problem for problem in told.value.problems) == 4


def test_a_margin_is_not_negative(write):
    with pytest.raises(StudyError, match=r"primary.clean: .*greater than or equal to 0.*-1"):
        read_study(write(primary={"clean": -1}))
