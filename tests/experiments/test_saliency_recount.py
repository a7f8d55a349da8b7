"""What saliency.md says is what saliency.csv tells; and what is changed is found."""

import csv
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.recounting import PROSE, recount
from experiments.recounting.numbers import read_study
from experiments.recounting.prose import recount_prose
from experiments.recounting.saliency import recount_saliency
from experiments.recounting.saliency_runs import of_saliency
from experiments.report import make_report
from experiments.reporting.statistics import compare_pairs
from experiments.reporting.summary import summarize
from experiments.reporting.tables import write_runs
from experiments.saliency.measure import Measured, Picture, Saliency
from experiments.saliency.report import describe, write_csv
from tests.experiments.synthetic import make_record, make_run, missing

NAMES = ("none", "Dropout2d", "drop_*|2", "same")
SEEDS = (1, 2, 3, 4, 5, 6, 7)


def looked_at(names=NAMES, seeds=SEEDS, absent=(), empty=True, share=True, picture=True):
    """As measured of networks: one condition is higher, one hardly other, one the same."""
    generator = np.random.default_rng(5)
    runs = []
    base = generator.uniform(0.4, 0.6, (len(seeds), 2))
    gains = dict(zip(NAMES, (0.0, 0.1, 0.004, 0.0), strict=True))
    for name in names:
        noise = 0.0 if name in ("none", "same") else 0.01
        for seed, values in zip(seeds, base, strict=True):
            if (name, seed) not in absent:
                entropy, part = (values + generator.normal(gains[name], noise, 2)).tolist()
                none = int(generator.integers(0, 9)) if empty else 0
                runs.append(
                    Saliency(
                        name, seed, "layer4[0].*", 1000, none, entropy, part if share else None
                    )
                )
    shown = Picture(
        seeds[0],
        [17, 4, 250],
        [7, 4, 0],
        torch.zeros(3, 1, 8, 8),
        [[(0, 0, 4)]] * 3 if share else None,
        {name: torch.zeros(3, 2, 2) for name in names},
    )
    lost = tuple(f"{name}, seed {seed}: missing" for name, seed in absent)
    return Measured("a_study", names, tuple(runs), lost, 0.25, 9, shown if picture else None)


def committed(folder, measured, absent=()):
    """A study with its report, its runs, and where its networks look."""
    generator = np.random.default_rng(6)
    runs = [
        missing(name, seed)
        if (name, seed) in absent
        else make_run(name, seed, float(generator.uniform(0.4, 0.6)), fields={"lr": 0.1 + place})
        for place, name in enumerate((*NAMES, "not looked at"))
        for seed in SEEDS
    ]
    rows = summarize(make_record(runs), runs)
    (folder / "saliency").mkdir(parents=True)
    write_runs(rows, folder / "runs.csv")
    (folder / "report.md").write_text(make_report(make_record(runs), rows), encoding="utf-8")
    write_csv(measured, folder / "saliency" / "saliency.csv")
    (folder / "saliency" / "saliency.md").write_text(describe(measured), encoding="utf-8")
    return read_study(folder)


@pytest.fixture
def study(tmp_path):
    return committed(tmp_path / "rate", looked_at())


def test_without_the_folder_nothing_is_recounted(study):
    (study.folder / "saliency").rename(study.folder / "elsewhere")
    assert recount_saliency(study) == []
    assert of_saliency(study, "share", "same", "none", alone=True) is None


LOST = [("same", seed) for seed in SEEDS]


@pytest.mark.parametrize(
    ("absent", "how", "says"),
    [
        ((), {}, "- **Dropout2d** minus none: +"),
        ((), {"share": False}, "up to "),
        ((), {"picture": False}, "maps are zero everywhere"),
        ((), {"empty": False}, "None of the 28000 maps is zero everywhere."),
        ((), {"names": ("none",)}, "## Share"),
        ((), {"names": ("none", "same")}, "the same scores (7 seeds)"),
        ((), {"names": ("none", "Dropout2d")}, "at .05."),
        ((), {"names": ("Dropout2d", "same")}, "minus Dropout2d"),
        ((("none", 3), ("Dropout2d", 5)), {}, "(5 pairs)"),
        (LOST[:4], {}, "same, seed 4: missing"),
        (LOST[:5], {}, "| same scores | "),
        (LOST, {}, "| same | 0 |  |  |"),
        ([("Dropout2d", seed) for seed in SEEDS[2:]], {}, "too few for an interval"),
        ([("none", seed) for seed in SEEDS], {}, "no finished run has a seed in common"),
    ],
)
def test_all_that_it_can_say_is_recounted(tmp_path, absent, how, says):
    study = committed(tmp_path / "study", looked_at(absent=absent, **how), absent)
    assert [str(fault) for fault in recount_saliency(study)] == []
    assert says in (study.folder / "saliency" / "saliency.md").read_text(encoding="utf-8")


def test_a_difference_without_a_spread_is_recounted(tmp_path):
    runs = [
        replace(run, entropy=run.seed / 8 + (0.25 if run.condition == "same" else 0.0))
        for run in looked_at(("none", "same")).runs
    ]
    measured = replace(looked_at(("none", "same")), runs=tuple(runs))
    study = committed(tmp_path / "study", measured)
    assert recount_saliency(study) == []
    text = (study.folder / "saliency" / "saliency.md").read_text(encoding="utf-8")
    assert "+25.00 points with each of 7 seeds" in text


def test_any_digit_and_word_that_is_changed_is_found(study):
    path = study.folder / "saliency" / "saliency.md"
    lines = path.read_text(encoding="utf-8").splitlines()
    tried = 0
    for number, line in enumerate(lines):
        if number == 0 or re.fullmatch(r"\|[ :|-]*\||!.*|", line):
            continue
        places = [match.start() for match in re.finditer(r"\d", line)][-6:]
        others = [f"{line[:p]}{(int(line[p]) + 5) % 10}{line[p + 1 :]}" for p in places]
        words = re.findall(r"[a-z]{3,}", line)
        others += [line.replace(words[-1], "", 1)] if words else []
        for other in others:
            path.write_text("\n".join([*lines[:number], other, *lines[number + 1 :]]))
            found = {fault.line for fault in recount_saliency(study)}
            assert number + 1 in found, other
            tried += 1
    assert tried > 130


def test_a_line_that_is_taken_out_or_stands_twice_is_found(study):
    path = study.folder / "saliency" / "saliency.md"
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("| ---")]
    assert len(lines) > 25
    for line in lines:
        path.write_text(text.replace(f"{line}\n", "", 1), encoding="utf-8")
        assert any(fault.said == "nothing" for fault in recount_saliency(study)), line
        if not line.startswith("# "):
            path.write_text(text.replace(line, f"{line}\n{line}", 1), encoding="utf-8")
            assert any(fault.recounted == "once" for fault in recount_saliency(study)), line


def test_the_recount_of_all_has_it(tmp_path):
    study = committed(tmp_path / "experiments/results/rate", looked_at())
    for name, titles in PROSE.items():
        text = "".join(f"## {title}\n\n" for title in titles)
        (tmp_path / name).write_text(text, encoding="utf-8")
    path = study.folder / "saliency" / "saliency.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("Dropout2d | 7 |", "Dropout2d | 8 |", 1), encoding="utf-8")
    (fault,) = [fault for fault in recount(tmp_path) if fault.path == path]
    line = 1 + text[: text.index("Dropout2d | 7 |")].count("\n")
    assert (fault.path, fault.line) == (path, line)
    assert fault.said == fault.recounted.replace("Dropout2d | 7 |", "Dropout2d | 8 |")


def rewrite(study, change):
    path = study.folder / "saliency" / "saliency.csv"
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    names = list(lines[0])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(change(lines))


@pytest.mark.parametrize("column", ["entropy", "share", "empty", "images", "threshold", "number"])
def test_any_run_that_is_changed_is_found(study, column):
    def change(lines):
        lines[9][column] = f"{float(lines[9][column]) * 2 + 1:g}"
        return lines

    rewrite(study, change)
    assert recount_saliency(study)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines[1:], r"csv:1: said 'nothing', recounted 'none, seed 1'"),
        (lambda lines: [*lines, lines[3]], r"csv:30: said 'none, seed 4', recounted 'a finished"),
        (lambda lines: [*lines, {**lines[3], "seed": 8}], "csv:30: said 'none, seed 8'"),
        (lambda lines: [{**lines[0], "layer": "stem"}, *lines[1:]], "said 'layer: layer4.*, stem'"),
        (lambda lines: [], "saliency.csv has none"),
    ],
)
def test_runs_that_are_not_those_of_the_study_are_found(study, change, said):
    rewrite(study, change)
    assert any(re.search(said, str(fault)) for fault in recount_saliency(study))


@pytest.mark.parametrize("name", ["saliency.md", "saliency.csv"])
def test_one_of_both_files_is_too_few(study, name):
    (study.folder / "saliency" / name).unlink()
    (fault,) = recount_saliency(study)
    assert fault.path.name == name


def claims_of(study):
    """True claims about each pair, by the arithmetic of the reports."""
    measured = looked_at()
    for measure in ("entropy", "share"):
        scores = {name: {} for name in NAMES}
        for run in measured.runs:
            scores[run.condition][run.seed] = getattr(run, measure)
        pairs = [(name, "none") for name in NAMES[1:]]
        for (left, right), found in zip(pairs, compare_pairs(scores, pairs), strict=True):
            if found.p is not None and "*" not in left:
                mean, low, high = (100 * x for x in (found.mean, *found.interval))
                numbers = f"{mean:+.1f} points [{low:+.1f}, {high:+.1f}], n {found.n}"
                yield f"*{left}* minus *{right}* in {measure}: {numbers}, Holm p {found.holm:.2g}"
                numbers = f"{-mean:+.2f} [{-high:+.2f}, {-low:+.2f}]"
                yield f"*{right}* minus *{left}* in {measure}: {numbers}, Holm p {found.holm:.2g}"
                yield f"*{right}* minus *{left}* in {measure}: {numbers}, p {found.p:.2g}"


def test_claims_of_a_readme_are_recounted_and_any_number_that_is_changed_is_found(study, tmp_path):
    path, studies, tried = tmp_path / "README.md", {study.name: study}, 0
    links = ("results/rate/report.md", "results/rate/saliency/saliency.md")
    for number, claim in enumerate(claims_of(study)):
        said = re.sub(r"p \d\S*e-\d+$", "p <.0001", claim).replace(" 0.", " .")
        start = f"## Results\n\n[looks]({links[number % 2]}):\n"
        path.write_text(f"{start}{said}\n", encoding="utf-8")
        assert recount_prose(path, ("Results",), studies) == [], said
        digits = [m.start() for m in re.finditer(r"\d", said) if not said[m.start() - 1].isalpha()]
        for place in digits:
            if "Dropout2d" in said[place - 8 : place + 2]:
                continue
            other = f"{said[:place]}{(int(said[place]) + 5) % 10}{said[place + 1 :]}"
            path.write_text(f"{start}{other}\n", encoding="utf-8")
            (fault, *_) = recount_prose(path, ("Results",), studies)
            assert fault.line == 4
            tried += 1
    assert tried > 40


@pytest.mark.parametrize(
    ("claim", "so"),
    [
        ("*Dropout2d* minus *none* in spread: +1 [+0, +2], Holm p .01", "in no known form"),
        ("*Dropout2d* minus *same* in share: +1 [+0, +2], Holm p .01", "comparison of saliency.md"),
        ("*same* minus *none* in share: +0 [-1, +1], Holm p .9", "comparison of saliency.md"),
        ("*no such* minus *none* in share: +1 [+0, +2], p .01", "comparison of saliency.md"),
        ("*not looked at* minus *none* in share: +1 [+0, +2], p .01", "comparison of saliency.md"),
        ("*Dropout2d* minus *none* in share: +1 [+0, +2], Holm p .01", r"\+10\..* n 7, p <.0001"),
        (
            "*none* of [rate](results/rate/report.md) minus *none* of [b](results/b/report.md) in "
            "share: +1 [+0, +2], p .01",
            "no study is linked",
        ),
    ],
)
def test_claims_that_do_not_follow_are_found(study, tmp_path, claim, so):
    path = tmp_path / "README.md"
    path.write_text(f"## Results\n\n[r](results/rate/report.md): {claim}\n", encoding="utf-8")
    (fault, *_) = recount_prose(path, ("Results",), {"rate": study})
    assert re.search(so, fault.recounted)
