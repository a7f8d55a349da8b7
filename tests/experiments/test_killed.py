"""Commands that are killed at any moment, and started again, end with the same files, to the byte.

On canvas, with all that a run keeps over its epochs: validation, the best epoch and its weights,
the average of the weights, test scores. The twin of each is never disturbed.
"""

import csv
import json
import os
import random
import re
import time
from pathlib import Path

import pytest
import yaml

from experiments.config import make_config
from experiments.data import load_data
from experiments.datasets import canvas
from tests.experiments.launches import attempts, forked, kill, wait

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks and kills")

KILLS = 10
DROP = {"layer4.0": {"Dropout2d": {"p": "${rate}"}}}
BASE = {
    "model_args": {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8]},
    "data": "canvas",
    "image_size": 48,
    "train_images": 100,
    "validation": 0.4,
    "label_noise": 0.1,
    "batch_size": 10,
    "accelerator": "cpu",
}
STUDY = {
    "question": "Is anything lost?",
    "base": {**BASE, "epochs": 3, "test_epochs": True},
    "conditions": {
        "none": {"ema": 0.5},
        "drop": {"spec": {"layer4.0": {"Dropout2d": {"p": 0.5}}}, "mixup": 0.2},
    },
    "baseline": "none",
    "contrasts": {"both": [{"take": "drop", "minus": "none"}]},
    "seeds": [1, 2],
}
SEARCH = {
    "base": BASE,
    "space": {"lr": [0.05, 0.1], "epochs": [2, 3]},
    "arms": {"none": None, "drop": {"space": {"rate": [0.1, 0.5]}, "fields": {"spec": DROP}}},
    "draws": 2,
    "seeds": [101, 102],
}
FILES = {"ablate.py": ("study.yaml", STUDY), "search.py": ("search.yaml", SEARCH)}


@pytest.fixture
def few_images(monkeypatch):
    """A tenth of the test images, made once: forked processes have them, too."""
    monkeypatch.setattr(canvas, "TEST_IMAGES", 100)
    made = (canvas.tested_canvases, canvas.changed_canvases)
    for images in made:
        images.cache_clear()
    for seed in (*STUDY["seeds"], *SEARCH["seeds"]):
        assert len(load_data(make_config({**BASE, "seed": seed}), Path()).tests["clean"]) == 100
    yield
    for images in made:
        images.cache_clear()


def start(call, home: Path, script: str, *args: object) -> int:
    """One of the scripts in a forked process, in a folder; its process id."""

    def work() -> int:
        os.chdir(home)
        code: int = call(script, *args)
        return code

    return forked(work, home / "log")


def undisturbed(call, home: Path, *command: object) -> float:
    """Let a command end; how many seconds it took."""
    begun = time.monotonic()
    pid = start(call, home, *command)
    try:
        assert wait(pid, 300) == 0, (home / "log").read_text()[-2000:]
    except TimeoutError:
        kill(pid)
        raise
    return time.monotonic() - begun


def disturbed(call, home: Path, *command: object, most: float, moments: random.Random) -> int:
    """Start a command again and again, kill it at random moments, then let it end.

    Args:
        call: of the fixture.
        home: where it is started.
        command: script and arguments.
        most: seconds that a kill comes after, at most.
        moments: draws them.

    Returns:
        How many of the kills came before its end.
    """
    killed = 0
    for _ in range(KILLS):
        pid = start(call, home, *command)
        time.sleep(moments.uniform(0, most))
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            kill(pid)
            killed += 1
    undisturbed(call, home, *command)
    return killed


def runs_of(directory: Path) -> dict[str, object]:
    """What each run has kept, without times and memory."""
    found = {}
    for path in sorted(directory.glob("*/result.json")):
        result = json.loads(path.read_text())
        lines = (path.parent / "metrics.jsonl").read_text().splitlines()
        timeless = [{**json.loads(line), "seconds": 0} for line in lines]
        rest = {**result, "seconds": 0, "memory": 0}
        found[path.parent.name] = (json.dumps(rest), [json.dumps(line) for line in timeless])
    return found


def lines_of(path: Path) -> list[dict[str, str]]:
    """A runs.csv without times and memory."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{**line, "seconds": "", "memory": ""} for line in csv.DictReader(file)]


def report_of(path: Path) -> str:
    """A report.md without its cost, and without times in what was run."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"^## Cost\n.*?(?=^## |\Z)", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.usefixtures("few_images", "unrendered")
@pytest.mark.parametrize("script", FILES)
def test_what_is_killed_ten_times_ends_the_same(call, script):
    name, plain = FILES[script]
    Path(name).write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    for folder in ("twin", "killed"):
        Path(folder).mkdir()
    command = [script, f"../{name}", "--backend", "sequential", "--checkpoint_seconds", "0"]
    seconds = undisturbed(call, Path("twin"), *command)
    moments = random.Random(1)
    killed = disturbed(call, Path("killed"), *command, most=seconds / 6, moments=moments)
    twin, home = (Path(f"{folder}/runs/{Path(name).stem}") for folder in ("twin", "killed"))
    print(killed, len(attempts(home)), seconds)
    assert killed >= KILLS // 2
    assert len(attempts(home)) > len(attempts(twin)) == len(runs_of(twin))
    assert not list(home.glob("*.damaged-*"))
    assert runs_of(home) == runs_of(twin)
    if script == "search.py":
        for file in ("search.csv", "chosen.yaml"):
            assert (home / file).read_bytes() == (twin / file).read_bytes()
    else:
        assert lines_of(home / "report/runs.csv") == lines_of(twin / "report/runs.csv")
        assert report_of(home / "report/report.md") == report_of(twin / "report/report.md")
