"""The search: the same candidates after a stop, equal budgets, and what can't be searched."""

import numpy as np
import pandas as pd
import pytest
import yaml

from experiments.runs import RunFolder
from experiments.search import candidates_of, check, search
from experiments.study import StudyError, read_study
from experiments.train import Result


class Judge:
    """Settles runs by a formula of their fields instead of training them."""

    def __init__(self, score, chance=None):
        self.score, self.chance, self.runs, self.names = score, chance, [], []

    def __call__(self, folders, names):
        self.names += names
        for folder in folders:
            if folder.status == "open":
                self.runs.append(folder.run)
                folder.path.mkdir(parents=True, exist_ok=True)
                value = self.score(folder.run)
                epochs = [
                    {"epoch": 0, "loss": 1.0, "seconds": 1.0, "nominal": None, "realized": None}
                ]
                folder.finish(Result("finished", {"validation": value}, epochs, self.chance))


def rate_of(run):
    return (
        float(str(run.spec["conv"]).partition("'stop': ")[2].partition("}")[0])
        if run.spec
        else None
    )


def closeness(run):
    """Best at lr 0.2 and rate 0.3; seeds differ a little."""
    rate = rate_of(run)
    penalty = 0 if rate is None else abs(rate - 0.3)
    return 1 - abs(run.lr - 0.2) - penalty + 1e-4 * (run.seed % 7)


def test_a_candidate_that_is_out_is_not_the_second(write, folder):
    """Rate 0.2 is best of the first two seeds, and 0.3 is out; then 0.2 is worse than 0.3 was."""
    early = {0.1: 0.80, 0.2: 0.90, 0.3: 0.79}
    late = {0.1: 0.70, 0.2: 0.60}

    def score(run):
        return (early if run.seed <= 1002 else late)[rate_of(run)] + 1e-4 * (run.seed % 7)

    space = {"rate": [0.1, 0.2, 0.3]}
    study = read_study(write(search={"space": space, "candidates": 3, "seeds": 5}))
    found = search(study, folder / "pool", Judge(score))[1]
    assert found.best == {"rate": 0.1}  # mean 0.74 of five seeds; 0.3 has 0.79 of two
    assert found.table["rate"].tolist() == [0.1, 0.2, 0.3]
    assert found.table["n"].tolist() == [5, 5, 2]
    assert "leads the second by 0.0200" in found.sentence


SPACE = {"lr": [0.05, 0.2, 0.8], "rate": [0.1, 0.3]}


@pytest.mark.parametrize("seeds", [2, 4, 10])
def test_every_condition_gets_the_same_number_of_runs_and_the_best_wins(write, folder, seeds):
    study = read_study(write(search={"space": SPACE, "candidates": 6, "seeds": seeds}))
    judge = Judge(closeness)
    none, dropped = search(study, folder / "pool", judge)
    assert (none.best, dropped.best) == ({"lr": 0.2}, {"lr": 0.2, "rate": 0.3})
    assert dropped.runs == 2 * 6 + 2 * (min(5, seeds) - 2) + 2 * max(0, seeds - 5)
    assert none.runs == dropped.runs
    assert "search of none, {'lr': 0.05}" in judge.names
    assert all(run.seed > 1000 for run in judge.runs)
    assert "leads" in dropped.sentence


def test_draws_from_ranges_are_the_same_after_a_stop(write, folder):
    space = {"lr": {"low": 0.01, "high": 1.0, "log": True}, "batch_size": {"low": 4, "high": 8}}
    study = read_study(write(search={"space": space, "candidates": 9, "seeds": 3}))
    judge = Judge(closeness)
    first = search(study, folder / "pool", judge)
    count = len(judge.runs)
    again = search(study, folder / "pool", judge)
    assert len(judge.runs) == count
    assert [each.best for each in again] == [each.best for each in first]
    assert len(first[0].table) == 9
    assert first[0].runs == first[1].runs
    assert set(first[0].best) == {"lr", "batch_size"}
    assert first[0].table["lr"].between(0.01, 1.0).all()

    class Stop(Exception):
        pass

    stopped = Judge(closeness)

    def stop_early(folders, names):
        stopped(folders, names)
        if len(stopped.runs) > 20:
            raise Stop

    with pytest.raises(Stop):
        search(study, folder / "other", stop_early)
    rest = search(study, folder / "other", stopped)
    assert [each.best for each in rest] == [each.best for each in first]
    assert len(stopped.runs) == count


def test_draws_are_uniform_in_the_logarithm_or_in_the_value():
    space = {"lr": {"low": 0.01, "high": 1.0, "log": True}, "momentum": {"low": 0.5, "high": 0.9}}
    drawn = pd.DataFrame(candidates_of(space, 2000, "none"))
    tenths = np.linspace(0.05, 0.95, 10)
    assert drawn["lr"].quantile(tenths).tolist() == pytest.approx(0.01 * 100**tenths, rel=0.25)
    assert drawn["momentum"].quantile(tenths).tolist() == pytest.approx(
        0.5 + 0.4 * tenths, abs=0.02
    )
    assert drawn["lr"].between(0.01, 1.0).all()
    assert drawn["momentum"].between(0.5, 0.9).all()


def test_whole_numbers_and_choices_are_drawn_alike():
    sizes = {"low": 5, "high": 8}
    space = {"batch_size": sizes, "lr": [0.1, 0.2], "momentum": {"low": 0.0, "high": 0.9}}
    drawn = pd.DataFrame(candidates_of(space, 2000, "none"))
    shares = drawn["batch_size"].value_counts(normalize=True)
    assert shares.to_dict() == pytest.approx(dict.fromkeys([5, 6, 7, 8], 0.25), abs=0.04)
    assert drawn["lr"].value_counts(normalize=True)[0.1] == pytest.approx(0.5, abs=0.04)
    doubled = candidates_of({"batch_size": {"low": 1, "high": 1023, "log": True}}, 400, "none")
    sizes = [values["batch_size"] for values in doubled]
    assert all(isinstance(size, int) and 1 <= size <= 1023 for size in sizes)


def test_no_candidate_is_drawn_twice_and_few_combinations_are_tried_whole():
    few = {"batch_size": {"low": 4, "high": 6}, "lr": [0.1, 0.2]}
    expected = [{"batch_size": size, "lr": lr} for size in (4, 5, 6) for lr in (0.1, 0.2)]
    assert candidates_of(few, 6, "none") == expected
    drawn = candidates_of(few, 5, "none")
    assert len(drawn) == 5
    assert all(values in expected for values in drawn)
    assert len({tuple(values.items()) for values in drawn}) == 5


def test_conditions_draw_their_own_candidates():
    space = {"lr": {"low": 0.01, "high": 1.0, "log": True}}
    assert candidates_of(space, 4, "none") == candidates_of(space, 4, "none")
    assert candidates_of(space, 4, "none") != candidates_of(space, 4, "Dropout2d")


def test_candidates_that_can_not_be_told_apart_are_not_ranked(write, folder):
    study = read_study(write(search={"space": {"lr": [0.1, 0.2]}, "candidates": 2, "seeds": 4}))
    values = iter([0.5, 0.6, 0.6, 0.5, 0.5, 0.6, 0.6, 0.5] * 20)
    found = search(study, folder / "pool", Judge(lambda run: next(values)))
    assert "they are not ranked" in found[0].sentence


def test_less_may_be_better(write, folder):
    path = write(
        search={"space": {"lr": [0.05, 0.2]}, "candidates": 2, "seeds": 3}, higher_is_better=False
    )
    found = search(read_study(path), folder / "pool", Judge(closeness))
    assert found[0].best == {"lr": 0.05}


def test_a_condition_without_anything_to_search_has_no_runs(write, folder):
    study = read_study(write(search={"space": {"rate": [0.1, 0.3]}, "candidates": 2, "seeds": 3}))
    none, dropped = search(study, folder / "pool", Judge(closeness))
    assert (none.best, none.runs) == ({}, 0)
    assert dropped.best == {"rate": 0.3}


def test_runs_that_fail_lose(write, folder):
    study = read_study(write(search={"space": {"lr": [0.05, 0.2]}, "candidates": 2, "seeds": 3}))

    def judge(folders, names, bad=(0.2,)):
        for one in folders:
            if one.run.lr in bad:
                one.path.mkdir(parents=True, exist_ok=True)
                one.fail(RuntimeError("no"))
        Judge(closeness)(folders, names)

    found = search(study, folder / "pool", judge)
    assert found[0].best == {"lr": 0.05}
    found = search(study, folder / "none", lambda *runs: judge(*runs, bad=(0.05, 0.2)))
    assert (found[0].best, found[0].sentence) == ({}, "all candidates failed or diverged")


@pytest.mark.parametrize("candidates", [1, 2, 3, 4, 9])
def test_halving_keeps_two_candidates_or_the_best_third(write, folder, candidates):
    space = {"lr": [0.01 * (1 + number) for number in range(candidates)]}
    study = read_study(write(search={"space": space, "candidates": candidates, "seeds": 10}))
    counts = sorted(search(study, folder / "pool", Judge(closeness))[0].table["n"])
    expected = {1: [10], 2: [10, 10], 3: [2, 10, 10], 4: [2, 2, 10, 10]}
    assert counts == expected.get(candidates, [2] * 6 + [5, 10, 10])


def test_chance_level_is_told_by_a_search(write, folder):
    study = read_study(write(search={"space": {"lr": [0.05, 0.2]}, "candidates": 2, "seeds": 3}))
    low = search(study, folder / "pool", Judge(lambda run: 0.34, chance=1 / 3))
    assert "at chance level" in low[0].sentence
    high = search(study, folder / "other", Judge(closeness, chance=1 / 3))
    assert "at chance level" not in high[0].sentence


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"space": {"lr": []}}, "search.space.lr: must be a list or a mapping with at least one"),
        ({"space": {"learning": [1]}}, "a run has no field 'learning'"),
        ({"space": {"lr": {"low": 1, "high": 0.1}}}, "low must be a number below high"),
        ({"space": {"lr": {"low": 0, "high": 1, "log": True}}}, "must begin above 0"),
        ({"space": {"lr": {"from": 0}}}, "must be a list or"),
        ({"space": {"lr": [0.1, 0.2, 0.1]}}, "the values of a list must differ"),
    ],
)
def test_a_space_that_is_wrong(write, asked, told):
    with pytest.raises(StudyError, match=told):
        check(read_study(write(search=asked)))


def test_what_a_search_needs(write, folder):
    with pytest.raises(StudyError, match="it has no search"):
        check(read_study(write()))
    asked = {"space": {"lr": [0.1, 0.2]}}
    with pytest.raises(StudyError, match="searches use"):
        check(read_study(write(search=asked, seeds=[1001])))
    (folder / "plain.py").write_text(
        "from mine import Noisy\ndef data(seed):\n    return Noisy(8), {'a': Noisy(3)}\n"
    )
    base = {"model": "mine:net", "data": "plain:data", "epochs": 1}
    with pytest.raises(StudyError, match="no validation set"):
        check(read_study(write(search=asked, base=base)))


@pytest.mark.slow
def test_the_command_searches_and_the_study_takes_the_choice(write, command, folder):
    path = write(search={"space": {"rate": [0.2, 0.6]}, "candidates": 2, "seeds": 2}, seeds=1)
    status, out, err = command("ablate.py", path, "--search")
    assert status == 0, err
    chosen = yaml.safe_load((folder / "study.chosen.yaml").read_text())
    assert chosen["Dropout2d"]["rate"] in (0.2, 0.6)
    assert "none: there is nothing to search" in out
    table = pd.read_csv(folder / "runs/study/search.csv")
    assert [*zip(table["condition"], table["n"], strict=True)] == [("Dropout2d", 2)] * 2
    assert sorted(table["rate"]) == [0.2, 0.6]
    assert table["mean"].is_monotonic_decreasing
    results = [RunFolder(folder / "runs/runs", run).result() for _, run in read_study(path).runs()]
    assert results == [None, None]  # those of the study are still to be made
    status, _, err = command("ablate.py", path)
    assert status == 0, err
    settings = yaml.safe_load((folder / "runs/study/study.yaml").read_text())
    assert str(chosen["Dropout2d"]["rate"]) in str(settings["conditions"]["Dropout2d"]["spec"])


def test_changes_of_the_base_hold_in_a_search(write, folder):
    asked = {"space": {"lr": [0.05, 0.2]}, "candidates": 2, "seeds": 2}
    judge = Judge(closeness)
    search(read_study(write(search=asked), {"epochs": 9}), folder / "pool", judge)
    assert {run.epochs for run in judge.runs} == {9}
