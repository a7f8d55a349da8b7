"""The two commands, as a user runs them."""

import csv
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUDY = """
base:
  model_args: {layers: [1, 1, 1, 1], channels: [8, 8, 8, 8], output_stride: 8}
  train_images: 20
  epochs: 1
  threads: 1
conditions:
  none: {}
  Dropout2d: {spec: {"layer4.0": {Dropout2d: {p: 0.5}}}}
baseline: none
seeds: [1, 2, 3]
"""


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Call a script's main, in this process, from a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def main(script: str, *args: object) -> int:
        spec = importlib.util.spec_from_file_location("script", ROOT / "scripts" / script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [script, *map(str, args)])
        try:
            return module.main()
        except SystemExit as end:  # --help, and what jsonargparse refuses
            return end.code

    return main


def command(script: str, *args: object) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / script), *map(str, args)]


def test_ablate_prints_a_table_and_writes_a_csv(tmp_path):
    (tmp_path / "study.yaml").write_text(STUDY, encoding="utf-8")
    done = subprocess.run(
        command("ablate.py", "study.yaml", "--csv", "runs.csv"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines if line[1:2] == ["3"]] == [["none", "3"], ["Dropout2d", "3"]]
    assert "6 runs in" in done.stdout
    assert "seeds 1, 2, 3" in done.stdout
    assert "run 6/6: Dropout2d, seed 3" in done.stderr
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["1", "1", "2", "2", "3", "3"]
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows)


@pytest.mark.parametrize(
    ("script", "args", "message"),
    [
        ("ablate.py", ["missing.yaml"], "missing.yaml"),
        ("ablate.py", ["study.yaml", "--csv", "missing/runs.csv"], "missing/runs.csv"),
        ("ablate.py", ["empty.yaml"], "empty.yaml is not a study"),
        ("train.py", ["--epochs", "0"], "epochs must be at least 1, got 0"),
        ("train.py", ["--epochs", "few"], "few"),
        ("train.py", ["--epoch", "1"], "epoch"),
        ("train.py", ["--spec", "{layer9.0: Dropout2d(p=0.5)}"], "layer9.0"),
    ],
)
def test_bad_input_is_one_message_and_exit_status_2(call, capsys, script, args, message):
    Path("study.yaml").write_text(STUDY, encoding="utf-8")
    Path("empty.yaml").touch()
    assert call(script, *args) == 2
    assert message in capsys.readouterr().err


def test_a_failed_training_is_exit_status_1(call, capsys):
    args = ["--epochs", "2", "--train_images", "60", "--max_lr", "1e30", "--threads", "1"]
    assert call("train.py", *args) == 1
    assert "try a smaller max_lr" in capsys.readouterr().err


def test_train_prints_accuracy_and_rates(call, capsys):
    args = ["--epochs", "1", "--train_images", "20", "--threads", "1"]
    assert call("train.py", *args, "--spec", "{layer4.0: DropBlock2d(p=0.25)}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("test accuracy ")
    assert lines[-1].startswith("layer4.0/DropBlock2d: rate asked 0.2500, realized 0.2")


@pytest.mark.parametrize("script", ["train.py", "ablate.py", "families.py", "bench_overhead.py"])
def test_help_says_what_the_command_does(call, capsys, script):
    assert call(script, "--help") == 0
    assert f"Example: scripts/{script}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_says_so_and_exits_130(tmp_path):
    study = STUDY.replace("epochs: 1", "epochs: 100000")
    (tmp_path / "study.yaml").write_text(study, encoding="utf-8")
    with subprocess.Popen(
        command("ablate.py", "study.yaml", "--csv", "runs.csv"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # a shell that runs the tests in the background has its children ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "runs.csv").exists():  # made when the study has been checked
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "interrupted after 0 finished runs" in stderr
    assert "Traceback" not in stderr


def test_families_writes_a_row(call, tmp_path):
    assert call("families.py", "table.md", "--only", "vision_transformer") == 0
    row = (tmp_path / "table.md").read_text().splitlines()[-1]
    assert row.startswith("| vision_transformer | test_vit | 96 | `blocks.4`, `blocks.5` | NLC |")
    assert row.endswith("| grid=(6, 6) | ok | ok |")


def test_families_knows_its_families(call, capsys):
    assert call("families.py", "table.md", "--only", "resent") == 2
    assert "'resent' is none of the 98 families" in capsys.readouterr().err
