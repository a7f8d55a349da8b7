"""Workers that pull runs: N copies of the same loop, here or on Ray, until all runs are settled.

Each worker goes through the runs in order, claims the first that nobody works on, trains it, and
looks again. A second terminal, the tasks of a SLURM array and Ray tasks are more copies of the
same loop: there is no scheduler. The lock of a worker that dies is freed by the system, and the
launcher starts the worker again.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from experiments.runs import RunFolder
from experiments.train import train

WAIT = 1.0  # seconds between two looks at runs that others work on
POLL = 0.2  # seconds between two looks at the workers
UNWRITABLE = 74  # exit status of a worker that can't write
NO_ROOM = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG)  # with these, no run can go on
IDLE = 3  # workers that die before they begin a run


class LaunchError(RuntimeError):
    """The runs can't be worked on; the message says why."""


def work(
    folders: Sequence[RunFolder],
    workers: int = 0,
    tests: bool = True,
    leave: Callable[[], bool] = lambda: False,
) -> None:
    """Train runs until all are settled.

    Args:
        folders: the folders of the runs, in order.
        workers: processes that load items.
        tests: whether the tests are scored.
        leave: called between runs and epochs; a true result ends the worker.
    """
    while not leave():
        remaining = [folder for folder in folders if folder.status == "open"]
        if not remaining:
            return
        if not any(_attempt(folder, workers, tests, leave) for folder in remaining):
            time.sleep(WAIT)  # other workers have all open runs


def _attempt(folder: RunFolder, workers: int, tests: bool, leave: Callable[[], bool]) -> bool:
    """Train a run, if nobody else works on it and it is still open.

    Returns:
        Whether to look for the next run at once: false if another worker has the run.
    """
    if leave():
        return True
    with folder.claim() as mine:
        if mine and folder.status == "open" and folder.begin():
            _train(folder, workers, tests, leave)
        return mine


def _train(folder: RunFolder, workers: int, tests: bool, leave: Callable[[], bool]) -> None:
    """Train a run, and write its result or its failure. The lock must be held."""

    def on_epoch(row: dict[str, Any]) -> None:
        folder.note_epoch(row)
        if leave():
            raise SystemExit(1)

    try:
        result = train(folder.run, folder.path, on_epoch, workers, tests)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        folder.fail(error)
    except Exception as error:  # one run that fails must not stop the others
        folder.fail(error)
    else:
        folder.finish(result)


def _any_open(folders: Sequence[RunFolder]) -> bool:
    """Return whether a run is not settled."""
    return any(folder.status == "open" for folder in folders)


def launch(
    folders: Sequence[RunFolder],
    jobs: int,
    on_progress: Callable[[], None],
    workers: int = 0,
    tests: bool = True,
) -> None:
    """Start workers on this machine, and start again those that die, until all runs are settled.

    Args:
        folders: the folders of the runs.
        jobs: the number of workers.
        on_progress: called now and then, to show the progress.
        workers: processes that load items, for each worker.
        tests: whether the tests are scored.

    Raises:
        LaunchError: if workers die before they begin a run.
    """
    crew = _Crew(folders, jobs, workers, tests)
    try:
        while _any_open(folders):
            on_progress()
            crew.check()
            crew.fill()
            time.sleep(POLL)
    finally:
        crew.stop()
    on_progress()


class _Crew:
    """The workers of a launcher."""

    def __init__(self, folders: Sequence[RunFolder], jobs: int, workers: int, tests: bool) -> None:
        self.folders = folders
        self.jobs = jobs
        self.workers = workers
        self.tests = tests
        self.context = multiprocessing.get_context("spawn")
        self.processes: list[SpawnProcess] = []
        self.begins = 0  # the begins of all runs when a worker died last
        self.useless = 0  # workers that died since a run was begun

    def check(self) -> None:
        """Let go of workers that have ended. Stop the study if they can't write or die repeatedly.

        Raises:
            LaunchError: if no run can be written, or if workers die again and again.
        """
        looks = [(process, process.exitcode) for process in self.processes]  # it may end meanwhile
        self.processes = [process for process, status in looks if status is None]
        died = [status for _, status in looks if status not in (None, 0)]
        if UNWRITABLE in died:
            pool = self.folders[0].path.parent
            raise LaunchError(f"no run can be written to {pool}: see above")
        if not died:
            return

        begins = sum(len(folder.attempts()) for folder in self.folders)
        self.useless += len(died)
        if begins > self.begins:
            self.useless = 0
        self.begins = begins
        if self.useless >= IDLE * self.jobs:
            raise LaunchError("workers die before they begin a run: read their output above")

    def fill(self) -> None:
        """Start workers in place of those that have ended."""
        while len(self.processes) < self.jobs:
            slot = len(self.processes)
            arguments = (self.folders, slot, self.workers, self.tests)
            process = self.context.Process(target=_worker, args=arguments)
            process.start()
            self.processes.append(process)

    def stop(self) -> None:
        """End all workers."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()


def _worker(folders: Sequence[RunFolder], slot: int, workers: int, tests: bool) -> None:
    """Work in a process of its own, until the launcher is gone."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends its workers
    _see_one_gpu(slot)

    try:
        work(folders, workers, tests, leave=lambda: os.getppid() != launcher.pid)
    except OSError as error:
        with suppress(OSError):  # the log may be on the same full disk
            print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(UNWRITABLE)  # at a normal exit, a failed flush of the log changes the status


def _see_one_gpu(slot: int) -> None:
    """Hide all GPUs from this process but one, where the machine has several."""
    count = torch.cuda.device_count()
    if count < 2:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(count)]
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[slot % count]


def launch_on_ray(
    folders: Sequence[RunFolder],
    address: str,
    jobs: int | None,
    imports: Path,
    on_progress: Callable[[], None],
    workers: int = 0,
    tests: bool = True,
) -> None:
    """Work on the runs in Ray tasks. The folder of the runs must be on a disk that all nodes share.

    Ray reads the token of a cluster from RAY_AUTH_TOKEN or from ~/.ray/auth_token.

    Args:
        folders: the folders of the runs.
        address: HOST:PORT of a cluster, or "local" to start one on this machine.
        jobs: tasks at once; None takes one for each CPU that a run needs.
        imports: folder of the study, which holds its factories.
        on_progress: called now and then, to show the progress.
        workers: processes that load items, for each task.
        tests: whether the tests are scored.

    Raises:
        LaunchError: if nobody answers at the address, or tasks end and runs are still open.
    """
    import ray

    _connect(address, imports)
    try:
        threads = folders[0].run.threads
        resources = ray.cluster_resources()
        if jobs is None:
            jobs = max(1, int(resources.get("CPU", 1) // threads))

        gpus = 1 if resources.get("GPU", 0) else 0
        task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=3)(work)
        count = min(jobs, len(folders))
        _run_tasks(lambda: task.remote(list(folders), workers, tests), count, folders, on_progress)
    except ray.exceptions.RayError as error:
        raise LaunchError(f"Ray at {address}: {error}") from error
    finally:
        ray.shutdown()

    on_progress()
    if _any_open(folders):
        raise LaunchError(
            f"all Ray tasks ended, and runs are still open: is {folders[0].path.parent} on a disk "
            "that all nodes share?"
        )


def _connect(address: str, imports: Path) -> None:
    """Connect to a Ray cluster whose tasks can import the experiments and the study's factories."""
    import ray

    where = {}
    if address != "local":
        _check_answers(address)
        where["address"] = address

    root = str(Path(__file__).parents[1])
    paths = [root, str(imports), os.environ.get("PYTHONPATH", "")]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}
    try:
        ray.init(**where, runtime_env=environment, log_to_driver=False, include_dashboard=False)
    except Exception as error:  # Ray has many kinds
        hint = "a cluster with tokens needs RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN"
        raise LaunchError(f"Ray at {address}: {error} ({hint})") from error


def _run_tasks(
    start: Callable[[], Any],
    count: int,
    folders: Sequence[RunFolder],
    on_progress: Callable[[], None],
) -> None:
    """Start so many Ray tasks, and start again those whose process dies, until all have ended."""
    import ray

    running = [start() for _ in range(count)]
    while running:
        ended, running = ray.wait(running, timeout=1.0)
        on_progress()
        for task in ended:
            try:
                ray.get(task)
            except ray.exceptions.WorkerCrashedError:
                if _any_open(folders):
                    running.append(start())


def _check_answers(address: str) -> None:
    """Refuse an address where nobody answers, before Ray waits for a minute."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            pass
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"nobody answers at the Ray address {address!r} ({error}): give HOST:PORT of the head "
            "node, as `ray start --head` prints it"
        ) from error


def default_jobs(threads: int) -> int:
    """Return the number of GPUs; without a GPU, the number of runs that fit on the CPUs."""
    gpus = torch.cuda.device_count()
    if gpus:
        return gpus

    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    return max(1, cpus // threads)
