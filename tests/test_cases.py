"""The samples that stand for all cases: every pair of values is in them."""

import itertools

import pytest

from tests.cases import covering_pairs, rest_slow


@pytest.mark.parametrize("sizes", [(3,), (4, 3), (2, 3, 4), (2, 3, 4, 4, 2), (3, 3, 3, 3)], ids=str)
def test_every_pair_is_covered(sizes):
    rows = [[*enumerate(row)] for row in itertools.product(*map(range, sizes))]
    chosen = covering_pairs(rows)
    pairs = [
        {pair for i in positions for pair in itertools.combinations(rows[i], 2)}
        for positions in (chosen, range(len(rows)))
    ]
    assert pairs[0] == pairs[1]
    assert chosen == sorted(set(chosen))
    least = max(a * b for a, b in itertools.pairwise(sorted((1, *sizes))))
    assert least <= len(chosen) <= 2 * least


def test_no_rows():
    assert covering_pairs([]) == []


def test_rest_slow():
    def slow(cases):
        return [bool(getattr(case, "marks", ())) for case in cases]

    assert slow(rest_slow("abc")) == [False, True, True]
    assert slow(rest_slow([("a", 1), ("b", 2)], [("b", 2)])) == [True, False]
    (named,) = rest_slow([pytest.param("a", id="first")], plain=0)
    assert (named.values, named.id) == (("a",), "first")
