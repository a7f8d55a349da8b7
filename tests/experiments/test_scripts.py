"""The commands as a user types them, and the quick study."""

import itertools
import json
import re
import sys

import numpy as np
import pytest
import yaml
from PIL import Image

from experiments.config import Run
from experiments.report import read_report
from experiments.search import check
from experiments.study import fit, read_study
from experiments.train import train
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


def test_a_run_has_the_fields_of_the_page():
    text = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
    for field in ("model", "data", "loss", "metric", "epochs"):
        assert field in Run.model_fields
        assert f"{field}" in text
