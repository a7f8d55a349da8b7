"""A folder with a study of one's own factories, and a way to run the commands."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

for package in (
    "pydantic",
    "timm",
    "torchvision",
    "pandas",
    "rich",
    "filelock",
):
    pytest.importorskip(package, reason="the extra `experiments` has it")

import yaml  # noqa: E402

from scripts.ablate import called  # noqa: E402

ROOT = Path(__file__).parents[2]
SPEC = {"conv": "Dropout2d(p=LinearSchedule(0, ${rate}))"}
STUDY = {
    "question": "Does Dropout2d help the stripes?",
    "base": {"model": "mine:net", "data": "mine:stripes", "epochs": 3, "batch_size": 8},
    "conditions": {"none": {}, "Dropout2d": {"spec": SPEC, "params": {"rate": 0.5}}},
    "seeds": 2,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with `mine.py`, on the path for imports."""
    shutil.copy(Path(__file__).with_name("mine.py"), tmp_path / "mine.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder):
    """Write a study: the small one, with other fields."""

    def write(name="study.yaml", **fields):
        path = folder / name
        path.write_text(yaml.safe_dump({**STUDY, **fields}, sort_keys=False))
        return path

    return write


def heed_interrupts():
    """Processes in the background of a shell ignore interrupts, and so do those they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def start(folder):
    """Start a command in the folder."""

    def start(script, *arguments):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )

    return start


@pytest.fixture
def command(folder, capsys):
    """Run a command in this process; its exit status and its output."""

    def command(script, *arguments):
        module = importlib.import_module(f"scripts.{script.removesuffix('.py')}")
        try:
            status = called(lambda: module.main([*map(str, arguments)]))
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return command
