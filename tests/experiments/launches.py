"""Launches of a tiny study: in a process of their own, that can be killed."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from signal import SIG_DFL, SIGHUP, SIGKILL, signal
from typing import Any

from experiments.config import Config, Runtime
from experiments.results import Result
from experiments.running.launch import begin_study, launch
from experiments.running.records import read_runs
from experiments.study import Study

MODEL = {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8]}
TINY = Config(
    model_args=MODEL,
    data="fake",
    image_size=8,
    train_images=20,
    batch_size=5,
    epochs=2,
    accelerator="cpu",
)
ONE = replace(TINY, epochs=1)
DROP = {"layer4.0": {"Dropout2d": {"p": 0.5}}}
OFTEN = Runtime(checkpoint_seconds=0)


def make_study(epochs: int = 2, seeds: tuple[int, ...] = (1, 2), **conditions: Config) -> Study:
    """`none`, and `drop`, which draws masks, or the conditions given."""
    if not conditions:
        conditions = {"none": TINY, "drop": replace(TINY, spec=DROP)}
    conditions = {name: replace(config, epochs=epochs) for name, config in conditions.items()}
    return Study(
        name="study",
        question="",
        conditions=conditions,
        factors={name: {} for name in conditions},
        baseline=next(iter(conditions)),
        seeds=seeds,
        fingerprints=dict.fromkeys(conditions, "fake"),
    )


def begin(study: Study, directory: Path) -> None:
    """The study's directory and its record, as scripts/ablate.py makes them."""
    begin_study(study, directory, "a test")


def start(study: Study, directory: Path, **how: Any) -> int:
    """Launch in a forked process, which exits as scripts/ablate.py does; its process id."""
    begin(study, directory)

    def work() -> int:
        signal(SIGHUP, SIG_DFL)  # nohup has its children ignore it
        ended = launch(study, directory, OFTEN, **how)
        return ended.exit_code or (1 if ended.failed else 0)

    return forked(work, directory.with_suffix(".log"))


def forked(work: Callable[[], int], log: Path) -> int:
    """Work in a forked process, which exits with what that gives; its process id.

    Args:
        work: gives the exit code; 99 if it raises.
        log: that what it prints is added to.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 99
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def started(study: Study, directory: Path, **how: Any) -> Iterator[int]:
    """The same; killed in the end if it is still there."""
    pid = start(study, directory, **how)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, SIGKILL)
            os.waitpid(pid, 0)


def wait(pid: int, seconds: float = 120.0) -> int:
    """Its exit code, negative for a signal."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    raise TimeoutError(f"process {pid} goes on after {seconds} s")


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for it."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def kill(pid: int) -> None:
    """Kill a child, and wait until it is dead."""
    os.kill(pid, SIGKILL)
    os.waitpid(pid, 0)


def timeless(result: Result | None) -> Any:
    """A result without times and memory."""
    if result is None:
        return None
    epochs = [replace(epoch, seconds=0.0) for epoch in result.epochs]
    return asdict(replace(result, seconds=0.0, memory=0, epochs=epochs))


def summary(directory: Path) -> dict[tuple[str, int], Any]:
    """What a study's table is made of, to the last digit."""
    _, runs = read_runs(directory)
    assert len({(run.condition, run.seed) for run in runs}) == len(runs)
    return {(run.condition, run.seed): (run.status, timeless(run.result)) for run in runs}


def attempts(directory: Path) -> list[dict[str, Any]]:
    """All attempts at the runs of a study."""
    return [
        attempt
        for path in directory.glob("*/environment.json")
        for attempt in json.loads(path.read_text())["attempts"]
    ]
