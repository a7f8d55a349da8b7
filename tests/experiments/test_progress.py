"""What is shown of a launch: which runs are worked on, how far they are, and what has ended."""

import io
import json
import os
import re
import shutil
import socket
import time

import pytest
from rich.console import Console

from experiments.config import resolve, run_hash
from experiments.log import line
from experiments.running.progress import Shown, running, shown
from experiments.running.runs import Terms, execute
from tests.experiments.launches import OFTEN, ONE, until
from tests.experiments.synthetic import epochs


@pytest.fixture
def home(tmp_path, finished):
    """The directory of a finished run."""
    home = tmp_path / run_hash(resolve(ONE), "fake")
    finished(home)
    return home


def begin(directory, pid=None, started="2026-01-01T00:00:00", host=None):
    """What a worker leaves that has begun a run."""
    directory.mkdir(exist_ok=True)
    attempt = {"host": host or socket.gethostname(), "pid": pid or os.getpid(), "started": started}
    (directory / "environment.json").write_text(json.dumps({"attempts": [attempt]}))


def go_on(directory, number):
    """And has gone through so many epochs."""
    (directory / "metrics.jsonl").write_text("".join(map(line, epochs(number=number))))


DAMAGES = {
    "result": lambda home: (home / "result.json").write_text("{}"),
    "metrics": lambda home: (home / "metrics.jsonl").write_text(""),
    "no config": lambda home: (home / "config.yaml").unlink(),
    "done": lambda home: (home / "done.json").write_text("{"),
    "environment": lambda home: (home / "environment.json").write_text("{}"),
    "another's": lambda home: (home / "done.json").write_text(
        (home / "done.json").read_text().replace(home.name, "0" * 16)
    ),
}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(name, marks=() if name in ("result", "done") else pytest.mark.slow)
        for name in DAMAGES
    ],
)
def test_a_damaged_run_that_is_run_again_has_not_ended(home, damage):
    seen = Shown("none, seed 1", home, 1)
    assert seen.look() == "finished"
    DAMAGES[damage](home)
    seen = Shown("none, seed 1", home, 1)
    assert (seen.look(), seen.ended, seen.done) == (None, False, 0)
    shutil.move(home, home.with_name("aside"))
    begin(home)
    assert (seen.look(), seen.ended, seen.done) == (None, False, 0)
    assert running([seen]) == [seen]
    shutil.rmtree(home)
    execute(ONE, OFTEN, home, terms=Terms())
    assert (seen.look(), seen.ended, seen.done) == ("finished", True, 1)
    assert running([seen]) == []


def test_those_are_running_that_a_live_process_began_last(tmp_path):
    dead = os.fork() or os._exit(0)
    os.waitpid(dead, 0)
    runs = [Shown(name, tmp_path / name, 3) for name in ("old", "a", "b", "dead", "far", "none")]
    begin(tmp_path / "old")  # of a launch before this one
    for run in runs:
        run.look()
    begin(tmp_path / "a", pid=1, started="2026-01-01T00:00:01")
    begin(tmp_path / "b", pid=1, started="2026-01-01T00:00:02")  # by the same process, after it
    begin(tmp_path / "dead", pid=dead)
    begin(tmp_path / "far", pid=dead, host="another")
    for run in runs:
        run.look()
    assert [run.label for run in running(runs)] == ["b", "far"]
    go_on(tmp_path / "old", 2)  # another launch has it
    assert runs[0].look() is None
    assert [run.label for run in running(runs)] == ["old", "b", "far"]
    assert (runs[0].done, runs[0].loss) == (2, 1.5)


def test_the_bar_names_the_running_runs_with_their_time_and_loss(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    runs = [Shown(name, tmp_path / name, 3) for name in ("none, seed 1", "drop, seed 2")]

    def texts():
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())

    with shown(runs, console):
        begin(tmp_path / "none, seed 1")
        go_on(tmp_path / "none, seed 1", 2)
        begin(tmp_path / "drop, seed 2", pid=1)
        until(lambda: "none, seed 1: epoch 2/3, loss 1.500" in texts(), 20)
        until(lambda: "drop, seed 2: epoch 0/3" in texts(), 20)
        until(lambda: "0 of 2 runs, 2 under way" in texts(), 20)
        until(lambda: re.search(r"loss 1\.500 .* 0:00:0\d passed", texts()), 20)
        time.sleep(0.1)


def test_more_losses_that_cannot_be_read_are_none(tmp_path):
    run = Shown("none", tmp_path, 3)
    run.look()
    for text in ("{\n", "[3]\n", '{"loss": "x"}\n', '{"loss": 1'):
        (tmp_path / "metrics.jsonl").write_text(text)
        assert run.look() is None
        assert (run.done, run.loss) == (0, None)
