"""What a study's question asks for: read, compared, corrected, said."""

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import yaml
from scipy import stats

from experiments.contrasts import plain_contrasts, read_contrasts, split_problems
from experiments.datasets.sources import scored_splits
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
} | {"none": {}, "other": {}}


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


def asked(*entries, factors=FACTORS, baseline=None, **options):
    """One family."""
    data = {"family": {**options, "compare": list(entries)}}
    (family,), problems = read_contrasts(data, factors, baseline)
    assert problems == []
    return family


def pairs(*entries, **options):
    return [(one.left.name, one.right.name) for one in asked(*entries, **options).contrasts]


def test_a_condition_minus_another():
    assert pairs({"take": "other", "minus": "none"}) == [("other", "none")]
    assert pairs({"take": "0.1, a", "minus": "0.3, b"}) == [("0.1, a", "0.3, b")]
    assert pairs({"take": 1, "minus": 2.5}, factors={"1": {}, "2.5": {}}) == [("1", "2.5")]


def test_a_mean_of_conditions_minus_another_mean():
    family = asked({"take": ["other", "0.1, a"], "minus": ["none", "0.3, a", "0.3, b"]})
    values = scores(FACTORS)
    (one,) = families(values, [family])[0].comparisons
    assert (one.left, one.right) == ("mean of other; 0.1, a", "mean of none; 0.3, a; 0.3, b")
    table = {name: np.array([*of_one.values()]) for name, of_one in values.items()}
    left = (table["other"] + table["0.1, a"]) / 2
    right = (table["none"] + table["0.3, a"] + table["0.3, b"]) / 3
    test = stats.ttest_1samp(left - right, 0)
    assert one.difference.mean == pytest.approx((left - right).mean())
    assert one.difference.p == pytest.approx(test.pvalue)
    assert one.pair is None


def test_all_pairs_of_a_factor_are_compared_and_corrected_over():
    factors = {name: {"size": name} for name in "abcd"}
    (family,) = families(scores("abcd"), [asked({"pairs": "size"}, factors=factors)])
    values = scores("abcd")
    found = {(one.left, one.right): one.difference for one in family.comparisons}
    assert set(found) == {(b, a) for a, b in itertools.combinations("abcd", 2)}
    tests = [stats.ttest_rel([*values[b].values()], [*values[a].values()]) for b, a in found]
    assert [d.p for d in found.values()] == pytest.approx([test.pvalue for test in tests])
    expected = holm_by_hand([test.pvalue for test in tests])
    assert [d.holm for d in found.values()] == pytest.approx(expected)
    assert {d.family for d in found.values()} == {6}


def test_holm_is_over_all_entries_of_a_family():
    values = scores(FACTORS)
    entries = [{"take": "other", "minus": "none"}, {"pairs": "rate", "within": "kind"}]
    (together,) = families(values, [asked(*entries)])
    apart = [one.p for one in (c.difference for c in together.comparisons)]
    assert len(apart) == 7
    assert [c.difference.holm for c in together.comparisons] == pytest.approx(holm_by_hand(apart))


def test_a_main_effect_is_of_means_over_the_other_factors():
    values = scores(FACTORS)
    mean = {k: np.mean([[*values[f"{r}, {k}"].values()] for r in (0.1, 0.3, 0.5)], 0) for k in "ab"}
    test = stats.ttest_rel(mean["b"], mean["a"])
    for entry in ({"pairs": "kind"}, {"take": {"kind": "b"}, "minus": {"kind": "a"}}):
        (family,) = families(values, [asked(entry)])
        (one,) = family.comparisons
        assert (one.left, one.right) == ("b (mean over rate)", "a (mean over rate)")
        assert one.difference.mean == pytest.approx(np.mean(mean["b"] - mean["a"]))
        assert one.difference.p == pytest.approx(test.pvalue)


def test_a_mean_may_be_over_some_levels():
    family = asked({"take": {"rate": [0.1, 0.3], "kind": "a"}, "minus": {"rate": [0.5]}})
    (one,) = family.contrasts
    assert (one.left.name, one.left.conditions) == ("0.1 and 0.3, a (mean)", ("0.1, a", "0.3, a"))
    assert (one.right.name, one.right.conditions) == ("0.5 (mean over kind)", ("0.5, a", "0.5, b"))


def test_each_level_against_the_same_level_of_another():
    entry = {"take": {"kind": "b"}, "minus": {"kind": "a"}, "within": "rate"}
    assert pairs(entry) == [(f"{rate}, b", f"{rate}, a") for rate in ("0.1", "0.3", "0.5")]
    against = {"take": {"kind": "b"}, "minus": "none", "within": ["rate"]}
    assert pairs(against) == [(f"{rate}, b", "none") for rate in ("0.1", "0.3", "0.5")]
    three = {
        ", ".join(levels): dict(zip(("rate", "size", "kind"), levels, strict=True))
        for levels in itertools.product(("1", "2"), ("x", "y"), ("a", "b"))
    }
    assert pairs(entry, factors=three) == [
        (f"{rate}, b (mean over size)", f"{rate}, a (mean over size)") for rate in "12"
    ]
    assert len(pairs({**entry, "within": ["rate", "size"]}, factors=three)) == 4


def test_pairs_within_a_factor_never_cross_it():
    found = pairs({"pairs": "rate", "within": "kind"})
    assert len(found) == 6
    assert all(left[-1] == right[-1] for left, right in found)


def test_the_baseline_comes_first_in_pairs():
    factors = {name: {"size": name} for name in "123"}
    found = pairs({"pairs": "size"}, factors=factors, baseline="2")
    assert found == [("1", "2"), ("3", "2"), ("3", "1")]


def test_a_level_has_the_seeds_that_all_its_conditions_have():
    values = scores(FACTORS)
    del values["0.3, a"][2]
    (family,) = families(values, [asked({"pairs": "kind"})])
    assert family.comparisons[0].difference.n == 5


def test_replicas_are_averaged_before_they_are_compared():
    factors = {f"{k}, {r}": {"kind": k, "replica": r} for k in "ab" for r in "01"}
    of_study = [
        replace(make_run(name, seed, value, fields={"replica": int(name[-1]), "epochs": epochs}))
        for name, epochs in (("a, 0", 1), ("a, 1", 1), ("b, 0", 2), ("b, 1", 2))
        for seed, value in scores(factors)[name].items()
    ]
    family = asked({"take": {"kind": "b"}, "minus": {"kind": "a"}}, factors=factors)
    record = replace(make_record(of_study, baseline="a, 0"), contrasts=(family,))
    rows = summarize(record, of_study)
    (one,) = contrasted(record, rows)[0].comparisons
    table = {name: np.array([*of_one.values()]) for name, of_one in scores(factors).items()}
    means = [(table[f"{kind}, 0"] + table[f"{kind}, 1"]) / 2 for kind in "ba"]
    assert one.difference.p == pytest.approx(stats.ttest_rel(*means).pvalue)
    assert one.pair == {"a, 0", "b, 0"}
    assert rows[2].scores["clean"].difference.holm == one.difference.holm


def test_a_comparison_has_one_corrected_p_and_margin():
    values = scores("abcd") | {"other": scores("x", 3)["x"]}
    factors = {name: {"size": name} for name in "abcd"} | {"other": {}}
    found = families(values, [asked({"pairs": "size"}, factors=factors, margin=3)])
    base = against_baseline(values, "a", found)
    in_table = {one.left: one.difference for one in found[0].comparisons if one.right == "a"}
    assert {name: base[name] for name in "bcd"} == in_table
    assert base["other"].holm == base["other"].p
    assert base["other"].tost is None
    assert against_baseline(values, "a", []) == compare(values, "a")
    turned = against_baseline(values, "d", found)
    (there,) = (c.difference for c in found[0].comparisons if (c.left, c.right) == ("d", "a"))
    assert (turned["a"].mean, turned["a"].holm, turned["a"].tost) == (
        pytest.approx(-there.mean),
        there.holm,
        there.tost,
    )


def test_a_primary_family_rules_wherever_it_stands():
    values = scores("abcd")
    factors = {name: {"size": name} for name in "abcd"}
    data = {
        "beside": [{"pairs": "size"}],
        "main": {"primary": True, "compare": [{"take": "b", "minus": "a"}]},
    }
    contrasts, _ = read_contrasts(data, factors)
    found = families(values, contrasts)
    assert [family.title for family in found] == ["main", "beside"]
    base = against_baseline(values, "a", found)
    assert (base["b"].family, base["b"].holm) == (1, base["b"].p)
    assert (base["c"].family, base["d"].family) == (6, 6)


def test_equality_within_a_margin_is_corrected_over_the_family():
    generator = np.random.default_rng(5)
    base = generator.normal(0.7, 0.01, 12)
    gains = {"same": 0.001, "near": 0.006, "far": 0.03}
    values = {"none": dict(enumerate(base))} | {
        name: dict(enumerate(base + generator.normal(gain, 0.004, 12)))
        for name, gain in gains.items()
    }
    entries = [{"take": name, "minus": "none"} for name in gains]
    family = asked(*entries, factors={name: {} for name in values}, margin=1)
    (found,) = families(values, [family])
    alone = []
    for name in gains:
        differences = np.array([*values[name].values()]) - base
        above = stats.ttest_1samp(differences, -0.01, alternative="greater").pvalue
        below = stats.ttest_1samp(differences, 0.01, alternative="less").pvalue
        alone.append(max(above, below))
    tost = [one.difference.tost for one in found.comparisons]
    assert tost == pytest.approx(holm_by_hand(alone))
    verdicts = [one.difference.verdict for one in found.comparisons]
    assert verdicts == ["equal", "higher", "higher"]
    assert [one.difference.is_within for one in found.comparisons] == [True, True, False]


def runs(values, factors):
    return [
        replace(make_run(name, seed, value), factors=factors[name])
        for name, of_one in values.items()
        for seed, value in of_one.items()
    ]


def two_tests(names, seed=0):
    """Runs with scores of their own on two tests."""
    on_tests = [scores(names, seed + place) for place in range(2)]
    return [
        make_run(name, s, {"clean": on_tests[0][name][s], "occluded": on_tests[1][name][s]})
        for name in names
        for s in SEEDS
    ]


def swapped(runs):
    """The same runs, each with the scores of one test in the place of the other."""
    turned = {"clean": "occluded", "occluded": "clean"}
    return [
        replace(
            run,
            result=replace(
                run.result, scores={name: run.result.scores[turned[name]] for name in turned}
            ),
        )
        for run in runs
    ]


def summarized(runs, data):
    contrasts, problems = read_contrasts(data, {run.condition: {} for run in runs}, "a")
    assert problems == []
    record = replace(make_record(runs, baseline="a"), contrasts=contrasts)
    return record, summarize(record, runs)


@pytest.mark.parametrize("options", [{}, {"margin": 3}, {"primary": True}])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_family_on_other_images_is_that_on_clean_ones_with_the_columns_swapped(seed, options):
    entries = [{"pairs": ["a", "b", "c"]}, {"take": ["c", "d"], "minus": "a"}]
    runs = two_tests("abcd", seed)
    on_clean, on_other = ({"x": {**options, "compare": entries}} for _ in range(2))
    on_other["x"]["test"] = "occluded"
    record, rows = summarized(runs, on_other)
    other_record, other_rows = summarized(swapped(runs), on_clean)
    (family,), (same,) = contrasted(record, rows), contrasted(other_record, other_rows)
    assert family.comparisons == same.comparisons
    assert family.comparisons != contrasted(*summarized(runs, on_clean))[0].comparisons
    for row, other in zip(rows, other_rows, strict=True):
        assert row.scores["occluded"] == other.scores["clean"]
        assert row.scores["clean"] == other.scores["occluded"]


def test_a_family_rules_in_the_table_of_its_own_test_alone():
    entries = [{"take": "b", "minus": "a"}, {"take": "d", "minus": "c"}]
    data = {
        "gain": [{"take": "b", "minus": "a"}, {"take": "c", "minus": "a"}],
        "kept": {"test": "occluded", "primary": True, "compare": [*entries]},
    }
    record, rows = summarized(two_tests("abcd"), data)
    kept, gain = contrasted(record, rows)
    assert (kept.title, kept.test, gain.title, gain.test) == ("kept", "occluded", "gain", "clean")
    found = {row.condition: row.scores for row in rows}
    sizes = {
        split: [found[name][split].difference.family for name in "bcd"]
        for split in ("clean", "occluded")
    }
    assert sizes == {"clean": [2, 2, 1], "occluded": [2, 2, 2]}
    assert found["b"]["occluded"].difference == kept.comparisons[0].difference
    assert found["b"]["clean"].difference == gain.comparisons[0].difference
    document = make_report(record, rows)
    over = "Here, p is corrected after Holm: for *b* over all comparisons of their family, above, "
    assert f"{over}else over the 2 other comparisons here." in document.split("### Occluded")[1]
    assert "for *b*; *c* over all comparisons of their family, below, else over the 1" in document
    assert "; each table is corrected for itself, but for what stands in a family on" in document
    alone = make_report(*summarized(two_tests("abcd"), {"gain": data["gain"]}))
    assert "but for what stands in a family" not in alone
    assert "Here, p is" not in alone


def test_the_same_comparison_is_told_of_each_test():
    entries = [{"take": "b", "minus": "a"}, {"take": "b", "minus": "c"}]
    data = {
        "gain": {"primary": True, "margin": 1, "compare": [*entries]},
        "kept": {"primary": True, "margin": 3, "test": "occluded", "compare": [*entries]},
    }
    document = make_report(*summarized(two_tests("abc"), data))
    answer = document.split("## Answer\n\n")[1].split("\n## ")[0]
    assert answer.startswith("**Primary: gain** (2 comparisons): ")
    assert "\n\n**Primary: kept** on occluded test images (2 comparisons): " in answer
    lines = [line.split(": ")[0] for line in answer.splitlines() if line.startswith("- ")]
    told = ["- **b** minus a", "- **b** minus c"]
    assert lines[:4] == [*told, *(f"{line} on occluded test images" for line in told)]
    tables = document.split("## Primary contrasts")[1].split("\n## ")[0]
    assert re.findall("### (.+)", tables) == ["gain", "kept, on occluded test images"]
    assert "A table whose title names no test images is of the clean ones." in tables
    shown = yaml.safe_load(tables.split("```yaml\n")[1].split("```")[0])
    assert shown == data
    assert "names no test images" not in make_report(*summarized(two_tests("abc"), {"x": entries}))


def test_a_family_on_images_that_no_run_has_seen_has_no_pairs():
    data = {"kept": {"test": "noisy", "compare": [{"take": "b", "minus": "a"}]}}
    document = make_report(*summarized(two_tests("ab"), data))
    said = "- **b** minus a on noisy test images: no finished run has a seed in common"
    assert "**kept** on noisy test images (1 comparison): none shown" in document
    assert said not in document  # a family that is not primary tells what it shows
    data["kept"]["primary"] = True
    assert said in make_report(*summarized(two_tests("ab"), data))


def report_of(values, data, factors=None):
    factors = factors or {name: {"size": name} for name in values}
    contrasts, problems = read_contrasts(data, factors, next(iter(values)))
    assert problems == []
    of_study = runs(values, factors)
    record = make_record(of_study, baseline=next(iter(values)))
    record = replace(record, contrasts=contrasts)
    return make_report(record, summarize(record, of_study))


def test_the_report_has_a_table_and_sentences_for_each_family():
    values = scores("ab") | {"c": scores("bc", 1)["b"]}
    data = {"sizes": [{"pairs": "size"}], "a to c": [{"take": "c", "minus": "a"}]}
    document = report_of(values, data)
    table = document.split("### sizes\n\n")[1].split("\n\n")[0].splitlines()
    assert [re.split(r" \| ", line)[0] for line in table[2:]] == ["| b − a", "| c − a", "| c − b"]
    assert "**sizes** (3 comparisons): " in document
    assert "### a to c\n" in document
    assert "for *b*; *c* over all comparisons of their family, below;" in document
    asked = document.split("## Contrasts\n")[1].split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(asked) == data
    assert "TOST" not in document
    assert "Primary" not in document


def test_a_primary_family_comes_first_and_all_of_it_is_told():
    generator = np.random.default_rng(1)
    base = generator.normal(0.7, 0.02, 12)
    values = {
        name: dict(enumerate(base + generator.normal(gain, spread, 12)))
        for name, gain, spread in (
            ("none", 0, 0),
            ("x", 0, 0.002),
            ("y", 0.05, 0.01),
            ("z", 0, 0.1),
        )
    }
    main = (
        {"take": "y", "minus": "x"},
        {"take": "x", "minus": "none"},
        {"take": "z", "minus": "none"},
    )
    data = {
        "beside": [{"take": "z", "minus": "x"}],
        "does it help": {"primary": True, "margin": 1.5, "compare": [*main]},
    }
    document = report_of(values, data, {name: {} for name in values})
    answer = document.split("## Answer\n\n")[1].split("\n## ")[0]
    assert answer.startswith(
        "**Primary: does it help** (3 comparisons): 1 shown to differ, 1 shown "
    )
    assert "to be equal within ±1.5 points, 1 not (up to" in answer
    assert re.search(r"\*\*y\*\* minus x: .+ TOST Holm p \.?\d+: higher\.", answer)
    assert re.search(
        r"\*\*x\*\* minus none: .+, TOST Holm p \S+: equal within ±1.5 points\.", answer
    )
    assert re.search(
        r"\*\*z\*\* minus none: .+: no difference shown, nor equality within ±1", answer
    )
    assert answer.index("What is not primary is exploratory.") < answer.index("**beside**")
    assert document.index("## Primary contrasts") < document.index("### does it help")
    assert document.index("### does it help") < document.index("## Exploratory contrasts")
    assert "| Holm p | TOST ±1.5 points, Holm p |" in document
    assert "TOST" not in document.split("## Exploratory contrasts")[1]


def test_the_report_says_what_pairing_buys_and_what_is_found():
    generator = np.random.default_rng(2)
    base, far = generator.normal(0.7, 0.03, 8), generator.normal(0.7, 0.03, 8)
    values = {"a": base, "b": base + generator.normal(0, 0.001, 8), "c": far}
    values = {name: dict(enumerate(map(float, of_one))) for name, of_one in values.items()}
    document = report_of(values, {"sizes": [{"pairs": "size"}]})
    table, note = document.split("### sizes\n\n")[1].split("\n\n")[:2]
    r = np.corrcoef([*map(list, (v.values() for v in values.values()))])
    assert note.startswith("**Pairing:** r is ")
    assert f"{r[0, 1]:+.2f}; pairing by seed buys nothing in 2 of 3 comparisons." in note
    assert re.search(r"8 seeds with this spread find a difference of \d+\.\d+ to \d+\.\d+ po", note)
    assert note.endswith("with 80 % chance, at Holm's strictest level, .05/3.")
    assert f" | {r[0, 2]:+.2f} | " in table
    alone = report_of(values, {"one": [{"take": "b", "minus": "a"}]})
    assert "pairing by seed shortens the interval. **Power:** 8 seeds" in alone
    assert "with 80 % chance, at .05.\n" in alone


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("rate", "contrasts must map names of families to lists of {take: this, minus: that}"),
        ([{"pairs": "rate"}], "contrasts must map names of families to lists of"),
        ({3: [{"pairs": "rate"}]}, "contrasts: the name of a family must be text, got 3; quote it"),
        ({"a b": [{"pairs": "rate"}], "a  b": [{"pairs": "kind"}]}, "'a  b' stands twice"),
        ({"x": []}, "contrasts: x: it must list at least one of {take: this, minus: that}"),
        ({"x": None}, "contrasts: x: it must list at least one of"),
        ({"x": {"margin": 1}}, "contrasts: x: it must list at least one of"),
        ({"x": {"compare": {"pairs": "rate"}}}, "x: it must list at least one of"),
        ({"x": {"margins": 1, "compare": [{"pairs": "rate"}]}}, "'margins' is unknown (closest: m"),
        ({"x": {"primary": 1, "compare": [{"pairs": "rate"}]}}, "primary must be true or false"),
        (
            {"x": {"test": 3, "compare": [{"pairs": "rate"}]}},
            "x: test must be the name of test images, such as occluded, got 3",
        ),
        ({"x": {"test": None, "compare": [{"pairs": "rate"}]}}, "test images, such as occluded, g"),
        ({"x": [3]}, "x: a comparison must be {take: this, minus: that} or {pairs: factor}, got 3"),
        ({"x": [{"within": "kind"}]}, "x: a comparison must be"),
        ({"x": [{"take": "none"}]}, "x: a comparison must be"),
        ({"x": [{"pairs": "rat"}]}, "contrasts: x: factor 'rat' is unknown (closest: rate)"),
        ({"x": [{"pairs": "rate", "within": "kin"}]}, "factor 'kin' is unknown (closest: kind)"),
        ({"x": [{"pairs": "rate", "of": "kind"}]}, "contrasts: x: field 'of' is unknown"),
        ({"x": [{"pairs": "rate", "within": "rate"}]}, "'rate' is named both by"),
        ({"x": [{"pairs": None}]}, "pairs must name a factor, or list what is compared"),
        ({"x": [{"pairs": ["0.1, a", "0.1, c"]}]}, "x: condition '0.1, c' is unknown (closest: 0"),
        ({"x": [{"pairs": ["0.1, a"]}]}, "pairs must name a factor, or list what is compared: two"),
        ({"x": [{"pairs": ["0.1, a", "0.1, a"]}]}, "'0.1, a' is compared to itself"),
        (
            {"x": [{"pairs": [["0.1, a", {}], "none"]}]},
            "a side must be a condition, a list of them",
        ),
        ({"x": [{"pairs": ["none", "other"], "within": "kind"}]}, "within 'kind' goes with levels"),
        (
            {"x": [{"take": "non", "minus": "other"}]},
            "x: condition 'non' is unknown (closest: none",
        ),
        ({"x": [{"take": {"kind": "c"}, "minus": "none"}]}, "level of 'kind' 'c' is unknown"),
        ({"x": [{"take": {"rate": 0.2}, "minus": "none"}]}, "level of 'rate' '0.2' is unknown"),
        (
            {"x": [{"take": {"knd": "a"}, "minus": "none"}]},
            "factor 'knd' is unknown (closest: kind",
        ),
        ({"x": [{"take": {}, "minus": "none"}]}, "a side that is {} names no level"),
        ({"x": [{"take": [], "minus": "none"}]}, "a mean is of conditions, each once; got []"),
        (
            {"x": [{"take": ["none", "none"], "minus": "other"}]},
            "a mean is of conditions, each once",
        ),
        ({"x": [{"take": {"kind": []}, "minus": "none"}]}, "must have a level, or several"),
        ({"x": [{"take": "none", "minus": ["none"]}]}, "x: 'none' is compared to itself"),
        ({"x": [{"take": {"kind": ["a", "b"]}, "minus": {"kind": "a"}}]}, "is part of both"),
        (
            {"x": [{"take": "none", "minus": "other"}, {"take": "other", "minus": "none"}]},
            "x: 'other' minus 'none' stands twice",
        ),
    ],
)
def test_contrasts_that_can_not_be_made_are_told(data, problem):
    contrasts, problems = read_contrasts(data, FACTORS)
    assert len(contrasts) == (len(data) - 1 if isinstance(data, dict) else 0)
    assert any(problem in one for one in problems), problems


@pytest.mark.parametrize("margin", [0, -1, 0.0, True, "1", float("nan"), float("inf"), [1]])
def test_a_margin_is_a_number_above_0(margin):
    data = {"x": {"margin": margin, "compare": [{"pairs": "rate"}]}}
    _, (problem,) = read_contrasts(data, FACTORS)
    assert problem == f"contrasts: x: margin must be a number of points above 0, got {margin!r}"


def test_all_that_is_wrong_is_told_at_once():
    data = {
        "x": {
            "margin": 0,
            "primary": 1,
            "tests": "clean",
            "compare": [{"take": "nobody", "minus": "noone"}, {"pairs": "rat"}, "none"],
        },
        "y": [{"pairs": "kinds"}],
        "z": [{"pairs": "rate"}],
    }
    (family,), problems = read_contrasts(data, FACTORS)
    assert family.name == "z"
    parts = ("margin", "primary", "'tests'", "'noone'", "'rat'", "comparison must be", "'kinds'")
    for part in (*parts, "'nobody'"):
        assert sum(part in one for one in problems) == 1, part
    assert len(problems) == len(parts)


def test_contrasts_of_a_study_without_a_grid_are_of_conditions():
    factors = {"none": {}, "drop": {}}
    problems = read_contrasts({"x": [{"pairs": "rate"}]}, factors)[1]
    assert "there is no grid, so 'rate' is no factor" in problems[0]
    assert pairs({"pairs": ["none", "drop"]}, factors=factors) == [("drop", "none")]


def test_contrasts_are_read_back():
    data = {
        "rates": [{"pairs": "rate", "within": "kind"}, {"pairs": ["0.1, a", "0.5, b"]}],
        "kinds": {"primary": True, "margin": 1.5, "compare": [{"pairs": "kind"}]},
        "hidden": {"margin": 3, "test": "occluded", "compare": [{"pairs": "kind"}]},
        "in noise": {"test": "noisy", "compare": [{"pairs": "kind"}]},
    }
    contrasts, problems = read_contrasts(data, FACTORS)
    assert [one.test for one in contrasts] == ["clean", "clean", "occluded", "noisy"]
    plain = json.loads(json.dumps(plain_contrasts(contrasts)))
    assert (plain, problems) == (data, [])
    assert read_contrasts(plain, FACTORS)[0] == contrasts
    assert read_contrasts(None, FACTORS) == read_contrasts([], FACTORS) == ((), [])


STUDY = """
base: {{epochs: 1, train_images: 50, test: {test}}}
grid:
  factors: {{rate: [0.1, 0.3]}}
  fields: {{spec: {{"layer4.0": {{DropBlock2d: {{p: "${{rate}}", block_size: 3}}}}}}}}
conditions: {{none: {{}}, A/A: {{replica: 1}}}}
baseline: none
contrasts: {{rates: [{entry}], {more}}}
seeds: [1]
"""


@pytest.fixture
def study_of(tmp_path):
    """A study with one entry of contrasts."""

    def read(entry, more="", test="true"):
        path = tmp_path / "study.yaml"
        path.write_text(STUDY.format(entry=entry, more=more, test=test), encoding="utf-8")
        return read_study(path)

    return read


def test_a_study_file_names_its_contrasts(study_of):
    study = study_of("{pairs: rate}")
    assert [(c.left.name, c.right.name) for c in study.contrasts[0].contrasts] == [("0.3", "0.1")]
    assert study.record("")["contrasts"] == {"rates": [{"pairs": "rate"}]}
    with pytest.raises(StudyError, match="contrasts: rates: factor 'rates' is unknown"):
        study_of("{pairs: rates}")
    with pytest.raises(StudyError, match="the key 'rates' stands twice"):
        study_of("{pairs: rate}], rates: [{pairs: rate}")


@pytest.mark.parametrize("test", ["true", "false"])
def test_a_family_names_a_test_that_its_data_have(study_of, test):
    wrong = ("clutter", "ocluded", "train", "")
    more = [f"f{n}: {{test: '{name}', compare: [{{pairs: rate}}]}}" for n, name in enumerate(wrong)]
    with pytest.raises(StudyError) as error:
        study_of("{pairs: rate}", ", ".join(more), test)
    for number, name in enumerate(wrong):
        known = f"contrasts: f{number}: test must be one of clean, occluded, noisy (of digits), got"
        assert f"{known} {name!r}" in str(error.value)
    kept = "kept: {test: noisy, compare: [{pairs: rate}]}"
    study = study_of(
        "{pairs: rate}", kept + ", same: {test: clean, compare: [{pairs: rate}]}", test
    )
    assert [one.test for one in study.contrasts] == ["clean", "noisy", "clean"]
    pairs_of_rate = [{"pairs": "rate"}]
    assert study.record("")["contrasts"] == {
        "rates": pairs_of_rate,
        "kept": {"test": "noisy", "compare": pairs_of_rate},
        "same": pairs_of_rate,
    }


def test_the_test_of_a_family_is_one_that_all_its_conditions_have():
    data = {
        "x": {"test": "clutter", "compare": [{"take": "a", "minus": "b"}]},
        "y": {"test": "clutter", "compare": [{"take": "b", "minus": "c"}]},
    }
    contrasts, _ = read_contrasts(data, {"a": {}, "b": {}, "c": {}})
    of_data = {"a": "canvas", "b": "canvas", "c": "fake"}
    splits = {name: (one, scored_splits(one)) for name, one in of_data.items()}
    (problem,) = split_problems(contrasts, splits)
    shared = "clean, occluded, noisy (of canvas and fake)"
    assert problem == f"contrasts: y: test must be one of {shared}, got 'clutter'"
    assert split_problems(contrasts, {}) == []


def test_a_replica_is_part_of_a_mean_and_not_compared(study_of):
    with pytest.raises(StudyError, match="rates: 'A/A' repeats 'none', which is the mean of both"):
        study_of("{take: 0.1, minus: A/A}")
    assert study_of("{take: 0.1, minus: [none, A/A]}").contrasts
