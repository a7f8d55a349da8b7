"""Statistics against scipy, and the stated error rates by simulation with a fixed seed."""

import itertools
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.stats import compare, interval, word
from tests.cases import rest_slow


@dataclass
class Asked:
    """What `compare` reads of a study."""

    primary: dict
    higher_is_better: bool = True


@dataclass
class AStudy:
    file: Asked
    pairs: list


def frame_of(scores):
    """Scores condition -> test -> values by seed, as a frame of runs."""
    rows = [
        {
            "condition": name,
            "seed": seed,
            "status": "finished",
            **{t: v[seed] for t, v in tests.items()},
        }
        for name, tests in scores.items()
        for seed in range(len(next(iter(tests.values()))))
    ]
    return pd.DataFrame(rows)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_interval_and_p_are_those_of_scipy(values):
    values = np.array(values)
    low, high = interval(values, 0.95)
    if values.std(ddof=1) < 1e-6:
        assert low == pytest.approx(high, abs=1e-4)
        return
    expected = stats.ttest_1samp(values, 0.0)
    assert (low, high) == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_few_or_equal_values():
    assert np.isnan(interval(np.array([1.0]), 0.95)).all()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.1, 2, "better"), (-2, -0.1, "worse"), (-0.5, 0.5, "same"), (0.1, 0.9, "same"),
     (-0.5, 1.5, "open"), (np.nan, np.nan, "open")],
)  # fmt: skip
def test_words(low, high, expected):
    assert word(low, high, 1.0) == expected


def test_comparisons_are_paired_in_points_and_simultaneous():
    generator = np.random.default_rng(0)
    base = generator.normal(0.7, 0.1, 12)
    scores = {
        "none": {"clean": base, "noisy": base / 2},
        "a": {"clean": base + 0.05, "noisy": base / 2},
        "b": {"clean": base + generator.normal(0, 0.01, 12), "noisy": base / 3},
    }
    study = AStudy(Asked({"clean": 1.0}), [("a", "none"), ("b", "none"), ("b", "a")])
    table = compare(frame_of(scores), study)
    row = table[(table["a"] == "b") & (table["b"] == "none") & (table["test"] == "clean")].iloc[0]
    differences = 100 * (scores["b"]["clean"] - base)
    expected = stats.ttest_1samp(differences, 0.0).confidence_interval(1 - 0.05 / 3)
    assert (row["low"], row["high"]) == pytest.approx(tuple(expected))
    assert row["p"] == pytest.approx(stats.ttest_1samp(differences, 0.0).pvalue)
    assert np.isnan(table.iloc[1]["p"])  # all differences are equal
    first = table.iloc[0]
    assert first["difference"] == pytest.approx(5.0)
    assert first["word"] == "better"
    assert table["primary"].tolist() == [True, False] * 3


def test_a_metric_where_less_is_better():
    base = np.linspace(10, 20, 8)
    scores = {"none": {"rmse": base}, "a": {"rmse": base - 3 + np.linspace(-0.1, 0.1, 8)}}
    table = compare(frame_of(scores), AStudy(Asked({"rmse": 1.0}, False), [("a", "none")]))
    assert table.iloc[0]["word"] == "better"
    assert table.iloc[0]["difference"] == pytest.approx(-3)


def test_missing_runs_are_left_out_of_both():
    scores = {
        "none": {"clean": np.array([0.1, 0.2, 0.3])},
        "a": {"clean": np.array([0.2, np.nan, 0.5])},
    }
    table = compare(frame_of(scores), AStudy(Asked({"clean": 1.0}), [("a", "none")]))
    assert table.iloc[0]["n"] == 2
    assert table.iloc[0]["difference"] == pytest.approx(15)


@pytest.mark.parametrize("shift", rest_slow([0.1, 0.0]))
def test_simultaneous_coverage(shift):
    """All intervals of a study hold the true differences together in 95 % of studies or more."""
    generator = np.random.default_rng(1)
    studies, conditions, seeds, hits = 1500, 4, 8, 0
    pairs = list(itertools.combinations(range(conditions), 2))
    for _ in range(studies):
        shared = generator.normal(0, 0.02, seeds)
        noise = generator.normal(0, 0.01, (conditions, seeds))
        scores = shared + noise + shift * np.arange(conditions)[:, None]
        level = 1 - 0.05 / len(pairs)
        found = [interval(scores[a] - scores[b], level) for a, b in pairs]
        true = [shift * (a - b) for a, b in pairs]
        hits += all(low <= t <= high for (low, high), t in zip(found, true, strict=True))
    error = np.sqrt(0.05 * 0.95 / studies)
    assert 0.95 - 3 * error <= hits / studies <= 0.99


def study_of(generator, pairs, conditions, seeds=8, shift=0.0):
    """The comparisons of a simulated study; condition c is better by c times the shift."""
    shared = generator.normal(0.5, 0.02, seeds)
    scores = {
        str(c): {"clean": shared + generator.normal(0, 0.01, seeds) + shift * c}
        for c in range(conditions)
    }
    return compare(frame_of(scores), AStudy(Asked({"clean": 1.0}), pairs))


@pytest.mark.slow
@pytest.mark.parametrize("conditions", [2, 4], ids=["one comparison", "six comparisons"])
def test_the_family_wise_error_of_whole_studies(conditions):
    """Studies of equal conditions that say better or worse anywhere: 5 %, or less if correlated."""
    generator = np.random.default_rng(2)
    pairs = [(str(a), str(b)) for a, b in itertools.combinations(range(conditions), 2)]
    studies, wrong = 600, 0
    for _ in range(studies):
        table = study_of(generator, pairs, conditions)
        wrong += bool(((table["low"] > 0) | (table["high"] < 0)).any())
    error = 3 * np.sqrt(0.05 * 0.95 / studies)
    assert wrong / studies <= 0.05 + error
    assert wrong / studies >= (0.05 - error if conditions == 2 else 0.005)


@pytest.mark.slow
def test_the_word_same_is_rarely_wrong():
    """A true difference of the margin is called the same in 2.5 % of studies."""
    generator = np.random.default_rng(3)
    studies = 600
    found = [study_of(generator, [("1", "0")], 2, 30, 0.01)["word"][0] for _ in range(studies)]
    rate = found.count("same") / studies
    assert rate == pytest.approx(0.025, abs=3 * np.sqrt(0.025 * 0.975 / studies))
