"""What governs a study was committed before its first run, and is what its report was made by."""

import re
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIGS = Path("experiments/configs")
PROTOCOL = "experiments/PROTOCOL.md"
GOVERNED = sorted(
    path.stem
    for path in (ROOT / CONFIGS).glob("*.yaml")
    if "# Protocol: ../PROTOCOL.md" in path.read_text(encoding="utf-8")
    and (ROOT / "experiments/results" / path.stem / "report.md").is_file()
)


def git(*arguments):
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def committed(commit, path):
    return git("show", f"{commit}:{path}")


@pytest.fixture(scope="module", autouse=True)
def _with_history():
    """What was committed when is told by git alone."""
    try:
        whole = git("rev-parse", "--is-shallow-repository").strip() == "false"
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a checkout of git: an archive has no history")
    if not whole:
        pytest.skip("a shallow clone has no history")


def date_of(commit):
    return datetime.fromisoformat(git("log", "-1", "--format=%cI", commit).strip())


@pytest.fixture(params=GOVERNED)
def report(request):
    """Name, last commit and first start of a study, as its report says, and all of its commits.

    Runs that another study has made before have a commit of their own.
    """
    path = ROOT / "experiments/results" / request.param / "report.md"
    text = path.read_text(encoding="utf-8")
    commits = re.search(r"^- commit: (.+)$", text, re.M)[1].split("; ")
    assert all(re.fullmatch("[0-9a-f]{40}", one) for one in commits), "with uncommitted changes"
    begun = re.search(r"The first run was begun ([\d:T+-]+)\.", text)[1]
    in_order = sorted(commits, key=date_of)
    return request.param, in_order[-1], datetime.fromisoformat(begun), in_order


def test_there_are_studies_of_the_protocol():
    assert {"regularizers", "convnext", "chance", "quick"} <= {*GOVERNED}


def test_the_first_commit_of_a_report_is_older_than_its_first_run(report):
    *_, begun, commits = report
    assert date_of(commits[0]) < begun
    assert [git("merge-base", "--is-ancestor", commit, "HEAD") for commit in commits]


def test_the_protocol_of_that_commit_names_the_study(report):
    name, commit, *_ = report
    assert re.search(rf"^\| {name} \||configs/{name}\.yaml", committed(commit, PROTOCOL), re.M)


def test_the_study_file_and_what_it_takes_are_those_of_that_commit(report):
    name, commit, *_ = report
    path = CONFIGS / f"{name}.yaml"
    then = yaml.safe_load(committed(commit, path))
    now = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    assert [*then.pop("contrasts", {}).values()] == [*now.pop("contrasts", {}).values()]
    assert then == now  # families may have been given other names
    chosen = (CONFIGS / now["chosen"]).parts
    place = Path("experiments", *chosen[chosen.index("..") + 1 :])
    kept = yaml.safe_load((ROOT / place).read_text(encoding="utf-8"))
    assert yaml.safe_load(committed(commit, place)) == kept


@pytest.mark.parametrize("report", ["regularizers", "convnext"], indirect=True)
def test_contrasts_and_margins_of_primary_families_have_not_changed_since(report):
    """Their sentences may have been made clearer: the table's cells of contrasts and margins."""
    _, commit, *_ = report
    rows = [
        re.findall(r"^\| (DropBlock2d minus \S+) \|.*\| (.+?) \|$", text, re.M)
        for text in (committed(commit, PROTOCOL), (ROOT / PROTOCOL).read_text(encoding="utf-8"))
    ]
    assert len(rows[0]) == 3
    assert rows[0] == rows[1]
