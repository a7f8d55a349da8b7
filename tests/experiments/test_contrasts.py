"""What a study's question asks for: read, compared, corrected, said."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from experiments.contrasts import Pairs, plain_contrasts, read_contrasts
from experiments.report import make_report
from experiments.reporting.comparisons import against_baseline, families
from experiments.reporting.statistics import compare
from experiments.reporting.summary import contrasted, summarize
from experiments.study import StudyError, read_study
from tests.experiments.synthetic import make_record, make_run

SEEDS = range(1, 7)
FACTORS = {
    f"{rate}, {kind}": {"rate": rate, "kind": kind}
    for rate in ("0.1", "0.3", "0.5")
    for kind in "ab"
}


def scores(names, seed=0):
    generator = np.random.default_rng(seed)
    return {
        name: {s: float(generator.normal(0.7 + 0.02 * place, 0.01)) for s in SEEDS}
        for place, name in enumerate(names)
    }


def holm_by_hand(p_values):
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    found, most = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        most = max(most, min(1.0, p_values[place] * (len(p_values) - rank)))
        found[place] = most
    return found


def test_all_pairs_of_a_factor_are_compared_and_corrected_over():
    values = scores("abcd")
    (family,) = families(values, {name: {"size": name} for name in "abcd"}, [Pairs("size")])
    found = {(one.left, one.right): one.difference for one in family.comparisons}
    assert set(found) == {(b, a) for a, b in itertools.combinations("abcd", 2)}
    tests = [stats.ttest_rel([*values[b].values()], [*values[a].values()]) for b, a in found]
    assert [d.p for d in found.values()] == pytest.approx([test.pvalue for test in tests])
    expected = holm_by_hand([test.pvalue for test in tests])
    assert [d.holm for d in found.values()] == pytest.approx(expected)


def test_a_main_effect_is_of_means_over_the_other_factors():
    values = scores(FACTORS)
    (family,) = families(values, FACTORS, [Pairs("kind")])
    (one,) = family.comparisons
    assert (family.title, family.single) == ("Pairs of kind, mean over rate", False)
    assert (one.left, one.right) == ("b", "a")
    mean = {k: np.mean([[*values[f"{r}, {k}"].values()] for r in (0.1, 0.3, 0.5)], 0) for k in "ab"}
    test = stats.ttest_rel(mean["b"], mean["a"])
    assert one.difference.mean == pytest.approx(np.mean(mean["b"] - mean["a"]))
    assert one.difference.p == pytest.approx(test.pvalue)


def test_pairs_within_a_factor_never_cross_it():
    (family,) = families(scores(FACTORS), FACTORS, [Pairs("rate", within="kind")])
    pairs = [(one.left, one.right) for one in family.comparisons]
    assert len(pairs) == 6
    assert all(left[-1] == right[-1] for left, right in pairs)
    assert family.single


def test_a_level_has_the_seeds_that_all_its_conditions_have():
    values = scores(FACTORS)
    del values["0.3, a"][2]
    (family,) = families(values, FACTORS, [Pairs("kind")])
    assert family.comparisons[0].difference.n == 5


def test_a_comparison_has_one_corrected_p():
    values = scores("abcd") | {"other": scores("x", 3)["x"]}
    factors = {name: {"size": name} for name in "abcd"} | {"other": {}}
    found = families(values, factors, [Pairs("size")])
    base = against_baseline(values, "a", found)
    in_table = {one.left: one.difference.holm for one in found[0].comparisons if one.right == "a"}
    assert {name: base[name].holm for name in "bcd"} == pytest.approx(in_table)
    assert base["other"].holm == base["other"].p
    assert against_baseline(values, "a", []) == compare(values, "a")


def runs(values, factors):
    return [
        replace(make_run(name, seed, value), factors=factors[name])
        for name, of_one in values.items()
        for seed, value in of_one.items()
    ]


def test_the_report_has_a_table_and_sentences_for_each_family():
    values = scores("ab") | {"c": scores("bc", 1)["b"]}
    factors = {name: {"size": name} for name in values}
    of_study = runs(values, factors)
    contrasts = (Pairs("size"), Pairs(("a", "c")))
    record = replace(make_record(of_study, baseline="a"), contrasts=contrasts)
    rows = summarize(record, of_study)
    assert [family.title for family in contrasted(record, rows)] == [
        "Pairs of size",
        "Pairs among a; c",
    ]
    document = make_report(record, rows)
    table = document.split("### Pairs of size\n\n")[1].split("\n\n")[0].splitlines()
    assert [re.split(r" \| ", line)[0] for line in table[2:]] == ["| b − a", "| c − a", "| c − b"]
    assert "**Pairs of size** (3 comparisons): " in document
    assert "for *b*; *c* over all comparisons of their table under [Contrasts]" in document


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("rate", "contrasts must be a list of mappings such as {pairs: factor}, got 'rate'"),
        ([3], "contrasts: an entry must be such as {pairs: factor}, got 3"),
        ([{"within": "kind"}], "an entry must be such as {pairs: factor}"),
        ([{"pairs": "rat"}], "contrasts: factor 'rat' is unknown (closest: rate)"),
        ([{"pairs": "rate", "within": "kin"}], "factor 'kin' is unknown (closest: kind)"),
        ([{"pairs": "rate", "of": "kind"}], "contrasts: field 'of' is unknown"),
        ([{"pairs": "rate", "within": "rate"}], "pairs of 'rate' within itself are none"),
        ([{"pairs": None}], "pairs must name a factor or list conditions"),
        ([{"pairs": ["0.1, a", "0.1, c"]}], "contrasts: condition '0.1, c' is unknown"),
        ([{"pairs": ["0.1, a"]}], "pairs must list two conditions or more, each once"),
        ([{"pairs": ["0.1, a", "0.1, a"]}], "pairs must list two conditions or more, each once"),
        ([{"pairs": [["0.1, a"], {}]}], "contrasts: condition ['0.1, a'] is unknown"),
        ([{"pairs": ["0.1, a", "0.1, b"], "within": "kind"}], "does not go with a list"),
        ([{"pairs": "rate"}, {"pairs": "rate"}], "contrasts: 'rate' stands twice"),
    ],
)
def test_contrasts_that_can_not_be_made_are_told(data, problem):
    contrasts, problems = read_contrasts(data, FACTORS)
    assert contrasts == ()
    assert any(problem in one for one in problems)


def test_contrasts_of_a_study_without_a_grid_are_of_conditions():
    factors = {"none": {}, "drop": {}}
    assert "there is no grid, so 'rate'" in read_contrasts([{"pairs": "rate"}], factors)[1][0]
    assert read_contrasts([{"pairs": ["none", "drop"]}], factors)[1] == []


def test_contrasts_are_read_back():
    data = [{"pairs": "rate", "within": "kind"}, {"pairs": ["0.1, a", "0.5, b"]}, {"pairs": "kind"}]
    contrasts, problems = read_contrasts(data, FACTORS)
    assert (plain_contrasts(contrasts), problems) == (data, [])
    assert read_contrasts(None, FACTORS) == ((), [])


def test_a_study_file_names_its_contrasts(tmp_path):
    text = """
base: {epochs: 1, train_images: 50}
grid:
  factors: {rate: [0.1, 0.3]}
  fields: {spec: {"layer4.0": {DropBlock2d: {p: "${rate}", block_size: 3}}}}
conditions: {none: {}}
baseline: none
contrasts: [{pairs: %s}]
seeds: [1]
"""
    path = tmp_path / "study.yaml"
    path.write_text(text % "rate", encoding="utf-8")
    study = read_study(path)
    assert study.contrasts == (Pairs("rate"),)
    assert study.record("")["contrasts"] == [{"pairs": "rate"}]
    path.write_text(text % "rates", encoding="utf-8")
    with pytest.raises(StudyError, match="factor 'rates' is unknown"):
        read_study(path)
