"""The commands as a user types them: train, saliency, bench_overhead; and the quick study."""

import csv
import itertools
import json

import pytest
import torch
from torch import nn

from experiments.config import Run
from experiments.overhead import layers
from experiments.overhead.memory import saved_bytes
from experiments.overhead.peers import PEERS, nominal, realized
from experiments.overhead.timing import Made, Work, interleave, measure
from experiments.study import fit, read_study
from tests.cases import rest_slow
from tests.experiments.conftest import ROOT


def test_one_run(command, folder):
    fields = ["model=mine:net", "data=mine:stripes", "epochs=2", "spec={conv: Dropout2d(0.3)}"]
    status, out, err = command("train.py", *fields)
    assert status == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row.get("epoch") for row in rows] == [0, 1, None]
    assert rows[-1]["status"] == "finished"
    status, _, err = command("train.py", "epochs=0", "lr=high")
    assert status == 2
    assert "epochs: " in err
    assert "lr: " in err


@pytest.mark.parametrize("script", ["ablate", "report", "train", "bench_overhead", "saliency"])
def test_help(command, script):
    status, out, err = command(f"{script}.py", "--help")
    assert status == 0, err
    assert "xample" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quick", "resnet", "inception"])
def test_a_committed_study_fits(name):
    study = read_study(ROOT / f"experiments/configs/{name}.yaml", {"data_args.train_images": 100})
    fit(study)


def test_a_report_of_nothing(command, folder):
    status, _, err = command("report.py", folder)
    assert status == 2
    assert "has no study.yaml" in err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no place at layer")
def test_saliency_of_finished_runs(write, command, folder):
    status, _, err = command("ablate.py", write(seeds=1))
    assert status == 0, err
    status, _, err = command("saliency.py", "runs/study", "--layer", "conv", "--count", 3)
    assert status == 0, err
    assert (folder / "runs/study/saliency.png").stat().st_size > 1000


def test_a_case_of_ones_own(command, folder):
    (folder / "big.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), *head)\n"
    )
    options = ["--model", "big:net", "--spec", "{'0': Dropout2d(0.1)}", "--size", "2x3x8x8"]
    status, out, err = command("bench_overhead.py", *options, "--rounds", 2, "--backend", "eager")
    assert status == 0, err
    assert "first call, s" in out
    lines = (folder / "runs/overhead/rows.csv").read_text().splitlines()
    rows = list(csv.DictReader(lines))
    assert [row["variant"] for row in rows] == ["attached", "compiled bare", "compiled attached"]
    status, _, err = command("bench_overhead.py", "--model", "big:net")
    assert status == 2
    assert "--model and --spec go together" in err


def test_timings_are_paired_and_in_turn():
    order = []
    steps = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = interleave(steps, 3)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}
    with pytest.raises(ValueError, match="at least 2"):
        interleave(steps, 1)


def test_a_difference_and_a_unit_are_compared():
    steps = {"a": lambda: sum(range(20000)), "b": lambda: sum(range(10000))}
    against = [("a - b", "1 s"), ("a", "b")]
    work = Work("sums", lambda device: Made(steps), against, units={"1 s": 1.0})
    assert work.variants == ["a", "b"]
    above, ratio = measure(work, 5)
    assert 0 < above["ratio"] < 0.1
    assert ratio["ratio"] > 0


@pytest.mark.parametrize("name", rest_slow(PEERS))
def test_peers_are_asked_for_what_drops_the_same_share(name):
    p = nominal(name, (14, 14), 5, 0.1)
    assert realized(name, p, (14, 14), 5) == pytest.approx(0.1, abs=0.003)


def test_the_works_do_what_they_say():
    cpu = torch.device("cpu")
    for work in [*itertools.islice(layers.sites(), 3), *layers.observers(), *layers.others()]:
        made = work.make(cpu)
        assert set(made.steps) == set(work.variants)
        for step in made.steps.values():
            step()
    x = torch.ones(8, requires_grad=True)
    assert saved_bytes(lambda: x.exp().sum().backward()) == 32
    assert isinstance(layers.attached(layers.Dropout2d(0.1)), nn.Module)


def test_a_run_has_the_fields_of_the_page():
    text = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
    for field in ("model", "data", "loss", "metric", "epochs"):
        assert field in Run.model_fields
        assert f"{field}" in text
