"""Known answers, closed testing by brute force, and the rate of false alarms."""

import gc
import math
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from experiments.reporting.chance import pairs_of_replicas
from experiments.reporting.statistics import (
    Difference,
    average,
    compare,
    compare_pairs,
    detectable_effect,
    equivalence_p,
    holm,
    mean_interval,
    paired_difference,
)

# Student (1908), sleep gained by ten patients with two drugs: t(9) = 4.0621, p = .002833
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
# Darwin's maize (Fisher, 1935), crossed minus self-fertilized, eighths of an inch: t(14) = 2.148
MAIZE = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
# Moore and McCabe, vitamin C in CSB, mg per 100 g: 22.5, 95 % interval 16.5 to 28.5
VITAMIN_C = [26, 31, 23, 22, 11, 22, 14, 31]


p_values = st.one_of(st.none(), st.floats(0, 1), st.sampled_from([0.0, 0.01, 0.025, 0.05, 1.0]))


def closed_testing(p_values):
    """A hypothesis is rejected if Bonferroni rejects every intersection that it is part of."""
    known = [1.0 if p is None else p for p in p_values]
    places = range(len(known))
    sizes = range(1, len(known) + 1)
    subsets = list(chain.from_iterable(combinations(places, size) for size in sizes))
    return [
        max(min(1.0, len(s) * min(known[i] for i in s)) for s in subsets if place in s)
        for place in places
    ]


def shares(counts, images=1297):
    """Counts of images classified right, as accuracies."""
    return [count / images for count in counts]


def test_paired_t_on_students_sleep():
    found = paired_difference(DRUG_2, DRUG_1)
    assert (found.n, found.mean) == (10, pytest.approx(1.58))
    assert found.interval == pytest.approx((0.7001142, 2.4598858), rel=1e-6)
    assert found.p == pytest.approx(0.00283289, rel=1e-5)


def test_paired_t_on_darwins_maize():
    found = paired_difference(MAIZE, [0] * 15)
    assert found.mean == pytest.approx(20.93, abs=0.005)
    assert found.p == pytest.approx(0.0497, abs=5e-5)
    assert found.interval == pytest.approx((0.0313, 41.8353), abs=5e-4)


def test_interval_of_a_mean_on_vitamin_c():
    assert mean_interval(VITAMIN_C) == pytest.approx((16.5, 28.5), abs=0.05)
    assert mean_interval(VITAMIN_C[:2]) is None
    assert mean_interval([0.5] * 4) is None


@pytest.mark.parametrize(
    ("p_values", "corrected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # Wikipedia's example
        ([0.01, 0.02, 0.03, 0.04, 0.05], [0.05, 0.08, 0.09, 0.09, 0.09]),  # R: p.adjust
        ([0.6, 0.5], [1.0, 1.0]),
        ([0.04], [0.04]),
        ([None, 0.02, None], [None, 0.06, None]),
        ([], []),
    ],
)
def test_holm_on_known_answers(p_values, corrected):
    assert holm(p_values) == [p and pytest.approx(p) for p in corrected]


@given(st.lists(p_values, max_size=6))
@example([0.02, 0.02, 0.02])
@example([0.04, 0.01, None])
def test_holm_is_closed_testing_with_bonferroni(p_values):
    for found, p, closed in zip(holm(p_values), p_values, closed_testing(p_values), strict=True):
        assert found is None if p is None else found == pytest.approx(closed)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_keeps_the_order_and_lowers_nothing(p_values):
    found = holm(p_values)
    assert all(p <= corrected <= 1 for p, corrected in zip(p_values, found, strict=True))
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    assert [found[i] for i in order] == sorted(found)


def test_no_interval_below_three_pairs():
    found = paired_difference([0.8, 0.7], [0.5, 0.6])
    assert (found.mean, found.interval, found.p) == (pytest.approx(0.2), None, None)
    assert found.verdict == "too few"
    assert paired_difference([0.8, 0.7, 0.6], [0.5, 0.6, 0.6]).interval is not None
    assert paired_difference([], []) == Difference(0, None)
    assert paired_difference([], []).verdict == "no pairs"


def test_equal_scores_are_identical():
    found = paired_difference([0.5, 0.6, 0.7], [0.5, 0.6, 0.7])
    assert (found.mean, found.interval, found.p, found.verdict) == (0.0, None, None, "identical")
    assert paired_difference([0.5], [0.5]).verdict == "identical"
    dust = [0.1 + 0.2, 0.7, 0.3]
    assert dust != [0.3, 0.7, 0.3]
    assert paired_difference(dust, [0.3, 0.7, 0.3]).verdict == "identical"


def test_the_same_difference_with_every_seed_has_no_test():
    base = [800, 903, 1011, 1100]
    found = paired_difference(shares([count + 13 for count in base]), shares(base))
    assert (found.interval, found.p, found.verdict) == (None, None, "constant")
    assert found.mean == pytest.approx(13 / 1297)
    assert paired_difference([0.3, 0.4], [0.2, 0.3]).verdict == "too few"


@given(
    st.lists(st.integers(0, 1297), min_size=3, max_size=8),
    st.integers(-1297, 1297),
    st.integers(1, 10**6),
)
def test_rounding_never_makes_a_spread(counts, shift, images):
    found = paired_difference(
        [(count + shift) / images for count in counts], [count / images for count in counts]
    )
    assert found.verdict == ("constant" if shift else "identical")


def test_one_image_in_a_million_is_a_spread():
    found = paired_difference(shares([5, 6, 8], 10**6), shares([4, 5, 6], 10**6))
    assert found.p is not None


def test_pairs_are_made_by_seed_whatever_the_order():
    scores = {"none": {1: 0.5, 2: 0.8, 3: 0.1}, "drop": {3: 0.2, 1: 0.7, 2: 0.9}}
    found = compare(scores, "none")["drop"]
    assert found.mean == pytest.approx(0.4 / 3)
    assert found.p == pytest.approx(paired_difference([0.2, 0.1, 0.1], [0] * 3).p)


def test_only_seeds_that_both_have_are_compared():
    scores = {"none": {1: 0.5, 2: 0.6, 3: 0.7, 9: 0.0}, "drop": {1: 0.6, 3: 0.9, 4: 1.0}}
    found = compare(scores, "none")["drop"]
    assert (found.n, found.mean) == (2, pytest.approx(0.15))
    assert compare({"none": {1: 0.5}, "drop": {2: 0.5}}, "none")["drop"].verdict == "no pairs"


def test_all_comparisons_of_a_table_are_corrected_for():
    base = dict.fromkeys(range(4), 0.5)
    drop = dict(enumerate([0.6, 0.61, 0.63, 0.6]))
    alone = compare({"none": base, "drop": drop}, "none")["drop"]
    both = compare({"none": base, "same": base, "few": {0: 0.5}, "drop": drop}, "none")["drop"]
    assert alone.holm == alone.p
    assert both.holm == pytest.approx(3 * alone.p)
    assert (alone.verdict, both.verdict) == ("higher", "higher")


def test_the_verdict_is_that_of_the_corrected_p():
    assert Difference(3, 0.1, (0.0, 0.2), p=0.03, holm=0.06).verdict == "not shown"
    assert Difference(3, 0.1, (0.0, 0.2), p=0.03, holm=0.04).verdict == "higher"
    assert Difference(3, -0.1, (-0.2, 0.0), p=0.03, holm=0.04).verdict == "lower"
    assert Difference(3, 0.1, (0.0, 0.2), p=0.05, holm=0.05).verdict == "not shown"


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_scores_must_be_finite(score):
    with pytest.raises(ValueError, match=rf"finite, got {score} of 'drop' with seed 7"):
        compare({"none": {7: 0.5}, "drop": {7: score}}, "none")


def test_holm_looks_not_through_all_that_is_loaded(monkeypatch):
    """Where all is frozen, a full collection takes no time."""
    done = []

    def look(phase, collection):
        if (phase, collection["generation"]) == ("start", 2):
            done.append("collect")

    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: done.append("unfreeze"))
    gc.collect()
    gc.callbacks.append(look)
    try:
        holm([0.01, 0.04])
    finally:
        gc.callbacks.remove(look)
    assert done == ["freeze", "collect", "unfreeze"]


def test_family_wise_error_rate_on_800_null_tables():
    """Expected .044 (shared baseline, seeds' effects, shares of 1,297 images); z = 3 is .022."""
    generator = np.random.default_rng(20240607)
    alarms = 0
    for _ in range(800):
        n, others = generator.integers(4, 11), generator.integers(3, 6)
        seeds = generator.normal(0.7, 0.02, n)
        drawn = seeds + generator.normal(0, 0.015, (others + 1, n))
        accuracies = np.round(1297 * drawn) / 1297
        scores = {str(i): dict(enumerate(row.tolist())) for i, row in enumerate(accuracies)}
        found = compare(scores, "0").values()
        alarms += any(difference.holm < 0.05 for difference in found)
    assert 0.022 <= alarms / 800 <= 0.066


def test_two_one_sided_tests_are_scipys():
    generator = np.random.default_rng(5)
    for _ in range(50):
        n, bound = int(generator.integers(3, 12)), float(generator.uniform(0.005, 0.1))
        one, other = generator.normal(0.7, 0.02, (2, n)).tolist()
        differences = np.subtract(one, other)
        above = stats.ttest_1samp(differences, -bound, alternative="greater").pvalue
        below = stats.ttest_1samp(differences, bound, alternative="less").pvalue
        assert equivalence_p(one, other, bound) == pytest.approx(max(above, below), abs=1e-12)


def test_what_may_be_hidden_is_what_equivalence_can_not_exclude():
    found = paired_difference(DRUG_2, DRUG_1)
    assert found.hidden == pytest.approx(2.4598858, rel=1e-6)
    assert equivalence_p(DRUG_2, DRUG_1, found.hidden) == pytest.approx(0.025)
    assert equivalence_p(DRUG_1, DRUG_2, found.hidden) == pytest.approx(0.025)
    assert equivalence_p(DRUG_2, DRUG_1, found.hidden + 0.1) < 0.025


def test_equivalence_needs_a_bound_and_a_test():
    with pytest.raises(ValueError, match="bound must be positive, got 0"):
        equivalence_p([0.1, 0.2, 0.4], [0.1, 0.1, 0.1], 0)
    assert equivalence_p([0.1, 0.2], [0.1, 0.1], 0.1) is None
    assert equivalence_p([], [], 0.1) is None
    assert paired_difference([0.1, 0.2], [0.1, 0.1]).hidden is None


def test_no_correlation_has_no_sign():
    one = [0.95 + 0.013 * step for step in (0, 0, 1, -1, -1, 1)]
    other = [0.91 + 0.007 * step for step in (-1, 1, -2, 1, -1, 2)]
    assert abs(stats.pearsonr(one, other).statistic) < 1e-12  # dust, of either sign
    assert f"{paired_difference(one, other).correlation:+.2f}" == "+0.00"


def test_the_correlation_is_of_both_over_the_seeds():
    generator = np.random.default_rng(4)
    one, other = generator.normal(0.7, 0.02, (2, 9)).tolist()
    found = paired_difference(one, other)
    assert found.correlation == pytest.approx(np.corrcoef(one, other)[0, 1])
    assert paired_difference(other, one).correlation == pytest.approx(found.correlation)
    assert paired_difference(one, [0.5] * 9).correlation is None
    assert paired_difference(one, [0.5] * 9).pays is None
    assert paired_difference(one[:2], other[:2]).correlation is None


def test_pairing_pays_where_its_interval_is_shorter_than_welchs():
    generator = np.random.default_rng(6)
    seen = set()
    for n in (3, 6, 12):
        for _ in range(20):
            base = generator.normal(0.7, 0.02, n)
            one = base * generator.choice([0, 0.5, 1]) + generator.normal(0, 0.02, n)
            table = np.array([one, base])
            parts = table.var(axis=1, ddof=1) / n
            freedom = parts.sum() ** 2 / (parts**2 / (n - 1)).sum()
            welch = stats.t.ppf(0.975, freedom) * np.sqrt(parts.sum())
            paired = stats.t.ppf(0.975, n - 1) * (one - base).std(ddof=1) / np.sqrt(n)
            found = paired_difference(one.tolist(), base.tolist())
            assert found.pays == (paired < welch)
            assert not (found.pays and found.correlation <= 0)
            seen.add(found.pays)
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("n", "family", "effect"), [(12, 1, 0.8864), (6, 30, 3.1112), (3, 1, 3.26)]
)
def test_what_is_found_is_found_in_80_of_100_tests(n, family, effect):
    level = 0.05 / family
    found = detectable_effect(n, level)
    assert found == pytest.approx(effect, abs=0.01)
    generator = np.random.default_rng(n)
    samples = generator.normal(found, 1.0, (40_000, n))
    p = stats.ttest_1samp(samples, 0, axis=1).pvalue
    assert np.mean(p < level) == pytest.approx(0.8, abs=0.006)  # three standard errors


def test_what_is_found_takes_the_spread_of_the_differences_and_the_strictest_level():
    scores = {
        "a": dict(enumerate(DRUG_1)),
        "b": dict(enumerate(DRUG_2)),
        "c": dict(enumerate(MAIZE)),
    }
    for pairs in ([("b", "a")], [("b", "a"), ("c", "a")]):
        found = compare_pairs(scores, pairs)[0]
        spread = np.std(np.subtract(DRUG_2, DRUG_1), ddof=1)
        assert found.detectable == pytest.approx(spread * detectable_effect(10, 0.05 / len(pairs)))
    assert paired_difference([0.1, 0.2], [0.1, 0.1]).detectable is None


def test_a_verdict_of_equality_needs_its_test_below_05_and_no_difference():
    tested = Difference(6, 0.001, (-0.01, 0.01), p=0.6, holm=0.6, margin=0.02, tost=0.049)
    assert (tested.verdict, tested.is_within) == ("equal", True)
    assert Difference(6, 0.0, (-0.1, 0.1), p=0.6, margin=0.02, tost=0.05).verdict == "not shown"
    assert Difference(6, 0.0, (-0.1, 0.1), p=0.6).verdict == "not shown"
    assert Difference(6, 0.01, (0.0, 0.1), p=0.01, margin=0.2, tost=0.01).verdict == "higher"


@pytest.mark.parametrize("bad", [0.0, -0.1, math.nan])
def test_a_margin_must_be_positive(bad):
    scores = {"a": dict(enumerate(DRUG_1)), "b": dict(enumerate(DRUG_2))}
    with pytest.raises(ValueError, match="bound must be positive"):
        compare_pairs(scores, [("b", "a")], margin=bad)


shares_or_not = st.lists(st.sampled_from([0, 1, 700, 701, 1297]), max_size=5)


@given(shares_or_not, shares_or_not, st.sampled_from([1e-12, 0.01, 1.0]))
@example([700, 700, 700], [700, 701, 700], 0.01)
@example([700, 701, 702], [699, 700, 701], 0.01)
def test_nothing_breaks_on_any_scores(one, other, margin):
    """pytest makes errors of warnings, such as those of division by zero."""
    scores = {
        name: {seed: count / 1297 for seed, count in enumerate(counts)}
        for name, counts in (("a", one), ("b", other))
    }
    (found,) = compare_pairs(scores, [("b", "a")], margin)
    tested = found.interval is not None
    assert found.n == min(len(one), len(other))
    assert tested == (found.p is not None) == (found.tost is not None)
    assert tested == (found.detectable is not None)
    assert (found.correlation is None) == (found.pays is None)
    for number in (found.p, found.tost, found.detectable, found.correlation):
        assert number is None or math.isfinite(number)
    assert found.verdict in VERDICTS


VERDICTS = ("higher", "lower", "equal", "not shown", "identical", "constant", "too few", "no pairs")


def test_all_pairs_of_replicas_are_tested_once():
    generator = np.random.default_rng(7)
    table = {str(k): dict(enumerate(generator.normal(0.7, 0.02, 12).tolist())) for k in range(7)}
    found = pairs_of_replicas(table)
    assert len(found.differences) == found.tested == 21
    assert len({frozenset(pair) for pair in found.differences}) == 21
    p = {
        (a, b): stats.ttest_rel([*table[a].values()], [*table[b].values()]).pvalue
        for a, b in found.differences
    }
    assert {pair: one.p for pair, one in found.differences.items()} == pytest.approx(p)
    assert found.alarms == sum(one < 0.05 for one in p.values()) == 3  # not corrected
    low, high = found.interval  # by the binomial distribution itself
    assert stats.binom.sf(found.alarms - 1, 21, low) == pytest.approx(0.025)
    assert stats.binom.cdf(found.alarms, 21, high) == pytest.approx(0.025)


def test_the_share_of_alarms_over_many_a_a_studies_is_5_percent():
    """Pairs share replicas, but the mean share is that of the level: 300 studies, 10 pairs each."""
    generator = np.random.default_rng(11)
    shares = []
    for _ in range(300):
        seeds = generator.normal(0.7, 0.02, 6)
        table = seeds + generator.normal(0, 0.01, (5, 6))
        found = pairs_of_replicas({str(k): dict(enumerate(row)) for k, row in enumerate(table)})
        shares.append(found.alarms / found.tested)
    assert np.mean(shares) == pytest.approx(0.05, abs=3 * np.std(shares) / len(shares) ** 0.5)
    assert abs(np.mean(shares) - 0.05) < 0.02


def test_replicas_without_a_test_are_not_counted():
    same = {1: 0.5, 2: 0.6, 3: 0.7}
    found = pairs_of_replicas({"a": same, "b": same, "c": {1: 0.5, 2: 0.61, 3: 0.7}})
    assert (len(found.differences), found.tested, found.alarms) == (3, 2, 0)


def test_replicas_are_averaged_seed_by_seed():
    found = average([{1: 0.5, 2: 0.6}, {1: 0.7, 3: 0.1}, {1: 0.6}])
    assert found == {1: pytest.approx(0.6), 2: 0.6, 3: 0.1}
    assert average([]) == {}
