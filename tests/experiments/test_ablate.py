"""`scripts/ablate.py`, as a user runs it."""

import csv
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from tests.experiments.launches import kill, until, wait

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks, limits and signals")

ROOT = Path(__file__).parents[2]
STUDY = """
question: Does Dropout2d help?
base:
  model_args: {layers: [1, 1, 1, 1], channels: [8, 8, 8, 8]}
  data: fake
  image_size: 8
  train_images: 20
  epochs: 1
conditions:
  none: {}
  Dropout2d: {spec: {"layer4.0": {Dropout2d: {p: 0.5}}}}
baseline: none
seeds: [1, 2]
"""


@pytest.fixture
def ablate(call, unrendered):
    """Call the script's main in this process, sequentially, in a directory with a study."""
    Path("study.yaml").write_text(STUDY, encoding="utf-8")

    def main(*args: object, study: str = "study.yaml") -> int:
        return call("ablate.py", study, "--backend", "sequential", *args)

    return main


def test_a_study_ends_with_a_table_a_report_and_a_csv(ablate, capsys):
    assert ablate("--csv", "runs.csv") == 0
    output = capsys.readouterr()
    lines = [line.split() for line in output.out.splitlines()]
    assert [line[:2] for line in lines if line[1:2] == ["2"]] == [["none", "2"], ["Dropout2d", "2"]]
    assert "report: runs/study/report/report.md" in output.out
    assert "4/4 Dropout2d, seed 2: finished" in output.err
    report = Path("runs/study/report/report.md").read_text(encoding="utf-8")
    assert "Does Dropout2d help?" in report
    assert str(ROOT) not in report
    with Path("runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["seed"] for row in rows) == ["1", "1", "2", "2"]
    assert ablate() == 0
    assert capsys.readouterr().out == output.out


@pytest.mark.slow
def test_shards_leave_the_report_to_the_last(ablate, capsys):
    assert ablate("--shard", "0/2") == 0
    assert "2 of 4 runs are still to come" in capsys.readouterr().out
    assert not Path("runs/study/report").exists()
    assert ablate("--shard", "1/2") == 0
    assert Path("runs/study/report/report.md").exists()


def test_a_shard_without_runs_is_exit_status_0(ablate, capsys):
    assert ablate("--shard", "7/9", "--jobs", "2") == 0
    assert "shard 7/9 has no runs: the study has 4" in capsys.readouterr().err
    assert not list(Path("runs/study").glob("*/config.yaml"))


def test_workers_that_die_before_any_run_are_exit_status_2(ablate, capsys, monkeypatch):
    from experiments.running import launch
    from experiments.running.backends import WorkersDied

    def die(*_):
        raise WorkersDied

    monkeypatch.setattr(launch, "workers", lambda *_: nullcontext((die, 2)))
    assert ablate() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: workers died in 5 rounds in a row")
    assert error.count("\n") == 1


def test_options_of_the_base_come_from_the_command_line(ablate):
    assert ablate("--shard", "0/4", "--base", "{epochs: 1, label_noise: 0.2}") == 0
    config = next(Path("runs").glob("study-??????/*/config.yaml")).read_text()
    assert "epochs: 1\n" in config
    assert "label_noise: 0.2\n" in config


def test_a_failed_run_is_exit_status_1(ablate, capsys, monkeypatch):
    from experiments.running import runs

    def broken(*_, **__):
        raise RuntimeError("out of cheese")

    monkeypatch.setattr(runs, "train", broken)
    assert ablate() == 1
    output = capsys.readouterr()
    assert output.err.count("failed: RuntimeError: out of cheese") == 4
    assert "out of cheese" in Path("runs/study/report/report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--csv", "missing/runs.csv"], "missing/runs.csv"),
        (["--out", "study.yaml"], "study.yaml"),
        (["--data", "imagefolder:nowhere"], "nowhere"),
        (["--data", "cifar10", "--data_dir", "nowhere"], "nowhere"),
        (["--jobs", "0"], "jobs must be at least 1, got 0"),
        (["--shard", "3/3"], "shard must be i/n with 0 <= i < n, got 3/3"),
        (["--shard", "auto"], "is this a SLURM job array?"),
        (["--checkpoint_seconds", "-1"], "checkpoint_seconds must be 0 or more"),
        (["--backend", "dask"], "dask"),
        (["--backend", "ray", "--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_bad_input_is_one_message_and_exit_status_2(ablate, capsys, monkeypatch, args, message):
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    assert ablate(*args) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told
    assert not list(Path().glob("runs/study/*/config.yaml"))


@pytest.mark.parametrize("text", [None, "", "conditions: {}"])
def test_a_study_that_is_none_is_exit_status_2(ablate, capsys, text):
    if text is not None:
        Path("other.yaml").write_text(text, encoding="utf-8")
    assert ablate(study="other.yaml") == 2
    assert "other.yaml" in capsys.readouterr().err


def test_another_kind_of_claim_is_exit_status_2(ablate, capsys):
    assert ablate("--claim", "lease", "--shard", "0/4") == 0
    assert ablate("--claim", "lock") == 2
    assert "claim must be 'lease'" in capsys.readouterr().err


def test_help_says_what_the_command_does(ablate, capsys):
    assert ablate("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Example: scripts/ablate.py" in text
    assert "i/n runs every n-th of the runs only" in text


@pytest.fixture
def forked(ablate):
    """Call it in a process and session of its own; the process id, and what it told."""
    pids = []

    def start(*args: object, before: Callable[[], object]) -> tuple[int, Path]:
        told = Path("told").absolute()
        if (pid := os.fork()) == 0:
            code = 99
            try:
                handle = os.open(told, os.O_WRONLY | os.O_CREAT)
                os.dup2(handle, 2)
                sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
                os.setsid()
                before()
                code = ablate(*args)
            finally:
                os._exit(code)
        pids.append(pid)
        return pid, told

    yield start
    for pid in pids:
        with suppress(ProcessLookupError, ChildProcessError):
            kill(pid)


def small_files() -> None:
    """Have writing fail beyond a few kB, as on a full disk: room for configs, not checkpoints."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_full_disk_is_one_message_and_exit_status_2(forked, ablate):
    pid, told = forked(before=small_files)
    assert wait(pid) == 2
    message = told.read_text()
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    left = {path.name for path in Path("runs/study").rglob("*") if path.is_file()}
    assert left - {"metrics.jsonl"} == {
        "claims",
        "study.json",
        "config.yaml",
        "environment.json",
        "lock",
    }
    assert ablate("--shard", "0/4") == 0


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_leaves_a_state_that_is_resumed(forked):
    """The terminal interrupts the launcher and its workers, idle ones too."""
    Path("study.yaml").write_text(STUDY.replace("epochs: 1", "epochs: 3000"), "utf-8")
    pid, told = forked(
        "--backend",
        "loky",
        "--jobs",
        "1",
        # a shell that runs the tests in the background has its children ignore it
        before=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until(lambda: list(Path().glob("runs/study/*/metrics.jsonl")))
    os.killpg(pid, signal.SIGINT)
    assert wait(pid) == 130
    message = told.read_text()
    assert "stopped; the same command goes on: runs/study" in message
    assert "Traceback" not in message
    assert len(list(Path().glob("runs/study/*/checkpoint.pt"))) == 1
    assert not list(Path().glob("runs/study/stop-*"))
