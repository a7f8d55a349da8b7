"""scripts/train.py, as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from experiments.log import read_metrics
from experiments.running.claims import Claim

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"
SMALL = ["--model_args", "{layers: [1, 1, 1, 1], channels: [8, 8, 8, 8], output_stride: 8}"]
DATA = ["--data", "fake", "--image_size", "24"]
TINY = [*SMALL, *DATA, "--train_images", "20", "--epochs", "1"]


@pytest.fixture
def call(call):
    return partial(call, "train.py")


def test_accuracies_and_rates_are_printed(call, capsys):
    assert call(*TINY, "--spec", "{layer4.0: DropBlock2d(p=0.25)}") == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split(",")[1].split()[0] for line in lines[:3]]
    assert names == ["clean", "occluded", "noisy"]
    assert lines[-1].startswith("layer4.0/DropBlock2d: rate asked 0.2500, realized 0.2")


def test_a_folder_holds_the_run_and_its_result(call, capsys):
    assert call(*TINY, "--out", "out") == 0
    result = json.loads(Path("out/result.json").read_text())
    assert result["status"] == "finished"
    assert (
        f"test accuracy, clean     {100 * result['scores']['clean']:.2f} %"
        in capsys.readouterr().out
    )
    assert len(read_metrics(Path("out/metrics.jsonl"))) == 1


def test_options_come_from_files_and_the_command_line_wins(call, capsys):
    Path("run.yaml").write_text(
        "epochs: 7\ntrain_images: 20\nloader_workers: 0\n", encoding="utf-8"
    )
    assert call("--config", "run.yaml", *SMALL, *DATA, "--epochs", "2") == 0
    assert call("--config", "run.yaml", "--epochs", "2", "--print_config") == 0
    assert "\nepochs: 2\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--epochs", "0"], "epochs must be at least 1, got 0"),
        (["--epochs", "few"], "few"),
        (["--epoch", "1"], "epoch"),
        (["--spec", "{layer9.0: Dropout2d(p=0.5)}"], "layer9.0"),
        (["--spec", "missing.yaml"], "missing.yaml"),
        (["--data", "imagefolder:missing"], "missing"),
        (["--data", "cifar10", "--data_dir", "missing"], "missing"),
        (["--checkpoint_seconds", "-1"], "checkpoint_seconds must be 0 or more"),
        (["--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_bad_input_is_one_message_and_exit_status_2(call, capsys, args, message):
    assert call(*args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_loss_that_diverged_is_exit_status_1(call, capsys):
    assert call(*TINY, "--epochs", "2", "--lr", "1e30") == 1
    printed = capsys.readouterr().out
    assert "diverged in epoch 2: its loss is not finite; try a smaller lr" in printed


def test_another_run_is_not_written_over(call, capsys):
    assert call(*TINY, "--out", "out") == 0
    before = Path("out/checkpoint.pt").read_bytes()
    assert call(*TINY, "--out", "out", "--seed", "9") == 2
    assert "seed is 0 there, and 9 here" in capsys.readouterr().err
    assert Path("out/checkpoint.pt").read_bytes() == before


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_and_the_run_begins_anew(call, capsys):
    assert call(*TINY, "--out", "out") == 0
    path = Path("out/checkpoint.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)
    Path("out/.metrics.jsonl.1.part").write_text("left by a kill")
    first = capsys.readouterr().out.splitlines()[:4]
    assert call(*TINY, "--out", "out") == 0
    output = capsys.readouterr()
    assert output.err.count("checkpoint") == 2 + 1
    assert (
        "out/checkpoint.pt can't be read as a checkpoint: its digest does not match: bits of it "
        "were changed; set aside as out/checkpoint.pt.damaged-1, the run begins anew\n"
    ) in output.err
    assert output.out.splitlines()[:4] == first
    assert Path("out/checkpoint.pt.damaged-1").read_bytes() == content
    assert not list(Path("out").glob("*.part"))
    assert call(*TINY, "--out", "out") == 0
    assert "damaged" not in capsys.readouterr().err


def test_two_processes_do_not_train_in_one_folder(call, capsys):
    Path("out").mkdir()
    claim = Claim(Path("out"))
    assert claim.acquire()
    assert call(*TINY, "--out", "out") == 2
    assert "another process trains in out" in capsys.readouterr().err
    claim.release()
    assert call(*TINY, "--out", "out") == 0


def test_help_is_of_the_docstrings(call, capsys):
    assert call("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Example: scripts/train.py" in text
    assert "share of the training labels that are wrong, in [0, 1]" in text


def heed():
    """Undo what a shell in the background, or nohup, has its children ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "status"),
    [
        pytest.param("SIGTERM", 75, marks=pytest.mark.slow),
        pytest.param("SIGUSR1", 75, marks=pytest.mark.slow),
        pytest.param("SIGHUP", 75, marks=pytest.mark.slow),
        pytest.param("SIGINT", 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_a_checkpoint_to_go_on_from(tmp_path, name, status):
    command = [sys.executable, str(SCRIPT), *TINY, "--epochs", "100000", "--out", str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed,
    ) as process:
        try:
            deadline = time.monotonic() + 300
            metrics = tmp_path / "metrics.jsonl"
            while not metrics.exists() or not metrics.read_text():
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(getattr(signal, name))
            _, stderr = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == status, stderr
    assert f"start it again with --out {tmp_path}" in stderr
    assert "Traceback" not in stderr
    assert (tmp_path / "checkpoint.pt").exists()
