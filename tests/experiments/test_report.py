"""From runs to rows, sentences, tables, files: what a report says, and that it is so."""

import csv
import io
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from experiments import report
from experiments.report import make_report, write_report
from experiments.reporting.cost import most_at_once
from experiments.reporting.findings import answer, check, finding, overview
from experiments.reporting.statistics import paired_difference
from experiments.reporting.summary import is_replica, mean_rates, summarize
from experiments.reporting.tables import p_text, table, write_runs, write_summary
from experiments.running import records
from tests.experiments.synthetic import (
    CONFIG,
    ENVIRONMENT,
    diverged,
    epochs,
    failed,
    make_record,
    make_run,
    make_study,
    missing,
)

ROOT = Path(__file__).parents[2]
SPEC = {"layer[34].*": {"DropBlock2d": {"p": 0.5}}}


def rows_of(runs, **record):
    return summarize(make_record(runs, **record), runs)


def text(runs, width=120, **record):
    console = Console(file=io.StringIO(), width=width)
    console.print(table(rows_of(runs, **record)))
    return console.file.getvalue()


def markdown(runs, pictures=(), **record):
    return make_report(make_record(runs, **record), rows_of(runs, **record), pictures)


def section(document, title):
    return re.split(r"\n##+ ", document.split(f"# {title}\n", 1)[1])[0]


@pytest.fixture
def study(monkeypatch):
    """Runs that are read in place of those of a directory."""

    def put(runs, **record):
        monkeypatch.setattr(report, "read_runs", lambda _: (make_record(runs, **record), runs))

    return put


def test_rows_summarize_finished_runs():
    runs = make_study(none=[0.5, 0.7], drop=[0.6, None])
    none, drop = rows_of(runs)
    assert (none.n, none.scores["clean"].mean) == (2, pytest.approx(0.6))
    assert none.scores["clean"].std == pytest.approx(0.02**0.5)
    assert none.scores["clean"].difference is None
    assert (drop.n, drop.scores["clean"].mean, drop.scores["clean"].std) == (1, 0.6, None)
    assert (none.nominal, none.seconds, none.memory) == (None, 6.0, 2e6)


def test_rows_stand_in_the_order_of_the_study_after_the_baseline():
    runs = make_study(b=[0.5], none=[0.5], a=[0.5])
    rows = summarize(make_record(runs), runs[::-1])
    assert [row.condition for row in rows] == ["none", "b", "a"]


def test_every_split_is_a_table_of_its_own():
    runs = [
        make_run(name, seed, {"clean": 0.5 + gain, "noisy": 0.4 + seed / 100})
        for name, gain in (("none", 0.0), ("drop", 0.1))
        for seed in (1, 2, 3)
    ]
    _, drop = rows_of(runs)
    assert list(drop.scores) == ["clean", "noisy"]
    assert drop.scores["clean"].difference.verdict == "constant"
    assert drop.scores["noisy"].difference.verdict == "identical"


def test_failed_diverged_and_missing_runs_are_not_counted():
    base = [make_run("none", seed, seed / 10) for seed in (1, 2, 3, 4)]
    drop = [make_run("drop", 1, 0.3), failed("drop", 2), diverged("drop", 3), missing("drop", 4)]
    _, row = rows_of(base + drop)
    assert (row.n, row.scores["clean"].difference.n) == (1, 1)
    assert row.scores["clean"].difference.mean == pytest.approx(0.2)


def test_a_study_without_its_baseline_still_has_rows():
    none, drop = rows_of([failed("none", 1), make_run("drop", 1, 0.5)])
    assert (none.n, none.scores["clean"].mean, none.seconds) == (0, None, None)
    assert drop.scores["clean"].difference.verdict == "no pairs"
    with pytest.raises(ValueError, match="baseline 'nothing' is none of"):
        rows_of([make_run("none", 1)], baseline="nothing")


def test_ratios_are_over_the_seeds_that_both_have():
    runs = [make_run("none", seed) for seed in (1, 2)] + [make_run("drop", seed) for seed in (2, 3)]
    times = {("none", 1): 100.0, ("none", 2): 4.0, ("drop", 2): 6.0, ("drop", 3): 50.0}
    runs = [
        replace(run, result=replace(run.result, seconds=times[run.condition, run.seed]))
        for run in runs
    ]
    assert rows_of(runs)[1].seconds_ratio == 1.5


def test_rates_are_means_over_epochs_and_sites_that_drop():
    run = make_run("drop", 1, rates=(0.0, 0.2, 0.4))
    assert mean_rates(run.result) == pytest.approx((0.2, 0.21))
    bounds = epochs((1.0,) * 3, sites=("layer4.0/ClipGradNorm", "layer4.0/ClampGrad#2"))
    assert mean_rates(replace(run.result, epochs=bounds)) is None
    unknown = [replace(bounds[0], nominal={"a": 0.5, "b": None}, realized={"a": None, "b": 0.5})]
    assert mean_rates(replace(run.result, epochs=unknown)) is None


def test_an_a_a_condition_differs_in_its_replica_alone():
    runs = [
        make_run("none", 1),
        make_run("A/A", 1, fields={"replica": 1}),
        make_run("both", 1, fields={"replica": 1, "epochs": 2}),
        make_run("early", 1, fields={"epochs": 2}),
    ]
    rows = rows_of(runs)
    assert [row.repeats for row in rows] == [None, "none", None, "both"]
    assert [row.replicas for row in rows] == [("A/A",), (), ("early",), ()]
    assert is_replica(rows[1].config, rows[0].config)


def test_replicas_are_averaged_before_they_are_compared():
    scores = {"none": [0.50, 0.60, 0.55], "again": [0.54, 0.60, 0.51], "drop": [0.60, 0.72, 0.69]}
    runs = make_study(none=scores["none"], drop=scores["drop"])
    runs += [
        make_run("again", seed, value, fields={"replica": 1})
        for seed, value in enumerate(scores["again"], start=1)
    ]
    rows = {row.condition: row for row in rows_of(runs)}
    mean = [0.52, 0.60, 0.53]
    assert list(rows["none"].scores["clean"].values.values()) == pytest.approx(mean)
    expected = paired_difference(scores["drop"], mean)
    found = rows["drop"].scores["clean"].difference
    assert (found.mean, found.p) == (pytest.approx(expected.mean), pytest.approx(expected.p))
    assert found.holm == found.p  # the replica is no comparison
    chance = rows["again"].scores["clean"].difference
    assert chance.mean == pytest.approx(paired_difference(scores["again"], scores["none"]).mean)
    document = section(markdown(runs), "Clean accuracy")
    assert "| again" not in document
    assert "none is, seed by seed, the mean of its replicas: *none*; *again*." in document


def test_a_condition_that_is_not_the_baseline_may_have_replicas():
    runs = make_study(none=[0.50, 0.60, 0.55])
    for name, replica, values in (("drop", 0, [0.6, 0.7, 0.7]), ("drop 2", 3, [0.7, 0.7, 0.6])):
        runs += [
            make_run(name, seed, value, fields={"epochs": 2, "replica": replica})
            for seed, value in enumerate(values, start=1)
        ]
    rows = rows_of(runs)
    assert [row.repeats for row in rows] == [None, None, "drop"]
    assert list(rows[1].scores["clean"].values.values()) == pytest.approx([0.65, 0.7, 0.65])
    assert "drop 2 differs from drop only in its `replica`" in answer(rows)[-1]


def test_replicas_count_where_the_other_is_missing():
    runs = [make_run("none", 1, 0.5), failed("none", 2), make_run("drop", 1, 0.6)]
    runs += [make_run("again", seed, 0.7, fields={"replica": 1}) for seed in (1, 2)]
    none = rows_of(runs)[0].scores["clean"]
    assert none.values == {1: pytest.approx(0.6), 2: 0.7}


def test_table_shows_percent_difference_interval_and_rates():
    runs = make_study(none=[0.50, 0.60, 0.55])
    runs += [
        make_run("drop", seed, value, rates=(0.0, 0.25, 0.5))
        for seed, value in ((1, 0.60), (2, 0.72), (3, 0.69))
    ]
    lines = text(runs).splitlines()
    assert lines[0].split() == [
        *("condition", "n", "accuracy,", "%", "minus", "none", "[95", "%]"),
        *("Holm", "p", "rate", "realized", "s"),
    ]
    none = next(line for line in lines if line.startswith("none"))
    drop = next(line for line in lines if line.startswith("drop"))
    assert none.split() == ["none", "3", "55.00", "±", "5.00", "6.0"]
    assert drop.split()[2:5] == ["67.00", "±", "6.24"]
    assert "+12.00 [+7.03, +16.97]  .0091" in drop
    assert drop.split()[-3:] == ["0.2500", "0.2600", "6.0"]


def test_table_shows_the_corrected_p():
    runs = make_study(none=[0.5, 0.6, 0.55], a=[0.6, 0.72, 0.69], b=[0.5, 0.6, 0.55], c=[0.5] * 3)
    assert "[+7.03, +16.97]  .027" in text(runs)


def test_table_of_one_seed_has_no_spread():
    lines = text(make_study(none=[0.5], drop=[0.625]))
    assert "±" not in lines
    assert "[+" not in lines
    assert "+12.50" in lines


def test_table_says_same_and_constant():
    lines = text(make_study(none=[0.5, 0.6, 0.7], same=[0.5, 0.6, 0.7], more=[0.6, 0.7, 0.8]))
    assert "same scores" in lines
    assert "+10.00 (constant)" in lines


def test_table_fits_a_terminal_of_80_columns():
    runs = make_study(none=[seed / 7 for seed in range(4)])
    runs += [make_run("DropBlock2d", 1 + i, i**2 / 17, rates=(0.0, 0.5, 1.0)) for i in range(4)]
    assert "…" not in text(runs, width=80)


def test_table_takes_names_as_they_are():
    runs = make_study(**{"[bold]none[/]": [0.5], "layer[34].*": [0.6]})
    lines = text(runs, baseline="[bold]none[/]")
    assert "minus [bold]none[/] [95 %]" in lines
    assert "\n[bold]none[/] " in lines
    assert "layer[34].*" in lines


@pytest.mark.parametrize("p", [0.04999, 0.049999999, 0.0495, 0.05, 0.0501, 0.9999, 0.00011])
def test_p_is_never_rounded_over_the_level(p):
    shown = p_text(p)
    assert (shown.startswith("<") or float(shown) < 0.05) == (p < 0.05)


FINDINGS = {
    "higher": (
        [0.60, 0.72, 0.69],
        r"+12.00 points [+7.03, +16.97], n 3, Holm p .0091: higher.",
    ),
    "lower": ([0.40, 0.48, 0.41], r"-12.00 points [-16.97, -7.03], n 3, Holm p .0091: lower."),
    "not shown": (
        [0.60, 0.60, 0.50],
        "+1.67 points [-17.31, +20.64], n 3, Holm p .74: no difference shown; up to 20.64 points "
        "may be hidden.",
    ),
    "identical": ([0.50, 0.60, 0.55], "the same scores (3 seeds)."),
    "constant": ([0.55, 0.65, 0.60], "+5.00 points with each of 3 seeds; without any spread"),
    "too few": ([None, 0.70, None], "+10.00 points over 1 seed: too few for an interval"),
    "no pairs": ([None] * 3, "no finished run has a seed in common with one of none."),
}


@pytest.mark.parametrize("verdict", FINDINGS)
def test_a_finding_says_what_is_shown_and_no_more(verdict):
    values, sentence = FINDINGS[verdict]
    _, row = rows_of(make_study(none=[0.50, 0.60, 0.55], drop=values))
    assert row.scores["clean"].difference.verdict == verdict
    said = finding(row, "clean")
    assert said.startswith("**drop** minus none: ")
    assert sentence in said
    assert "  " not in said


def test_overview_groups_conditions_by_what_is_shown():
    up, down, same = [0.60, 0.72, 0.69], [0.40, 0.48, 0.41], [0.50, 0.60, 0.55]
    rows = rows_of(make_study(none=same, a=up, b=down, c=same, d=up))
    said = overview(rows, "clean")
    assert said == (
        "**Higher than none:** *a*; *d*. **Lower than none:** *b*. "
        "**The same scores as none:** *c*."
    )
    many = rows_of(make_study(none=same, **dict.fromkeys("abcde", same)))
    assert overview(many, "clean") == "**The same scores as none:** 5 conditions."


def test_the_a_a_row_is_a_check_not_a_finding():
    base = [0.50, 0.60, 0.55]
    runs = make_study(none=base, drop=[0.6, 0.6, 0.5])
    runs += [
        make_run("A/A", seed, value, fields={"replica": 1})
        for seed, value in zip((1, 2, 3), (0.51, 0.59, 0.56), strict=True)
    ]
    rows = rows_of(runs)
    *findings, last = answer(rows)
    assert "A/A" not in "".join(findings)
    assert last.startswith("**Check.** A/A differs from none only in its `replica`")
    assert (
        "differed by +0.33 points [-2.54, +3.20], n 3, p .67: no difference shown; up to 3.20 "
        "points may be hidden. *none* is the mean of both everywhere else." in last
    )
    assert "There is no A/A condition" in answer(rows_of(runs[:6]))[-1]


def test_an_a_a_row_that_passes_for_a_difference_is_a_false_alarm():
    runs = make_study(none=[0.50, 0.60, 0.55])
    runs += [
        make_run("A/A", seed, value, fields={"replica": 1})
        for seed, value in zip((1, 2, 3), (0.60, 0.72, 0.69), strict=True)
    ]
    rows = rows_of(runs)
    said = check(rows[1], rows, "clean")
    assert "false alarm" in said
    assert "n 3, p .0091, which passes for a difference though there is none" in said
    assert "hidden" not in said
    assert said.startswith(
        "**Warning: a false alarm.** A/A differs from none only in its `replica`"
    )
    assert answer(rows_of(runs)) == [said, "Nothing is compared."]


@pytest.mark.parametrize(
    ("values", "end"),
    [
        ([0.51], "+1.00 points over 1 seed: too few seeds to test."),
        ([0.51, 0.62], "+1.50 points over 2 seeds: too few seeds to test."),
        ([0.51, 0.61, 0.56], "+1.00 points with each of 3 seeds; without any spread, no test."),
        ([0.50, 0.60, 0.55], "masks), and its scores are the same."),
        ([], "masks); no pair of its runs is finished."),
    ],
)
def test_an_a_a_row_that_was_not_tested_is_not_said_to_be(values, end):
    runs = make_study(none=[0.50, 0.60, 0.55])
    runs += [make_run("A/A", i + 1, value, fields={"replica": 1}) for i, value in enumerate(values)]
    if not values:
        runs.append(replace(failed("A/A", 1), config=replace(CONFIG, seed=1, replica=1)))
    rows = rows_of(runs)
    said = check(rows[1], rows, "clean").removesuffix(
        " *none* is the mean of both everywhere else."
    )
    assert said.endswith(end)


def schedules(a_a=(0.51, 0.59, 0.56), splits=("clean",)):
    """A study of schedules, whose baseline is one of them."""
    names = {
        "linear": ({"spec": {"layer4": {"DropBlock2d": {"p": 0.4}}}}, (0.60, 0.72, 0.69)),
        "fixed": ({"spec": SPEC}, (0.50, 0.60, 0.55)),
        "none": ({}, (0.40, 0.48, 0.41)),
        "fixed again": ({"spec": SPEC, "replica": 1}, a_a),
    }
    return [
        make_run(name, seed, dict.fromkeys(splits, value), fields=fields, factors=factors)
        for name, (fields, values) in names.items()
        for factors in [{} if name in ("none", "fixed again") else {"schedule": name}]
        for seed, value in enumerate(values, start=1)
    ]


def test_a_baseline_that_is_not_none_is_named_throughout():
    document = markdown(schedules(), baseline="fixed")
    found = section(document, "Answer")
    assert "**Higher than fixed:** *linear*. **Lower than fixed:** *none*." in found
    assert "lower.\n\n**Check.** fixed again differs from fixed only in its" in found
    assert "- **fixed again**" not in found
    assert (
        "| condition | n | accuracy, % | minus fixed [95 %] | r | 80 % power | Holm p |" in document
    )
    assert "The baseline, *fixed*, has these settings" in document
    assert "- **none**: `spec: null`" in document
    assert "ratio to fixed" in section(document, "Cost")
    assert "There is no A/A condition, which would differ from fixed only" in markdown(
        schedules()[:9], baseline="fixed"
    )


def test_a_false_alarm_comes_first_on_every_split():
    runs = schedules((0.60, 0.72, 0.69), splits=("clean", "noisy"))
    document = markdown(runs, baseline="fixed")
    for title in ("Answer", "Noisy"):
        found = section(document, title).strip()
        assert found.startswith("**Warning: a false alarm.** fixed again differs from fixed only")
        assert "n 3, p .0091, which passes for a difference though there is none." in found
        assert found.index("Warning") < found.index("**Higher than fixed:** *linear*.")
    assert "Warning" not in markdown(schedules(splits=("clean", "noisy")), baseline="fixed")


def test_report_names_runs_that_do_not_count():
    runs = [make_run("none", seed, seed / 10) for seed in (1, 2, 3, 4)]
    runs += [make_run("drop", 1), failed("drop", 2), diverged("drop", 3), missing("drop", 4)]
    document = markdown(runs)
    assert "**5 of 8 runs finished**" in document
    absent = section(document, "Runs that do not count")
    assert "**drop**: n is 1 of 4" in absent
    assert "seed 2: failed: RuntimeError: out of memory" in absent
    assert "seed 3: diverged after 2 whole epochs" in absent
    assert "seed 4: not run, or not to the end" in absent
    assert "Runs that do not count" not in markdown(runs[:4])


def test_report_says_when_there_are_fewer_pairs_than_runs():
    runs = [make_run("none", seed, seed / 10) for seed in (1, 2, 3)]
    runs += [make_run("drop", seed, seed**2 / 50) for seed in (1, 2, 3, 4)]
    line = next(line for line in markdown(runs).splitlines() if line.startswith("| drop"))
    assert line.split(" | ")[1] == "4"
    assert "(3 pairs)" in line


def test_report_of_a_study_in_which_nothing_is_finished():
    document = markdown([missing("none", 1), failed("drop", 1)])
    assert "**0 of 2 runs finished**" in document
    assert "## Answer" not in document
    assert "## Cost" not in document


def test_report_says_after_how_many_epochs():
    runs = [make_run("none", 1), make_run("early", 1, fields={"epochs": 2}), make_run("drop", 1)]
    assert "tested after their last epoch, 3 but for *early (2)*; no" in markdown(runs)
    assert "tested after their last epoch, 3; no epoch" in markdown(runs[::2])


def test_report_says_what_is_corrected():
    document = markdown(make_study(none=[0.5] * 3, a=[0.6] * 3, b=[0.7, 0.8, 0.8]))
    assert "corrected after Holm over the 2 comparisons of this table" in document
    assert "the intervals are not corrected" in document


def test_report_explains_no_test_where_there_is_none():
    few = markdown(make_study(none=[0.5, 0.6], a=[0.6, 0.8], b=[0.7, 0.6]), ["scores", "factors"])
    reading = section(few, "Clean accuracy")
    assert "with fewer than three pairs, there is no interval and no test." in reading
    for word in ("corrected", "two-sided", "tested", "Intervals"):
        assert word not in reading
    single = section(markdown(make_study(none=[0.5], a=[0.6])), "Clean accuracy")
    assert "Each is of one seed." in single
    assert "±" not in single
    alone = section(markdown(make_study(none=[0.5, 0.6, 0.7])), "Clean accuracy")
    assert alone.endswith("\n\nMeans ± standard deviations over n seeds.\n")
    same = section(markdown(make_study(none=[0.5] * 3, a=[0.6] * 3)), "Clean accuracy")
    assert "where they have no spread, or fewer than three pairs, there is no test." in same
    pair = markdown(make_study(none=[0.5, 0.6, 0.55], a=[0.6, 0.72, 0.69]), ["scores"])
    assert "p is that of the two-sided test; the intervals are not corrected" in pair
    assert "Intervals have 95 %" in pair
    assert "comparison" not in section(pair, "Clean accuracy")


def test_robustness_tables_are_corrected_only_where_there_is_something_to_correct():
    for seeds, names, corrected in ((3, "ab", True), (2, "ab", False), (3, "a", False)):
        runs = [
            make_run(name, seed, dict.fromkeys(("clean", "noisy"), (seed + len(name)) ** 2 / 100))
            for name in ("none", *names)
            for seed in range(seeds)
        ]
        assert ("each table is corrected for itself" in markdown(runs)) == corrected


def test_the_realized_rate_is_of_what_is_dropped_or_changed():
    rates = section(markdown([make_run("none", 1), make_run("a", 1, rates=(0.1,) * 3)]), "Rates")
    assert "and the share dropped or changed." in rates


def test_report_shows_the_configs():
    runs = [make_run("none", 1), make_run("drop", 1, fields={"spec": SPEC, "epochs": 2})]
    setting = section(markdown(runs), "What was run")
    assert "```yaml\nepochs: 3\naccelerator: cpu\n```" in setting
    assert "- **drop**: `spec: {'layer[34].*': {DropBlock2d: {p: 0.5}}}, epochs: 2`" in setting
    assert "Seeds: 1, the same" in setting
    assert "torch 2.15.0" in setting
    assert "commit: 0123abc\n" in setting


def test_report_says_when_runs_differ_in_their_versions():
    other = {**ENVIRONMENT, "commit": "ffff", "dirty": True}
    runs = [make_run("none", 1), make_run("drop", 1, environment=other)]
    setting = section(markdown(runs), "What was run")
    assert "commit: 0123abc; ffff with uncommitted changes" in setting
    assert "**The runs differ in *commit***" in setting
    assert "The runs differ" not in markdown(runs[:1])


def test_report_says_with_which_versions_a_run_went_on():
    attempts = [{"versions": {"torch": "2.13.0"}, "pid": 1}, {"pid": 2}]
    run = make_run("none", 1, environment={**ENVIRONMENT, "attempts": attempts})
    setting = section(markdown([run]), "What was run")
    assert "torch 2.13.0; python 3.12.1, torch 2.15.0" in setting
    assert "**The runs differ in *versions***" in setting


def test_seconds_and_memory_stand_in_the_cost_section_only():
    runs = make_study(none=[0.5, 0.6, 0.55], drop=[0.6, 0.72, 0.69])
    other = [
        replace(
            run,
            result=replace(run.result, seconds=77.0, memory=10**9),
            environment={**ENVIRONMENT, "started": "2027"},
        )
        for run in runs
    ]
    one, two = (markdown(found).split("## Cost") for found in (runs, other))
    assert one[0] == two[0]
    assert "77.0" in two[1]
    assert "| 1000 |" in two[1]


def test_report_says_when_the_first_run_was_begun():
    starts = ["2026-11-23T12:57:49+00:00", "2026-11-23T12:57:48+00:00", None]
    runs = [
        make_run("none", seed, environment={**ENVIRONMENT, "started": start})
        for seed, start in enumerate(starts)
    ]
    cost = section(markdown(runs), "Cost")
    assert cost.endswith(" The first run was begun 2026-11-23T12:57:48+00:00.\n")
    nowhere = {name: value for name, value in ENVIRONMENT.items() if name != "started"}
    assert "begun" not in section(markdown([make_run("none", 1, environment=nowhere)]), "Cost")


def test_report_escapes_names():
    name = "layer[34].* | a_b"
    document = markdown(make_study(none=[0.5], **{name: [0.6]}))
    assert r"layer\[34].\* \| a\_b" in document
    rows = [line for line in document.splitlines() if line.startswith(r"| layer")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (7, 8) for line in rows)


NAMES = ["a | b", "two\nlines", "*x* __y__ ~~z~~", "$a$ &amp; `c`", "<b>\\", "![i](j)"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_does_not_break_the_document(name):
    runs = [make_run("none", 1), make_run(name, 1, 0.6, rates=(0.1, 0.2, 0.3)), failed(name, 2)]
    for baseline in ("none", name):
        document = markdown(runs, baseline=baseline)
        plain = markdown(
            [replace(run, condition={name: "drop"}.get(run.condition, "none")) for run in runs],
            baseline="drop" if baseline == name else "none",
        )
        shapes = [
            [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in one.splitlines()]
            for one in (document, plain)
        ]
        assert shapes[0] == shapes[1]  # as many lines and cells as with a plain name
        assert not re.search(r"(?<!\\)(~~|\$|&amp|!\[i)", document.replace("!\\[i", ""))
    assert "two\nlines" not in text(runs)


def test_runs_at_once_are_counted_where_their_times_are_known():
    def begun(name, seed, second, *, seconds=10.5, host="a"):
        attempts = [{"started": f"2026-01-01T00:00:{second:02}+00:00", "host": host}]
        run = make_run(name, seed, environment={**ENVIRONMENT, "attempts": attempts})
        return replace(run, result=replace(run.result, seconds=seconds))

    serial = [begun("none", 1, 0), begun("none", 2, 10), begun("drop", 1, 21)]
    assert most_at_once(serial) == 1
    assert "at most 1 run of this study was at work at once" in markdown(serial)
    assert most_at_once([*serial, begun("drop", 2, 5)]) == 2
    assert most_at_once([*serial, begun("drop", 2, 5, host="b")]) == 1
    assert most_at_once([*serial, missing("drop", 2)]) == 1
    assert most_at_once([*serial, failed("drop", 2)]) is None
    twice = begun("drop", 2, 5)
    twice.environment["attempts"] *= 2
    assert most_at_once([*serial, twice]) is None
    assert "at once" not in markdown([*serial, twice])
    assert "at once" not in markdown([make_run("none", 1)])


def test_csv_has_a_line_per_run(tmp_path):
    runs = [
        make_run("none", 1, {"clean": 0.5, "noisy": 1 / 3}),
        make_run("small", 1, 0.6, rates=(0.0, 0.2, 0.4), factors={"size": "3"}),
        diverged("small", 2),
        failed("small", 3),
    ]
    write_runs(rows_of(runs), tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open(newline="") as file:
        none, small, lost, broken = csv.DictReader(file)
    assert (none["condition"], none["factor_size"], none["nominal"]) == ("none", "", "")
    assert (none["clean"], float(none["noisy"])) == ("0.5", 1 / 3)
    assert (small["seed"], small["factor_size"], small["noisy"]) == ("1", "3", "")
    assert float(small["realized"]) == pytest.approx(0.21)
    assert (small["train_loss"], small["test_loss"], small["seconds"]) == ("1.0", "1.5", "6.0")
    assert (lost["status"], lost["clean"], lost["seconds"]) == ("diverged", "", "4.0")
    assert (broken["status"], broken["error"]) == ("failed", "RuntimeError: out of memory")


def test_summary_csv_has_a_line_per_condition(tmp_path):
    base, values = [0.50, 0.60, 0.55], [0.60, 0.72, 0.69]
    write_summary(rows_of(make_study(none=base, drop=values, same=base)), tmp_path / "summary.csv")
    with (tmp_path / "summary.csv").open(newline="") as file:
        none, drop, same = csv.DictReader(file)
    found = paired_difference(values, base)
    assert (none["n"], float(none["clean_mean"]), none["clean_p"]) == ("3", pytest.approx(0.55), "")
    assert float(drop["clean_difference"]) == found.mean
    assert (float(drop["clean_low"]), float(drop["clean_high"])) == found.interval
    assert (float(drop["clean_p"]), float(drop["clean_holm_p"])) == (found.p, 2 * found.p)
    assert (same["clean_difference"], same["clean_pairs"], same["clean_p"]) == ("0.0", "3", "")
    assert (drop["seconds_ratio"], drop["memory"]) == ("1.0", "2000000.0")


def test_write_report_writes_all_its_files(study, tmp_path):
    runs = [
        make_run(name, seed, {"clean": seed / 10, "noisy": seed / 20}, rates=rates)
        for name, rates in (("none", ()), ("drop", (0.1, 0.2, 0.3)))
        for seed in (1, 2, 3)
    ]
    study(runs)
    path = write_report(tmp_path)
    assert path == tmp_path / "report" / "report.md"
    pictures = {f"{name}.png" for name in ("scores", "robustness", "learning", "rates")}
    assert {file.name for file in path.parent.iterdir()} == {
        *("report.md", "runs.csv", "summary.csv"),
        *pictures,
    }
    linked = set(re.findall(r"\]\((\w+\.png)\)", path.read_text(encoding="utf-8")))
    assert linked == pictures


@pytest.mark.usefixtures("unrendered")
def test_pictures_of_an_earlier_state_are_removed(study, tmp_path):
    study([make_run("none", 1), make_run("drop", 1, rates=(0.1, 0.2, 0.3))])
    folder = write_report(tmp_path).parent
    assert (folder / "rates.png").exists()
    (folder / "mine.png").touch()
    study([make_run("none", 1), make_run("drop", 1)])
    write_report(tmp_path)
    left = {path.name for path in folder.glob("*.png")}
    assert left == {"scores.png", "learning.png", "mine.png"}


@pytest.mark.usefixtures("unrendered")
def test_a_report_that_cannot_be_made_leaves_the_old_one(study, tmp_path, monkeypatch):
    study([make_run("none", 1)])
    before = {path.name: path.read_bytes() for path in write_report(tmp_path).parent.iterdir()}
    study([make_run("none", 1, 0.75)])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_summary", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(tmp_path)
    after = {path.name: path.read_bytes() for path in (tmp_path / "report").iterdir()}
    assert after == before


@pytest.fixture
def script(call):
    return partial(call, "report.py")


def test_script_says_what_is_wrong_with_a_directory(script, tmp_path, capsys):
    assert script(tmp_path / "runs") == 2
    problem = f"{tmp_path / 'runs'} is not a study's directory: it has no study.json"
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    (tmp_path / "study.json").write_text("{}", encoding="utf-8")
    assert script(tmp_path) == 2
    assert "is not the record of a study" in capsys.readouterr().err
    assert script() == 2
    assert "run_dir" in capsys.readouterr().err


@pytest.mark.usefixtures("unrendered")
def test_script_prints_the_table_and_the_path(script, study, tmp_path, monkeypatch, capsys):
    runs = make_study(none=[0.5], drop=[0.6])
    study(runs)
    (tmp_path / "study.json").touch()
    monkeypatch.setattr(records, "read_runs", report.read_runs)  # which the script imports late
    assert script(tmp_path, "--out", tmp_path / "here") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("condition ")
    assert lines[-1] == str(tmp_path / "here" / "report.md")
    (tmp_path / "file").touch()
    assert script(tmp_path, "--out", tmp_path / "file") == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_script_has_help(script, capsys):
    assert script("--help") == 0
    assert "Example: scripts/report.py" in " ".join(capsys.readouterr().out.split())
