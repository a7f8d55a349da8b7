"""What is committed about studies is what their runs tell; and what is changed is found."""

import csv
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import yaml

from experiments.contrasts import read_contrasts
from experiments.recounting import PROSE, recount
from experiments.recounting.families import families_of
from experiments.recounting.numbers import read_study
from experiments.recounting.paired import compare, effect, p_says
from experiments.recounting.prose import recount_prose
from experiments.recounting.reports import recount_report
from experiments.recounting.scores import score_of
from experiments.report import make_report, rewrite_report
from experiments.reporting.statistics import detectable_effect
from experiments.reporting.summary import summarize
from experiments.reporting.tables import write_runs
from experiments.study import read_study as read_study_file
from tests.experiments.synthetic import make_record, make_run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
STUDIES = sorted(path.parent.name for path in RESULTS.glob("*/runs.csv"))
RECOUNTED = ("Answer", "Clean accuracy", "Contrasts", "Robustness", "Rates", "Cost")


@pytest.fixture
def folder(tmp_path):
    """A copy of the report of a study."""

    def copy(name):
        (tmp_path / name).mkdir()
        for file in ("report.md", "runs.csv"):
            shutil.copy(RESULTS / name / file, tmp_path / name)
        return tmp_path / name

    return copy


def changed(text):
    """Copies of a text, each with another digit changed."""
    digits = [match.start() for match in re.finditer(r"\d", text)]
    for place in digits:
        yield f"{text[:place]}{(int(text[place]) + 5) % 10}{text[place + 1 :]}"


def drop_columns(path, *names):
    """Write a runs.csv without some columns."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, [n for n in lines[0] if n not in names], extrasaction="ignore"
        )
        writer.writeheader()
        writer.writerows(lines)


def test_everything_committed_is_what_the_runs_tell():
    assert len(STUDIES) >= 9
    assert [str(fault) for fault in recount(ROOT)] == []


@pytest.mark.parametrize("name", ["quick", "convnext"])
def test_any_digit_that_is_changed_in_a_report_is_found(name, folder):
    copy = folder(name)
    lines = (copy / "report.md").read_text(encoding="utf-8").splitlines()
    section, tried = "", 0
    study = read_study(copy)
    for number, line in enumerate(lines):
        section = line[3:] if line.startswith("## ") else section
        claims = line.startswith(("| ", "- **", "**"))
        if section not in RECOUNTED or not claims:
            continue
        for other in list(changed(line))[-3:]:
            said = [*lines[:number], other, *lines[number + 1 :]]
            (copy / "report.md").write_text("\n".join(said), encoding="utf-8")
            faults = recount_report(study)
            assert any(fault.line == number + 1 for fault in faults), other
            tried += 1
    assert tried > 50


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("no difference shown", "higher"),
        ("Higher than", "Lower than"),
        ("*DropBlock2d*", "*none*"),
        (": higher.", ": lower."),
        ("16 runs, all finished", "17 runs, all finished"),
        ("Seeds: 7101", "Seeds: 7102"),
        ("no epoch was chosen by its score", "the best epoch was chosen by its score"),
        ("The same networks", "DropBlock2d is the best. The same networks"),
        ("over the 2 other comparisons", "over the 3 other comparisons"),
        ("*none*; *A/A*.", "*none*."),
        ("### Accuracy", "### Pairs of rate"),
        ("{take: DropBlock2d, minus: Dropout2d}", "{take: DropBlock2d, minus: none}"),
        ("pairing by seed buys nothing in", "pairing by seed shortens the interval in"),
        ("at Holm's strictest level, .05/3", "at .05"),
        ("which takes both for independent", "which pairs them"),
    ],
)
def test_any_sentence_that_is_changed_is_found(old, new, folder):
    copy = folder("quick")
    text = (copy / "report.md").read_text(encoding="utf-8")
    text = text if old in text else text.replace("over the 3 comp", old)
    (copy / "report.md").write_text(text.replace(old, new, 1), encoding="utf-8")
    assert recount_report(read_study(copy)) or old not in text


def test_a_line_that_is_taken_out_is_found(folder):
    copy = folder("convnext")
    text = (copy / "report.md").read_text(encoding="utf-8")
    study = read_study(copy)
    begins = ("| D", "- **D", "**No", "**P", "### R", "Seeds")
    lines = [line for line in text.splitlines() if line.startswith(begins) and "`spec" not in line]
    lines = [line for line in lines if text.count(f"\n{line}\n") == 1]
    assert len(lines) > 25
    for line in lines:
        (copy / "report.md").write_text(text.replace(f"{line}\n", "", 1), encoding="utf-8")
        assert any(fault.said == "nothing" for fault in recount_report(study)), line


@pytest.mark.parametrize("column", ["clean", "occluded", "noisy", "seconds", "realized"])
def test_any_run_that_is_changed_is_found(column, folder):
    copy = folder("convnext")
    with (copy / "runs.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for place in range(0, len(lines), 13):
        other = [dict(line) for line in lines]
        if other[place][column]:
            other[place][column] = str(float(other[place][column]) * 1.5)
        else:
            other.pop(place)
        with (copy / "runs.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, lines[0])
            writer.writeheader()
            writer.writerows(other)
        assert recount_report(read_study(copy)), place


@pytest.mark.parametrize("name", PROSE)
def test_any_number_that_is_changed_in_a_readme_is_found(name, tmp_path, studies):
    text = re.sub(r"\n(?=\[[+-])", " ", (ROOT / name).read_text(encoding="utf-8"))
    path = tmp_path / "README.md"
    claims = re.findall(
        r"\S+ \[[+-][^\]]+\],?\s+(?:n\s+\d+,\s+)?(?:Holm\s+)?\S*\s?<?\.\d+|up to \d\.\d", text
    )
    claims += re.findall(r"drops \.\d+|\d+ of \d+ shown|\d+ runs of nine|are \d+ distinct", text)
    assert len(claims) >= 3
    for claim in claims:
        other = max(changed(claim))
        path.write_text(text.replace(claim, other), encoding="utf-8")
        assert recount_prose(path, PROSE[name], studies), other


@pytest.mark.parametrize("name", ["none", "0"])  # as one of them calls it, or the other
def test_runs_that_studies_share_are_counted(name, tmp_path, studies):
    path = tmp_path / "README.md"
    claim = f"Two studies share the same 12 runs of *{name}*."
    path.write_text(f"## Results\n\n{claim}\n", encoding="utf-8")
    some = {study: studies[study] for study in ("chance", "convnext", "regularizers")}
    assert recount_prose(path, ("Results",), some) == []


@pytest.mark.parametrize(
    "claim",
    [
        "DropBlock2d is 3.4 points better (p < .01).",
        "No gain: no difference shown at any rate.",
        "Stopping early beats all regularizers.",
        "*Dropout2d* minus *none*: +2.8 [+2.2, +3.5], Holm p .0019",
        "*no such* minus *none*: +2.8 [+2.2, +3.5], Holm p <.0001",
        "lower than *none*: *Dropout2d*",
        "*Accuracy*: 2 of 4 shown to differ, 0 shown to be equal within ±1 point, in the others up "
        "to 1.5 points may be hidden",
        "no difference from *none* shown for *Dropout2d* (up to 3.5 points may be hidden)",
        "*Dropout* minus *none*: +0.9 [+0.1, +1.8], p .031: no difference shown",
        "nine studies share the same 12 runs of *none*",
        "two studies share the same 11 runs of *none*",
        "two studies share the same 12 runs of *Disout*",
        "two studies share the same 12 runs of *nobody*",
        "There are nine different A/A checks, of which the smallest p is .052",
        "*DropBlock2d* minus *Dropout2d*: -0.66 [-1.46, +0.14], Holm p .098: equal within ±1 point",
        "*Accuracy*: 12 seeds find differences of 1.2 to 1.4 points with 80 % chance",
        "*Accuracy*: 13 seeds find differences of 1.1 to 1.4 points with 80 % chance",
        "*Accuracies*: 12 seeds find differences of 1.1 to 1.4 points with 80 % chance",
        "*Accuracy*: r is .32 to .55, pairing buys nothing in 0 of 3",
        "*Accuracy*: r is .31 to .55, pairing buys nothing in 1 of 3",
        "1 of 1 pairs of replicas of *none* have p < .05 (100 % [2.5, 100])",
        "They are equal within ±1 point.",
        "Pairing by seed buys nothing.",
    ],
)
def test_a_claim_that_does_not_follow_is_found(claim, tmp_path, studies):
    path = tmp_path / "README.md"
    link = "[convnext](results/convnext/report.md)"
    path.write_text(f"# Title\n\n## Results\n\nSaid of {link}: {claim}\n", encoding="utf-8")
    (fault, *_) = recount_prose(path, ("Results",), studies)
    assert (fault.path, fault.line) == (path, 5)
    path.write_text(f"# Title\n\n## Results\n\n{link} says more.\n", encoding="utf-8")
    assert recount_prose(path, ("Results",), studies) == []
    assert recount_prose(path, ("Others",), studies)[0].recounted == "## Others"


def test_a_claim_that_follows_is_none(tmp_path, studies):
    path = tmp_path / "README.md"
    path.write_text(
        "## Results\n\n[convnext](results/convnext/report.md): *none* minus *Dropout2d*:\n-2.8 "
        "[-3.5, -2.2], n 12, Holm p <.0001; *DropBlock2d* minus *Dropout2d*: -0.66 [-1.46, "
        "+0.14], Holm p .098: no difference\nshown; higher than *none*: *Dropout2d*. *Accuracy*: "
        "12 seeds find differences of 1.1 to 1.4 points with 80 % chance; *Accuracy*: r is .31 to "
        ".55, pairing buys nothing in 0 of 3; [quick](results/quick/report.md): 0 of 1 pairs of "
        "replicas of *none* have p < .05 (0 % [0, 97.5]); *Dropout* of "
        "[regularizers](results/regularizers/report.md) minus *0* of "
        "[chance](results/chance/report.md): -0.31 [-0.86, +0.24], n 12, p .2392.\n",
        encoding="utf-8",
    )
    assert recount_prose(path, ("Results",), studies) == []


ASKED = {
    "beside": [{"pairs": "rate", "within": "kind"}, {"take": ["early", "a, 1"], "minus": "none"}],
    "kinds": {
        "primary": True,
        "margin": 1.5,
        "compare": [
            {"take": {"kind": "b"}, "minus": {"kind": "a"}},
            {"take": {"kind": "b"}, "minus": {"kind": "a"}, "within": "rate"},
            {"take": "early", "minus": "none"},
            {"take": "same", "minus": "none"},
        ],
    },
}
ASKED["in noise"] = {
    "primary": True,
    "margin": 3,
    "test": "noisy",
    "compare": ASKED["kinds"]["compare"],
}
ASKED["one level"] = [{"take": "a, 2", "minus": "none"}]
REPEATS = {"A/A": "none", "A/A 2": "none", "A/A 3": "none", "same again": "same"}


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """The folder of a report that has everything: margins, primary families, means, replicas."""
    folder = tmp_path_factory.mktemp("everything")
    generator = np.random.default_rng(3)
    factors = {f"{k}, {r}": {"kind": k, "rate": r} for k in "ab" for r in "123"}
    factors = {"none": {}, **factors, "early": {}, "same": {}} | {name: {} for name in REPEATS}
    fields = {"none": {}, "early": {"epochs": 2}, "same": {"lr": 0.01}}
    fields |= {"A/A": {"replica": 1}, "A/A 2": {"replica": 2}, "A/A 3": {"replica": 3}}
    fields["same again"] = {"lr": 0.01, "replica": 1}
    of_seed = generator.normal(0.7, 0.03, 9)
    runs = []
    for place, (name, levels) in enumerate(factors.items()):
        of_grid = {"epochs": 4 + place} if levels else {}
        gain = 0.05 if levels.get("kind") == "b" else 0.0
        for seed, base in enumerate(of_seed, start=1):
            gain = 0.005 if name == "b, 1" else gain
            noise = generator.normal(gain, 0.002 if "same" in name or name[-1] == "1" else 0.01)
            accuracy = {"clean": base + noise, "noisy": 0.5 + float(generator.normal(gain, 0.02))}
            run = make_run(name, seed, accuracy, factors=levels, fields=fields.get(name, of_grid))
            runs.append(run)
    contrasts, problems = read_contrasts(ASKED, factors, "none")
    assert problems == []
    record = replace(make_record(runs), contrasts=contrasts)
    rows = summarize(record, runs)
    write_runs(rows, folder / "runs.csv")
    text = make_report(record, rows)
    (folder / "report.md").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def written(everything, tmp_path):
    """A copy of that folder, to be changed."""
    return Path(shutil.copytree(everything, tmp_path, dirs_exist_ok=True))


def test_all_that_a_report_can_say_is_recounted(written):
    study = read_study(written)
    assert study.repeats == REPEATS
    assert study.asked == ASKED
    assert [str(fault) for fault in recount_report(study)] == []
    text = (written / "report.md").read_text(encoding="utf-8")
    for said in ("equal within ±1.5 points", ", but within ±", "buys nothing", "(mean over rate)"):
        assert said in text, said
    for said in ("**A/A.** Of 6 pairs", "## Primary", "## Exploratory", "mean of early; a, 1"):
        assert said in text, said


def test_any_digit_that_is_changed_in_what_a_report_can_say_is_found(written):
    study = read_study(written)
    lines = (written / "report.md").read_text(encoding="utf-8").splitlines()
    tried, section = 0, ""
    for number, line in enumerate(lines):
        section = line[3:] if line.startswith("## ") else section
        claims = line.startswith(("| ", "- **", "**", "The 4 replicas"))
        if section in ("", "What was run") or "Question" in line or not claims:
            continue
        for other in list(changed(line))[-6:]:
            said = [*lines[:number], other, *lines[number + 1 :]]
            (written / "report.md").write_text("\n".join(said), encoding="utf-8")
            faults = recount_report(study)
            assert any(fault.line == number + 1 for fault in faults), other
            tried += 1
    assert tried > 300


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("**Primary: in noise** on noisy test images", "**Primary: in noise**"),
        ("on noisy test images (6 comparisons)", "on clean test images (6 comparisons)"),
        ("- **early** minus none on noisy test images:", "- **early** minus none:"),
        ("### in noise, on noisy test images", "### in noise"),
        ("### in noise, on noisy test images", "### kinds, on noisy test images"),
        (" A table whose title names no test images is of the clean ones.", ""),
        ("; each table is corrected for itself, but for", "; each table is corrected, but for"),
        (", but for what stands in a family on its images", ""),
        ("  test: noisy\n", ""),
        ("Holm: for *early*; *same* over all", "Holm: for *early* over all"),
    ],
)
def test_any_sentence_on_a_family_of_other_images_is_recounted(old, new, written):
    path = written / "report.md"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert recount_report(read_study(written))


def test_a_score_on_other_images_is_part_of_their_families(written):
    path = written / "runs.csv"
    lines = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    line = next(line for line in lines if line["condition"] == "early")
    line["noisy"] = str(float(line["noisy"]) + 0.03)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    said = [fault.said for fault in recount_report(read_study(written))]
    assert any(one.startswith("- **early** minus none on noisy test images: ") for one in said)
    assert any(one.startswith("early − none | 9 | ") for one in said)
    assert not any(one.startswith("- **early** minus none: ") for one in said)


def test_families_are_recounted_on_their_own_images(written):
    found = families_of(read_study(written))
    text = (written / "runs.csv").read_text(encoding="utf-8")
    turned = text.replace("clean", "?").replace("noisy", "clean").replace("?", "noisy")
    (written / "runs.csv").write_text(turned, encoding="utf-8")
    other = families_of(read_study(written))
    sides = [pair for pair in found["kinds"].tests if pair in found["in noise"].tests]
    assert len(sides) == len(found["kinds"].tests)
    for pair in sides:
        on_clean, on_noisy = (found[name].tests[pair] for name in ("kinds", "in noise"))
        assert other["kinds"].tests[pair] == replace(on_noisy, margin=1.5, tost=ANY)
        assert other["in noise"].tests[pair] == replace(on_clean, margin=3, tost=ANY)


def test_a_readme_cites_other_images_by_name(written, tmp_path):
    study = read_study(written)
    found = families_of(study)["in noise"]
    test, lower = found.tests["early", "none"], score_of(study, "noisy")["same"]
    tests = [*found.tests.values()]
    shown = sum(one.verdict in ("higher", "lower") for one in tests)
    equal = sum(one.verdict == "equal" for one in tests)
    rest = [100 * one.hidden for one in tests if one.verdict == "no"]
    within = f"{equal} shown to be equal within ±3 points"
    hidden = f", in the others up to {max(rest):.1f} points may be hidden" if rest else ""
    power = [100 * one.found for one in tests]
    p = f"n 9, Holm p {p_says(test.holm)}"
    other = found.tests["b, 2", "a, 2"]
    claims = [
        f"*b, 2* minus *a, 2* on noisy images: {other.points}, Holm p {p_says(other.holm)}",
        f"*early* minus *none* on noisy images: {test.points}, {p}",
        f"*early* minus *none* on noisy test images: {test.points}, {p}",
        f"*early* minus *none* on noisy images: {test.points}, n 9, p {p_says(test.p)}",
        f"*in noise* on noisy images: {shown} of {len(tests)} shown to differ, {within}{hidden}",
        f"*in noise* on noisy images: 9 seeds find differences of {min(power):.1f} to "
        f"{max(power):.1f} points with 80 % chance",
        f"no difference from *none* shown for *same* on noisy images (up to "
        f"{100 * lower.hidden:.1f} points may be hidden)",
    ]
    path = tmp_path / "README.md"
    studies = {"made": study}

    def faults(claim):
        path.write_text(f"## Results\n\n[m](results/made/report.md): {claim}.\n", "utf-8")
        return recount_prose(path, ("Results",), studies)

    for claim in claims:
        assert faults(claim) == [], claim
        silent = re.sub(r" on noisy (?:test )?images", "", claim)
        assert faults(silent), silent
        for name in ("clean", "occluded"):
            assert faults(claim.replace("on noisy", f"on {name}")), (claim, name)
        numbers = re.sub(r"^.*? images", "", claim)
        assert faults(claim.replace(numbers, max(changed(numbers)))), numbers
    higher = "higher than *none* on noisy images: *b, 2*, *b, 3*"
    assert faults(higher) == []
    assert faults(higher.replace("higher", "lower"))
    assert "occluded" in faults(higher.replace("noisy", "occluded"))[0].said


def test_a_claim_is_of_the_first_family_that_has_the_comparison(tmp_path):
    study = read_study(RESULTS / "quick")
    one = {"take": "Dropout2d", "minus": "DropBlock2d"}
    wide = [{"pairs": ["none", "DropBlock2d", "Dropout2d"]}]
    path = tmp_path / "README.md"
    alone = replace(study, asked={"one": [one]})
    test = families_of(alone)["one"].tests["Dropout2d", "DropBlock2d"]
    claim = f"*Dropout2d* minus *DropBlock2d*: {test.points}, Holm p {p_says(test.holm)}"
    path.write_text(f"## Results\n\n[q](results/quick/report.md): {claim}\n", "utf-8")
    for asked, faults in (({"one": [one], "all": wide}, 0), ({"all": wide, "one": [one]}, 1)):
        studies = {"quick": replace(study, asked=asked)}
        assert len(recount_prose(path, ("Results",), studies)) == faults


def test_a_report_with_other_contrasts_than_its_file_is_found(tmp_path):
    for place in ("results/regularizers", "configs"):
        shutil.copytree(ROOT / "experiments" / place, tmp_path / "experiments" / place)
    for name, titles in PROSE.items():
        text = "".join(f"## {title}\n\nNothing yet.\n\n" for title in titles)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert recount(tmp_path) == []
    path = tmp_path / "experiments" / "configs" / "regularizers.yaml"
    plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    name = "Weight decay"
    asked = {"primary": False, "margin": None, "compare": plain["contrasts"][name]}
    for test, faults in (("clean", 0), ("occluded", 1)):
        plain["contrasts"][name] = {**asked, "test": test}
        path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
        assert len(recount(tmp_path)) == faults
    shutil.copy(ROOT / "experiments" / "configs" / "regularizers.yaml", path)
    text = path.read_text(encoding="utf-8").replace('"none, no weight decay"}', "Dropout}")
    path.write_text(text, encoding="utf-8")
    (fault,) = recount(tmp_path)
    assert fault.path == tmp_path / "experiments/results/regularizers/report.md"
    assert "other contrasts" in str(fault)


@pytest.mark.parametrize("n", [3, 4, 6, 12, 40])
@pytest.mark.parametrize("family", [1, 2, 15, 190])
def test_power_by_integration_is_that_by_the_noncentral_t(n, family):
    level = 0.05 / family
    assert effect(n, level) == pytest.approx(detectable_effect(n, level), rel=1e-9)


def test_holm_of_the_recount_is_that_of_a_known_answer():
    scores = [{1: 0.5, 2: 0.6, 3: 0.55}, {1: 0.6, 2: 0.72, 3: 0.69}, {1: 0.61, 2: 0.6, 3: 0.5}]
    found = compare([(scores[1], scores[0]), (scores[2], scores[0])])
    assert [round(one.p, 4) for one in found] == [0.0091, 0.7133]
    assert [round(one.holm, 4) for one in found] == [0.0183, 0.7133]


@pytest.fixture(scope="module")
def quick():
    """The quick study, as its file says."""
    return read_study_file(ROOT / "experiments" / "configs" / "quick.yaml")


@pytest.fixture(scope="module")
def studies():
    """All studies, as their reports say."""
    return {name: read_study(RESULTS / name) for name in STUDIES}


def test_a_report_made_again_is_the_committed_one(tmp_path, quick):
    for path in (RESULTS / "quick").iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "report.md").write_text(
        (tmp_path / "report.md").read_text(encoding="utf-8").replace("higher", "lower"),
        encoding="utf-8",
    )
    rewrite_report(tmp_path, quick)
    for path in (RESULTS / "quick").iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes() or path.suffix == ".png"


@pytest.mark.usefixtures("unrendered")
def test_another_test_of_a_study_is_recounted_too(tmp_path, quick):
    """As canvas has one of other clutter."""
    shutil.copy(RESULTS / "quick" / "report.md", tmp_path)
    with (RESULTS / "quick" / "runs.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    names = list(lines[0])
    for prefix in ("", "best_"):
        names.insert(names.index(f"{prefix}noisy") + 1, f"{prefix}clutter")
    for factor in (1.0, 1.1):
        with (tmp_path / "runs.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for line in lines:
                last, best = (float(line[name]) * factor for name in ("noisy", "best_noisy"))
                writer.writerow({**line, "clutter": last, "best_clutter": best})
        if factor == 1.0:
            rewrite_report(tmp_path, quick)
            assert "### Clutter" in (tmp_path / "report.md").read_text(encoding="utf-8")
        faults = recount_report(read_study(tmp_path))
        assert bool(faults) == (factor > 1), faults


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace("\nnone,7101", "\nnobody,2001"), "has no run of 'nobody'"),
        (lambda text: text.replace("\nnone,7101", "\nnone,7"), "has no run of 'none' with seed 7"),
        (lambda text: text.replace("\nnone,7101", "\nnone,7102"), "'none' stands twice, seed 7102"),
        (
            lambda text: text.replace("none,7101,finished", "none,7101,done"),
            "status must be one of",
        ),
        (lambda text: "\n".join(text.splitlines()[:-1]), "no run of 'DropBlock2d' with seed 7104"),
        (lambda text: text.replace("condition,", "name,"), "is no runs.csv: it has no condition"),
        (lambda _: "", "is no runs.csv"),
    ],
)
def test_a_report_of_other_runs_is_not_made_again(change, problem, folder, quick):
    copy = folder("quick")
    text = change((copy / "runs.csv").read_text(encoding="utf-8"))
    (copy / "runs.csv").write_text(text, encoding="utf-8")
    before = (copy / "report.md").read_bytes()
    with pytest.raises(ValueError, match=re.escape(problem)):
        rewrite_report(copy, quick)
    assert (copy / "report.md").read_bytes() == before


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("noisy", "compares 'in noise' on noisy test images, of which runs.csv says"),
        ("clean", "compares 'kinds' on clean test images, of which runs.csv says nothing"),
    ],
)
def test_a_test_that_runs_lack_is_named_by_the_recount(test, problem, written):
    drop_columns(written / "runs.csv", test)
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_study(written)


@pytest.mark.parametrize("column", ["occluded", "best_occluded", "best_clean", "validation"])
def test_a_column_that_a_report_needs_is_named(column, folder):
    copy = folder("convnext")
    drop_columns(copy / "runs.csv", column)
    study = read_study_file(ROOT / "experiments" / "configs" / "convnext.yaml")
    with pytest.raises(ValueError, match=f"is no runs.csv: it has no {column}$"):
        rewrite_report(copy, study)


@pytest.fixture
def script(call):
    return partial(call, "recount.py")


def test_script_tells_file_line_what_is_said_and_what_is_so(script, tmp_path, capsys):
    assert script() == 0
    assert "all is as the runs tell" in capsys.readouterr().out
    assert script("--root", tmp_path) == 2
    assert "there is no runs.csv below" in capsys.readouterr().err
    for name in (*PROSE, *(f"experiments/results/{study}" for study in STUDIES)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    report = tmp_path / "experiments/results/convnext/report.md"
    text = report.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("| Dropout2d"))
    report.write_text(text.replace(line, line.replace("+2.84", "+2.85"), 1), encoding="utf-8")
    assert script("--root", tmp_path) == 1
    shown = capsys.readouterr().out
    assert re.search(r"convnext/report\.md:\d+: said '.*\+2\.85 .*', recounted '.*\+2\.84 ", shown)
