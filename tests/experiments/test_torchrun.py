"""Two processes under torchrun: one batch in halves, masks of their own, one checkpoint."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .test_checkpoint import tensors

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "model_args": '{"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "output_stride": 8}',
    "spec": '{"layer[34].0": "DropBlock2d(p=0.25, block_size=3)"}',
    "data": "fake",
    "image_size": 24,
    "train_images": 140,
    "validation": 0.5,  # of the 70 others, the last batch of an epoch is half of one
    "batch_size": 20,
    "epochs": 3,
    "augmentation": "flip",
    "ema": 0.5,
}
# Trains, and stops after the batch that is given, if any, in all processes
DRIVER = """
import json, sys
from pathlib import Path
sys.path.insert(0, ROOT)
from experiments.config import make_config
from experiments.train import Stopped, train
options, out, batches = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
left = batches
def stop():
    global left
    left -= 1
    return left == 0
try:
    train(make_config(options), out=out, stop=stop)
except Stopped:
    pass
"""


def torchrun(*args, processes=2):
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [sys.executable, *command, *map(str, args)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def drive(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.replace("ROOT", repr(str(ROOT))), encoding="utf-8")
    options = {n: json.loads(v) if str(v).startswith("{") else v for n, v in OPTIONS.items()}

    def run(out, batches=0, processes=2, **fields):
        text = json.dumps(options | fields)
        torchrun(driver, text, tmp_path / out, batches, processes=processes)
        state = torch.load(tmp_path / out / "checkpoint.pt", weights_only=True)
        return state, dict(tensors(state))

    return run


@pytest.mark.slow
def test_two_processes_train_and_leave_one_checkpoint(tmp_path):
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
    printed = torchrun(ROOT / "scripts" / "train.py", *options, "--out", tmp_path / "out")
    assert printed.count("test accuracy, clean") == 1
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found >= {"checkpoint.pt", "metrics.jsonl", "result.json"}
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert state["config"]["devices"] == len(state["processes"]) == 2
    one, other = state["processes"]
    assert not torch.equal(one["torch"], other["torch"])
    assert one["attached"]["sites"] != other["attached"]["sites"]  # they dropped another share
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit_and_one_goes_on(drive, tmp_path):
    whole, all_tensors = drive("whole")
    stopped, _ = drive("parts", batches=6)
    shutil.copytree(tmp_path / "parts", tmp_path / "fewer")
    assert (stopped["epoch"], stopped["batch"]) == (1, 2)
    resumed, resumed_tensors = drive("parts")
    assert [e | {"seconds": 0} for e in resumed["epochs"]] == [
        e | {"seconds": 0} for e in whole["epochs"]
    ]
    assert resumed_tensors.keys() == all_tensors.keys()
    assert all(torch.equal(all_tensors[name], resumed_tensors[name]) for name in all_tensors)
    curve = [epoch["validation"] for epoch in whole["epochs"]]
    assert whole["best"]["epoch"] == resumed["best"]["epoch"] == curve.index(max(curve))
    assert any(name.startswith("/best/weights") for name in all_tensors)

    alone, _ = drive("fewer", processes=1)
    assert alone["epoch"] == 3
    assert alone["config"]["devices"] == len(alone["processes"]) == 1
    assert alone["epochs"][0] | {"seconds": 0} == whole["epochs"][0] | {"seconds": 0}


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(drive):
    """Without masks and batch norms, halves of a batch give what the whole gives, but rounding."""
    plain = {
        "model": "torchvision:squeezenet1_1",
        "model_args": {"dropout": 0.0},
        "image_size": 40,
        "lr": 0.01,
        "precision": "64-true",  # in float32 twelve steps make 1e-7 a thousand times larger
        "spec": None,
        "ema": None,
    }
    together, _ = drive("together", **plain)
    alone, _ = drive("alone", processes=1, **plain)
    assert together["model"].keys() == alone["model"].keys()
    for name, weight in alone["model"].items():
        torch.testing.assert_close(together["model"][name], weight, rtol=1e-4, atol=1e-6)
    for one, other in zip(together["epochs"], alone["epochs"], strict=True):
        assert one["accuracy"] == pytest.approx(other["accuracy"], abs=0.03)
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["validation_loss"] == pytest.approx(other["validation_loss"], rel=1e-4)
        assert one["validation"] == pytest.approx(other["validation"], abs=0.03)
