"""A search: draws, runs, and what is chosen."""

import csv
import os
from pathlib import Path

import pytest
import yaml

pytest.importorskip("timm")
from experiments.search import best, draw, read_search, tried
from experiments.study import StudyError, read_study

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks, limits and signals")

SEARCH = {
    "question": "What does each arm take?",
    "base": {
        "model_args": {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8]},
        "data": "fake",
        "image_size": 8,
        "train_images": 100,
        "validation": 0.5,
        "batch_size": 25,
    },
    "space": {"lr": [0.05, 0.1], "epochs": [1, 2]},
    "arms": {
        "none": None,
        "Dropout2d": {
            "space": {"rate": [0.1, 0.5]},
            "fields": {"spec": {"layer4.0": {"Dropout2d": {"p": "${rate}"}}}},
        },
    },
    "draws": 2,
    "seeds": [101, 102],
}


def written(plain, path="search.yaml"):
    Path(path).write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    return path


def test_a_search_runs_and_writes_what_it_chose(call, unrendered, capsys):
    written(SEARCH)
    assert call("search.py", "search.yaml", "--backend", "sequential") == 0
    output = capsys.readouterr().out
    assert "chosen: runs/search/chosen.yaml" in output
    with Path("runs/search/search.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2  # arms, draws, seeds
    scores: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        scores.setdefault((row["arm"], row["draw"]), []).append(float(row["validation"]))
    chosen = yaml.safe_load(Path("runs/search/chosen.yaml").read_text(encoding="utf-8"))
    assert list(chosen) == ["none", "Dropout2d"]
    for arm, drawn in chosen.items():
        means = {name: sum(each) / 2 for (of, name), each in scores.items() if of == arm}
        first = max(means, key=lambda name: means[name])
        row = next(row for row in rows if row["draw"] == first)
        assert drawn == {name: float(row[name]) for name in drawn}
    assert "Dropout2d: lr " in output
    # the same command again runs nothing anew, and says the same
    assert call("search.py", "search.yaml", "--backend", "sequential") == 0
    assert capsys.readouterr().out == output
    # and a study takes it up
    base = {**SEARCH["base"], "lr": "${Dropout2d.lr}", "epochs": "${Dropout2d.epochs}"}
    spec = {"layer4.0": {"Dropout2d": {"p": "${Dropout2d.rate}"}}}
    half = {"layer4.0": {"Dropout2d": {"p": "${Dropout2d.rate * 0.5}"}}}
    conditions = {"none": {}, "drop": {"spec": spec}, "half": {"spec": half}}
    plain = {"chosen": "runs/search/chosen.yaml", "base": base, "conditions": conditions}
    study = read_study(written({**plain, "baseline": "none", "seeds": [7]}, "study.yaml"))
    config = study.conditions["drop"]
    wanted = chosen["Dropout2d"]
    assert (config.lr, config.epochs) == (wanted["lr"], wanted["epochs"])
    ((_, found),) = config.spec.items()
    assert str(wanted["rate"]) in str(found)
    assert str(wanted["rate"] / 2) in str(study.conditions["half"].spec)


def test_test_images_are_not_looked_at(call, unrendered):
    written({**SEARCH, "arms": {"none": None}, "draws": 1, "seeds": [101]})
    assert call("search.py", "search.yaml", "--backend", "sequential") == 0
    (found,) = Path("runs/search").glob("*/result.json")
    assert yaml.safe_load(found.read_text())["scores"] == {}


def test_arms_share_what_is_drawn_for_all(tmp_path):
    search = read_search(written(SEARCH, tmp_path / "search.yaml"))
    drawn = {name: {**numbers} for name, (_, numbers) in search.draws.items()}
    for number in (1, 2):
        other = drawn[f"Dropout2d {number}"]
        other.pop("rate")
        assert drawn[f"none {number}"] == other
    configs = search.study.conditions
    assert all(configs[name].lr == numbers["lr"] for name, numbers in drawn.items())
    assert {config.test for config in configs.values()} == {False}


@pytest.mark.parametrize("count", [4, 12, 20])
def test_each_level_is_drawn_equally_often(count):
    levels = {"a": [1, 2, 3, 4], "b": [0.1, 0.2]}
    drawn = draw(levels, count, "a test")
    for name, values in levels.items():
        found = [each[name] for each in drawn]
        assert [found.count(value) for value in values] == [count // len(values)] * len(values)
    assert drawn == draw(levels, count, "a test")
    assert drawn != draw(levels, count, "another test")


def test_nothing_is_chosen_before_all_have_ended(tmp_path):
    from experiments.running.records import Run

    search = read_search(written(SEARCH, tmp_path / "search.yaml"))
    runs = [
        Run(name, {}, seed, config, "missing", None, {}, None)
        for seed in search.study.seeds
        for name, config in search.study.conditions.items()
    ]
    with pytest.raises(ValueError, match="8 of 8 runs of the search are missing or failed"):
        tried(search, runs)


def test_a_draw_that_diverged_is_not_chosen(tmp_path):
    from experiments.results import Epoch, Result
    from experiments.running.records import Run

    search = read_search(written({**SEARCH, "arms": {"none": None}}, tmp_path / "search.yaml"))
    epoch = Epoch(0, 1.0, 0.5, 0.1, 1.0, 1.0, {}, {}, 1.0, validation=0.9)
    runs = []
    for name, config in search.study.conditions.items():
        for seed in search.study.seeds:
            status = "diverged" if name == "none 1" and seed == 102 else "finished"
            score = 1.0 if name == "none 1" else 0.6
            result = Result(status, {}, None, [replaced(epoch, score)], 1.0, 1)
            runs.append(Run(name, {}, seed, config, status, result, {}, None))
    found = tried(search, runs)
    assert [each.mean for each in found] == [0.5, 0.6]
    assert best(found)["none"].condition == "none 2"


def replaced(epoch, score):
    from dataclasses import replace

    return replace(epoch, validation=score)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"draws": 0}, "draws must be a whole number, at least 1, got 0"),
        ({"arms": {}}, "arms must name at least one, got {}"),
        ({"arms": {"none": [1]}}, "arms.none must have space and fields, or neither"),
        ({"space": {"lr": []}}, "space.lr must be a list of numbers, at least one, got []"),
        ({"space": {"lr": ["a"]}}, "space.lr must be a list of numbers"),
        ({"spaces": {}}, "field 'spaces' is unknown"),
        ({"base": {**SEARCH["base"], "validation": 0.0}}, "validation must be above 0"),
        ({"base": {**SEARCH["base"], "test": True}}, "without test"),
        ({"seeds": []}, "seeds must be a list of whole numbers"),
        ({"seeds": "all"}, "seeds must be a list of whole numbers"),
        (
            {"arms": {"none": {"fields": {"spec": {"layer4.0": {"Dropout2d": {"p": "${rat}"}}}}}}},
            "'${rat}' names nothing that is drawn",
        ),
        ({"arms": {"none": {"fields": {"epoch": 3}}}}, "'epoch' is unknown (closest: epochs"),
    ],
)
def test_bad_search_files(tmp_path, change, said):
    with pytest.raises(StudyError) as caught:
        read_search(written({**SEARCH, **change}, tmp_path / "search.yaml"))
    assert said in str(caught.value)


def test_seeds_are_kept_apart(tmp_path):
    (tmp_path / "seeds.yaml").write_text("report: [102, 103]\nsearch: [101]\n", encoding="utf-8")
    path = written(SEARCH, tmp_path / "search.yaml")
    with pytest.raises(StudyError, match=r"seeds: \[102\] stand in .*seeds.yaml under report"):
        read_search(path)
    study = {"base": SEARCH["base"], "conditions": {"none": {}}, "baseline": "none"}
    study_path = written({**study, "seeds": [101]}, tmp_path / "study.yaml")
    with pytest.raises(StudyError, match=r"seeds: \[101\] stand in .*seeds.yaml under search"):
        read_study(study_path)
    (tmp_path / "seeds.yaml").write_text("report: 7\n", encoding="utf-8")
    with pytest.raises(StudyError, match="must map report and search to lists"):
        read_study(study_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("[1]", "must map arms to what was drawn"),
        ("none: {lr: high}", "none.lr: 'high' is no number"),
    ],
)
def test_bad_choices(tmp_path, text, said):
    if text is not None:
        (tmp_path / "chosen.yaml").write_text(text, encoding="utf-8")
    plain = {"chosen": "chosen.yaml", "base": {"data": "fake", "image_size": 8}}
    plain |= {"conditions": {"none": {}}, "baseline": "none", "seeds": [1]}
    with pytest.raises(StudyError) as caught:
        read_study(written(plain, tmp_path / "study.yaml"))
    assert said in str(caught.value)
