"""Known answers, closed testing by brute force, and the rate of false alarms."""

import math
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from experiments.reporting.statistics import (
    Difference,
    average,
    compare,
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


def test_family_wise_error_rate_on_2000_null_tables():
    """Expected .044 (shared baseline, seeds' effects, shares of 1,297 images); z = 3 is .014."""
    generator = np.random.default_rng(20240607)
    alarms = 0
    for _ in range(2000):
        n, others = generator.integers(4, 11), generator.integers(3, 6)
        seeds = generator.normal(0.7, 0.02, n)
        drawn = seeds + generator.normal(0, 0.015, (others + 1, n))
        accuracies = np.round(1297 * drawn) / 1297
        scores = {str(i): dict(enumerate(row.tolist())) for i, row in enumerate(accuracies)}
        found = compare(scores, "0").values()
        alarms += any(difference.holm < 0.05 for difference in found)
    assert 0.035 <= alarms / 2000 <= 0.065


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


def test_replicas_are_averaged_seed_by_seed():
    found = average([{1: 0.5, 2: 0.6}, {1: 0.7, 3: 0.1}, {1: 0.6}])
    assert found == {1: pytest.approx(0.6), 2: 0.6, 3: 0.1}
    assert average([]) == {}
