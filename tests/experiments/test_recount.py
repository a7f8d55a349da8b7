"""What is committed about studies is what their runs tell; and what is changed is found."""

import csv
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from experiments.recounting import PROSE, numbers, recount
from experiments.recounting.numbers import read_study
from experiments.recounting.prose import recount_prose
from experiments.recounting.reports import recount_report
from experiments.report import rewrite_report
from experiments.study import read_study as read_study_file

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


def test_everything_committed_is_what_the_runs_tell():
    assert len(STUDIES) >= 9
    assert [str(fault) for fault in recount(ROOT)] == []


@pytest.mark.parametrize("name", ["quick", "calibration"])
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
        ("*none, 30 % of epochs*", "*none*"),
        (": higher.", ": lower."),
        ("20 runs, all finished", "21 runs, all finished"),
        ("Seeds: 2001", "Seeds: 2002"),
        ("no epoch was chosen by its score", "the best epoch was chosen by its score"),
        ("The same networks", "DropBlock2d is the best. The same networks"),
        ("over the 2 other comparisons", "over the 3 other comparisons"),
        ("*none*; *A/A*.", "*none*."),
        ("### Pairs among none, 30 % of epochs; Dropout2d; DropBlock2d", "### Pairs of rate"),
    ],
)
def test_any_sentence_that_is_changed_is_found(old, new, folder):
    copy = folder("quick")
    text = (copy / "report.md").read_text(encoding="utf-8")
    text = text if old in text else text.replace("over the 3 comp", old)
    (copy / "report.md").write_text(text.replace(old, new, 1), encoding="utf-8")
    assert recount_report(read_study(copy)) or old not in text


def test_a_line_that_is_taken_out_is_found(folder):
    copy = folder("placement")
    text = (copy / "report.md").read_text(encoding="utf-8")
    study = read_study(copy)
    begins = ("| s", "- **s", "**No", "**P", "### P", "Seeds")
    lines = [line for line in text.splitlines() if line.startswith(begins) and "`spec" not in line]
    assert len(lines) > 25
    for line in lines:
        (copy / "report.md").write_text(text.replace(f"{line}\n", "", 1), encoding="utf-8")
        assert any(fault.said == "nothing" for fault in recount_report(study)), line


@pytest.mark.parametrize("column", ["clean", "occluded", "noisy", "seconds", "realized"])
def test_any_run_that_is_changed_is_found(column, folder):
    copy = folder("schedule")
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
        r"\S+ \[[+-][^\]]+\],? (?:n \d, )?(?:Holm )?\S* ?<?\.\d+|up to \d\.\d", text
    )
    claims += re.findall(r"drops \.\d+|\d+ of \d+ shown|\d+ runs of nine|are \d+ distinct", text)
    assert len(claims) >= 3
    for claim in claims:
        other = max(changed(claim))
        path.write_text(text.replace(claim, other), encoding="utf-8")
        assert recount_prose(path, PROSE[name], studies), other


@pytest.mark.parametrize(
    "claim",
    [
        "DropBlock2d is 3.4 points better (p < .01).",
        "No gain: no difference shown at any rate.",
        "Stopping early beats all regularizers.",
        "*Dropout2d* minus *none*: +7.5 [+5.4, +9.6], Holm p .0019",
        "*no such* minus *none*: +7.5 [+5.4, +9.6], Holm p .0019",
        "lower than *none*: *0.3, Dropout2d*",
        "*Pairs of rate*: 4 of 12 shown to differ, in the others up to 9.3 points may be hidden",
        "no difference from *none* shown for *0.3, Dropout2d* (up to 9.6 points may be hidden)",
        "*0.3, DropBlock2d* minus *none*: +2.8 [+0.5, +5.2], p .026: no difference shown",
        "nine studies share the same six runs of *none*",
        "There are five different A/A checks, of which the smallest p is .052",
    ],
)
def test_a_claim_that_does_not_follow_is_found(claim, tmp_path, studies):
    path = tmp_path / "README.md"
    link = "[rate](results/rate/report.md)"
    path.write_text(f"# Title\n\n## Results\n\nSaid of {link}: {claim}\n", encoding="utf-8")
    (fault, *_) = recount_prose(path, ("Results",), studies)
    assert (fault.path, fault.line) == (path, 5)
    path.write_text(f"# Title\n\n## Results\n\n{link} says more.\n", encoding="utf-8")
    assert recount_prose(path, ("Results",), studies) == []
    assert recount_prose(path, ("Others",), studies)[0].recounted == "## Others"


def test_a_claim_that_follows_is_none(tmp_path, studies):
    path = tmp_path / "README.md"
    path.write_text(
        "## Results\n\n[rate](results/rate/report.md): *none* minus *0.3, Dropout2d*:\n-7.5 "
        "[-9.6, -5.4], n 6, Holm p .0019; *0.3, DropBlock2d* minus *none*: +2.83 [+0.51, +5.15], "
        "Holm p .13: no difference\nshown; higher than *none*: *0.5, Dropout2d*.\n",
        encoding="utf-8",
    )
    assert recount_prose(path, ("Results",), studies) == []


def test_holm_of_the_recount_is_that_of_a_known_answer():
    scores = [{1: 0.5, 2: 0.6, 3: 0.55}, {1: 0.6, 2: 0.72, 3: 0.69}, {1: 0.61, 2: 0.6, 3: 0.5}]
    found = numbers.tests([(scores[1], scores[0]), (scores[2], scores[0])])
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
    names.insert(names.index("noisy") + 1, "clutter")
    for factor in (1.0, 1.1):
        with (tmp_path / "runs.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows({**line, "clutter": float(line["noisy"]) * factor} for line in lines)
        if factor == 1.0:
            rewrite_report(tmp_path, quick)
            assert "### Clutter" in (tmp_path / "report.md").read_text(encoding="utf-8")
        faults = recount_report(read_study(tmp_path))
        assert bool(faults) == (factor > 1), faults


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace("\nnone,2001", "\nnobody,2001"), "has no run of 'nobody'"),
        (lambda text: text.replace("\nnone,2001", "\nnone,7"), "has no run of 'none' with seed 7"),
        (lambda text: text.replace("\nnone,2001", "\nnone,2002"), "'none' stands twice, seed 2002"),
        (
            lambda text: text.replace("none,2001,finished", "none,2001,done"),
            "status must be one of",
        ),
        (lambda text: "\n".join(text.splitlines()[:-1]), "no run of 'DropBlock2d' with seed 2004"),
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
    report = tmp_path / "experiments/results/rate/report.md"
    text = report.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("| none, 30"))
    report.write_text(text.replace(line, line.replace("+14.55", "+14.56"), 1), encoding="utf-8")
    assert script("--root", tmp_path) == 1
    shown = capsys.readouterr().out
    assert re.search(r"rate/report\.md:\d+: said '.*\+14\.56 .*', recounted '.*\+14\.55 ", shown)
