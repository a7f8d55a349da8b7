"""The commands as a user types them: train, bench_overhead; and the quick study."""

import itertools
import json
import re
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import torch._dynamo
import yaml
from PIL import Image
from torch import nn

from experiments.config import Run
from experiments.overhead import layers, models, peers, timing
from experiments.overhead.memory import saved_bytes
from experiments.overhead.peers import PEERS, nominal, realized
from experiments.report import read_report
from experiments.search import check
from experiments.study import fit, read_study
from experiments.train import train
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


@pytest.mark.parametrize("script", ["ablate", "report", "train", "bench_overhead"])
def test_help(command, script):
    status, out, err = command(f"{script}.py", "--help")
    assert status == 0, err
    assert "xample" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments/configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_committed_study_fits(path):
    study = read_study(path, {"data_args.train_images": 100})
    fit(study)
    if study.file.search:
        check(study)


def test_a_report_of_nothing(command, folder):
    status, _, err = command("report.py", folder)
    assert status == 2
    assert "has no study.yaml" in err


def blocks_of_the_page():
    text = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
    return re.findall(r"```(?:python|yaml)\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.slow
def test_the_study_of_the_page_runs(folder, command, monkeypatch):
    """Its factories, an image folder, a search, and the picture of where a network looks."""
    study, factories, looks = (
        next(block for block in blocks_of_the_page() if text in block)
        for text in ("\nbase:", "# mine.py", "overlay(")
    )
    generator = np.random.default_rng(0)
    for part, kind in itertools.product(("train", "val"), ("dark", "light")):
        (folder / "images" / part / kind).mkdir(parents=True)
        for index in range(10):
            pixels = generator.integers(0, 128, (12, 12, 3), dtype=np.uint8)
            image = Image.fromarray(pixels + 127 * (kind == "light"))
            image.save(folder / "images" / part / kind / f"{index}.png")
    (folder / "mine.py").write_text(factories)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    fields = yaml.safe_load(study)
    fields["base"] |= {"data": "imagefolder", "loss": "mine:smooth_loss", "metric": "mine:macro_f1"}
    fields["base"] |= {"data_args": {"root": "images", "image_size": 12, "validation": 0.5}}
    fields["base"]["epochs"] = 2
    fields["conditions"]["DropBlock2d"]["spec"] = {"0": "DropBlock2d(p=${rate}, block_size=3)"}
    fields["search"] = {"space": {"rate": [0.1, 0.3]}, "candidates": 2, "seeds": 2}
    (folder / "study.yaml").write_text(yaml.safe_dump({**fields, "seeds": 2}, sort_keys=False))
    for options in (["--search"], []):
        status, out, err = command("ablate.py", "study.yaml", *options)
        assert status == 0, err
    assert "4 runs." in out
    exec(compile(looks, "README.md", "exec"), {})
    assert (folder / "where.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_committed_run_comes_out_again():
    study, frame, _ = read_report(ROOT / "experiments/results/quick")
    result = train(study.conditions["DropBlock2d"].model_copy(update={"seed": 1}))
    row = frame[(frame["condition"] == "DropBlock2d") & (frame["seed"] == 1)].iloc[0]
    # equal to the bit on the machine of the committed results; other CPUs round in another way
    assert result.epochs[-1]["loss"] == pytest.approx(row["train_loss"], rel=0.02)
    assert result.scores["clean"] == pytest.approx(row["clean"], abs=0.02)


@pytest.fixture
def dynamo_as_it_is():
    """The work changes a setting of the process; the next tests must not see it."""
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        yield


def test_a_case_of_ones_own(command, folder, dynamo_as_it_is):
    (folder / "big.py").write_text(
        "from torch import nn\n"
        "def net(num_classes):\n"
        "    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), *head)\n"
    )
    options = ["--model", "big:net", "--spec", "{'0': Dropout2d(0.1)}", "--size", "2x3x8x8"]
    status, out, err = command("bench_overhead.py", *options, "--rounds", 2, "--backend", "eager")
    assert status == 0, err
    assert "first_s" in out
    rows = pd.read_csv(folder / "runs/overhead/rows.csv")
    expected = ["bare", "attached", "compiled bare", "compiled attached"]
    assert rows["variant"].tolist() == expected
    assert (rows[["first_s", "ms", "peak_mb"]] > 0).all(axis=None)
    status, _, err = command("bench_overhead.py", "--model", "big:net")
    assert status == 2
    assert "--model and --spec go together" in err
    status, _, err = command("bench_overhead.py", *options[:2], "--spec", "{'9': Dropout2d(0.1)}")
    assert status == 2
    assert "'9'" in err


def test_the_compiled_model_with_sites_does_not_run_the_code_of_the_bare_one(dynamo_as_it_is):
    work = models.own_case("resnet18", {"layer4.1": "ZeroGrad()"}, (2, 3, 32, 32), "eager")
    steps = work.make(torch.device("cpu")).steps
    for name in [*steps, *steps]:
        steps[name]()
        model = steps[name].args[0]
        assert (model.conv1.weight.grad.abs().sum() == 0) == ("attached" in name), name


def test_timings_are_in_turn(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.0)
    steps = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = timing.interleave(steps, 3)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}
    assert order[4:] == ["a", "b"] * 3  # after two calls of each that warm up
    with pytest.raises(ValueError, match="at least 2"):
        timing.interleave(steps, 1)


def test_a_difference_and_a_unit_are_compared(monkeypatch):
    seconds = {"a": [3.0, 30.0, 6.0], "b": [1.0, 10.0, 4.0]}
    monkeypatch.setattr(timing, "interleave", lambda *args: seconds)
    against = [("a - b", "1 s"), ("a", "b")]
    steps = dict.fromkeys("ab", lambda: None)
    work = timing.Work("sums", lambda device: timing.Made(steps), against, units={"1 s": 0.5})
    assert work.variants == ["a", "b"]
    above, ratio = timing.measure(work, 3)
    assert (above["ms"], above["ratio"]) == (2000, 4)  # 2, 20 and 2 seconds in units of 0.5
    assert (ratio["ms"], ratio["ratio"]) == (6000, 3)  # 3, 3 and 1.5


@pytest.mark.parametrize("name", rest_slow(PEERS))
def test_peers_are_asked_for_what_drops_the_same_share(name, monkeypatch):
    monkeypatch.setattr(peers, "ELEMENTS", 400_000)
    p = nominal(name, (14, 14), 5, 0.1)
    assert realized(name, p, (14, 14), 5) == pytest.approx(0.1, abs=0.003)


def test_the_works_do_what_they_say(monkeypatch):
    monkeypatch.setattr(peers, "ELEMENTS", 10_000)
    monkeypatch.setattr(layers, "SHAPES", [(2, 3, 14, 14)])
    cpu = torch.device("cpu")
    works = itertools.islice(layers.sites(), 3), layers.kernels(), layers.observers()
    for work in [*itertools.chain(*works), *layers.formats(), *layers.others()]:
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
