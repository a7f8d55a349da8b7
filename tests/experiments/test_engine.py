"""Workers: no run twice, kills, failures that harm no other run, Ray."""

import os
import random
import shutil
import signal
import socket
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.commands import begin_report, mixed_versions
from experiments.config import Run
from experiments.engine import UNWRITABLE, LaunchError, _check_answers, _Crew
from experiments.runs import RunFolder, folders_of
from experiments.study import read_study
from experiments.train import Result
from tests.cases import rest_slow


def runs_csv(folder):
    """The results without what differs between machines and moments."""
    frame = pd.read_csv(folder / "runs/study/runs.csv")
    return frame.drop(columns=["seconds"])


def begins(folder):
    """How often each run was begun."""
    return {
        path.parent.name: len(path.read_text().splitlines())
        for path in (folder / "runs/runs").glob("*/attempts.jsonl")
    }


@pytest.mark.parametrize("jobs", rest_slow([1, 2]))
def test_a_study_runs_and_is_not_run_again(write, command, folder, jobs):
    status, out, err = command("ablate.py", write(), "--jobs", jobs)
    assert status == 0, err
    assert "Dropout2d" in out
    assert "4 of 4" in err
    first = runs_csv(folder)
    assert (first["status"] == "finished").all()
    status, out, err = command("ablate.py", folder / "study.yaml")
    assert status == 0, err
    assert set(begins(folder).values()) == {1}
    pd.testing.assert_frame_equal(runs_csv(folder), first)
    text = (folder / "runs/study/report.md").read_text()
    status, _, err = command("report.py", folder / "runs/study")
    assert status == 0, err
    assert (folder / "runs/study/report.md").read_text() == text


def finished(path, seeds=(1, 2)):
    """Settle the runs of a study without a training."""
    study = read_study(path)
    for name, one in folders_of(replace(study, seeds=seeds), Path("runs/runs")):
        value = 0.5 + 0.1 * one.run.seed + 0.2 * (name != "none")
        row = {"epoch": 0, "loss": 1.0, "seconds": 1.0, "nominal": None, "realized": None}
        one.path.mkdir(parents=True, exist_ok=True)
        one.finish(Result("finished", {"clean": value}, [row], 1 / 3))
    return study


def test_a_report_can_be_made_at_any_time_and_anywhere(write, command, folder, monkeypatch):
    """Also before the study has ended, and from another folder than that of the factories."""
    begin_report(finished(write(), seeds=(1,)), Path("runs/study"))
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(folder)])
    monkeypatch.delitem(sys.modules, "mine")
    status, out, err = command("report.py", folder / "runs/study")
    assert status == 3, err
    assert "Unfinished: 2 of 4 runs" in out


def test_a_report_keeps_runs_that_are_no_longer_there(write, command, folder):
    study = finished(write())
    begin_report(study, Path("runs/study"))
    status, _, err = command("report.py", "runs/study")
    assert status == 0, err
    text = (folder / "runs/study/runs.csv").read_text()
    shutil.rmtree(folder / "runs/runs")
    (folder / "runs/runs").mkdir()
    status, _, err = command("report.py", "runs/study")
    assert status == 0, err
    assert (folder / "runs/study/runs.csv").read_text() == text


def test_a_folder_of_another_study_is_refused(write, command, folder):
    finished(write())
    status, _, err = command("ablate.py", "study.yaml", "--jobs", 1)
    assert status == 0, err
    before = (folder / "runs/study/report.md").read_text()
    (folder / "other").mkdir()
    other = write("other/study.yaml", question="Another one?")
    for more in ([], ["--search"]):
        status, _, err = command("ablate.py", other, *more)
        assert status == 2
        assert f"has the report of {folder / 'study.yaml'}: rename" in err
    assert (folder / "runs/study/report.md").read_text() == before
    (folder / "study.yaml").unlink()  # as if the project had moved
    status, _, err = command("ablate.py", other)
    assert status == 0, err


@pytest.mark.slow
def test_the_pool_is_shared_by_studies(write, command, folder):
    command("ablate.py", write(), "--only", "none", "--jobs", 1)
    status, _, err = command("ablate.py", write("other.yaml"), "--jobs", 1)
    assert status == 0, err
    assert set(begins(folder).values()) == {1}
    assert len(begins(folder)) == 4


@pytest.mark.slow
def test_an_unfinished_study_says_so(write, command, folder):
    conditions = {"none": {}, "bad": {"model": "mine:fails_in_training"}}
    status, out, _ = command("ablate.py", write(conditions=conditions, seeds=1), "--jobs", 1)
    assert status == 3
    assert "Unfinished: 1 of 2 runs" in out
    assert "the gradient is refused" in out
    frame = runs_csv(folder)
    assert frame["status"].tolist() == ["finished", "failed"]


@pytest.mark.slow
def test_a_process_that_dies_again_and_again_is_recorded(write, command, folder):
    conditions = {
        "none": {},
        "dies": {"model": "mine:dies_in_training"},
        "once": {"model": "mine:dies_once", "model_args": {"marker": str(folder / "died")}},
    }
    status, out, _ = command("ablate.py", write(conditions=conditions, seeds=1), "--jobs", 2)
    assert status == 3
    assert "died 3 times" in out
    frame = runs_csv(folder).set_index("condition")
    assert frame["status"].to_dict() == {"none": "finished", "dies": "failed", "once": "finished"}


@pytest.mark.slow
def test_ten_kills_change_nothing(write, start, command, folder):
    base = {"model": "mine:slow_net", "data": "mine:stripes", "epochs": 4, "batch_size": 8}
    path = write(base=base, seeds=3)
    status, _, err = command("ablate.py", path, "--out", "runs/whole")
    assert status == 0, err
    whole = pd.read_csv(folder / "runs/whole/study/runs.csv").drop(columns=["seconds"])
    generator = random.Random(0)
    for _ in range(10):
        process = start("ablate.py", path)
        time.sleep(generator.uniform(4, 10))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    status, _, err = command("ablate.py", path)
    assert status == 0, err
    pd.testing.assert_frame_equal(runs_csv(folder), whole, check_exact=True)


@pytest.mark.slow
def test_two_launchers_share_the_work(write, start, folder):
    base = {"model": "mine:slow_net", "data": "mine:stripes", "epochs": 2, "batch_size": 8}
    path = write(base=base, seeds=3)
    both = [start("ablate.py", path, "--jobs", 1) for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
    assert set(begins(folder).values()) == {1}
    assert len(begins(folder)) == 6


@pytest.mark.slow
def test_an_interrupt_ends_the_workers(write, start, folder):
    base = {"model": "mine:slow_net", "data": "mine:stripes", "epochs": 50, "batch_size": 8}
    process = start("ablate.py", write(base=base), "--jobs", 1)
    pool = folder / "runs/runs"
    deadline = time.monotonic() + 120
    while not list(pool.glob("*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the same command goes on" in err


def test_a_folder_is_claimed_once(folder):
    run = Run(model="mine:net", data="mine:stripes")
    first, second = RunFolder(folder, run), RunFolder(folder, run)
    with first.claim() as mine:
        assert mine
        with second.claim() as theirs:
            assert not theirs
    with second.claim() as theirs:
        assert theirs


def test_three_begins_without_an_epoch_are_a_failure(folder):
    one = RunFolder(folder, Run(model="mine:net", data="mine:stripes"))
    with one.claim():
        assert [one.begin() for _ in range(4)] == [True, True, True, False]
    assert one.status == "failed"
    assert "died 3 times" in one.error()
    one.forget_failure()
    assert one.status == "open"
    (one.path / "attempts.jsonl").write_text('{"epochs": 0, "ho')  # cut off by a full disk
    with one.claim():
        for epoch in range(4):
            assert one.begin()
            one.note_epoch({"epoch": epoch})
        assert one.begin()


def test_runs_on_different_devices_are_told(folder):
    folders = [("none", RunFolder(folder, Run(seed=seed))) for seed in range(3)]
    for _, one in folders:
        with one.claim():
            assert one.begin()
    assert mixed_versions(folders) == ""
    notes = folders[1][1].path / "attempts.jsonl"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert f'"device": "{device}"' in notes.read_text()
    notes.write_text(notes.read_text().replace(f'"{device}"', '"mps"'))
    notes = folders[2][1].path / "attempts.jsonl"  # of a version that did not write the device
    notes.write_text(notes.read_text().replace(f', "device": "{device}"', ""))
    assert f"differ:** device {device}, mps." in mixed_versions(folders)


@pytest.mark.slow
def test_seeds_and_conditions_can_be_chosen(write, command, folder):
    status, _, err = command(
        "ablate.py", write(), "--seeds", "5,7-8", "--only", "none", "--jobs", 1
    )
    assert status == 0, err
    assert runs_csv(folder)["seed"].tolist() == [5, 7, 8]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ray", "127.0.0.1:1"], "nobody answers at the Ray address '127.0.0.1:1'"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--seeds", "a"], "--seeds takes seeds such as 1-6"),
        (["--set", "epochs"], "--set takes FIELD=VALUE"),
    ],
)
def test_wrong_options_are_one_message(write, command, arguments, told):
    status, _, err = command("ablate.py", write(), *arguments)
    assert status == 2
    assert told in err
    assert "Traceback" not in err


class Dying:
    """A worker that dies after the launcher has looked at it once."""

    def __init__(self, status):
        self.statuses = [None, status]

    @property
    def exitcode(self):
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]


def test_a_worker_that_dies_between_two_looks_is_noticed(write, folder):
    folders = [one for _, one in folders_of(read_study(write()), Path("runs/runs"))]
    crew = _Crew(folders, jobs=1, workers=0, tests=True)
    crew.processes.append(Dying(UNWRITABLE))
    crew.check()
    crew.fill()
    with pytest.raises(LaunchError, match="no run can be written"):
        crew.check()


@contextmanager
def workers_print_to(path):
    """Let the processes that are started here print their errors into a file."""
    kept = os.dup(2)
    log = os.open(path, os.O_WRONLY)
    os.dup2(log, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(log)


@pytest.mark.slow
@pytest.mark.parametrize(
    "log", [pytest.param(os.devnull, marks=pytest.mark.exhaustive), "/dev/full"]
)
def test_a_full_disk_is_one_message(write, command, folder, log, monkeypatch):
    """Also if the log of the workers is on the same disk."""
    resource = pytest.importorskip("resource", reason="Windows has no limit for the size of files")
    if not Path(log).exists():
        pytest.skip("this system has no device that is always full")
    # Python writes too large bytecode only in part, and the workers would read this part
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    path = write(seeds=1)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, unlimited[1]))  # a checkpoint is larger
    try:
        with workers_print_to(log):
            status, _, err = command("ablate.py", path, "--jobs", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert status == 2
    assert "no run can be written" in err
    assert not list(folder.rglob("error.txt"))
    assert not list(folder.rglob(".checkpoint*"))
    status, _, err = command("ablate.py", path, "--jobs", 1)
    assert status == 0, err
    assert (runs_csv(folder)["status"] == "finished").all()


@pytest.mark.slow
def test_a_local_ray_cluster_with_a_token(write, start, folder, monkeypatch):
    pytest.importorskip("ray", reason="the extra `ray` has it")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-token-of-this-test-with-enough-length")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    process = start("ablate.py", write(), "--ray", "local", "--jobs", 2)  # Ray reads them at import
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert (runs_csv(folder)["status"] == "finished").all()


def test_a_port_without_an_answer_is_told_soon():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with pytest.raises(LaunchError, match="nobody answers"):
        _check_answers(f"127.0.0.1:{port}")
    with pytest.raises(LaunchError, match="HOST:PORT"):
        _check_answers("somewhere")
