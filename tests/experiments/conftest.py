"""What the tests share: a finished run, made once, and the commands in this process."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from statsmodels.stats import multitest

from experiments.config import Runtime, resolve, run_hash
from experiments.running.outcomes import Outcome, look
from experiments.running.runs import execute
from tests.experiments.launches import ONE

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True, scope="session")
def _corrections_collect_no_garbage():
    """statsmodels does in each, which takes long beside the objects of thousands of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multitest, "gc", SimpleNamespace(collect=lambda: 0), raising=False)
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Callable[..., Outcome]:
    """Make a directory that of a finished run, and tell what came of it."""
    made = {}

    def copy(home: Path, config=ONE) -> Outcome:
        run = run_hash(resolve(config), "fake")
        if run not in made:
            made[run] = tmp_path_factory.mktemp("finished") / run
            assert execute(config, Runtime(), made[run]).status == "finished"
        shutil.copytree(made[run], home)
        return look(home, run)

    return copy


@pytest.fixture
def call(monkeypatch, tmp_path) -> Callable[..., int]:
    """Call the main of one of the scripts, in this process, from a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def main(script: str, *args: object) -> int:
        spec = importlib.util.spec_from_file_location("script", SCRIPTS / script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [str(SCRIPTS / script), *map(str, args)])
        try:
            return module.main()
        except SystemExit as end:  # --help, and what jsonargparse refuses
            return end.code

    return main


@pytest.fixture
def unrendered(monkeypatch) -> None:
    """Pictures are made, and written as other bytes each time: to draw them takes long."""
    monkeypatch.setattr(
        "experiments.reporting.plots.save", lambda figure, path: path.write_bytes(os.urandom(99))
    )
