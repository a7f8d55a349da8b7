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
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from experiments.runs import RunFolder
from experiments.train import train

WAIT = 1.0  # seconds between two looks at runs that others work on
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
        folders: of the runs, in order.
        workers: processes that load items.
        tests: whether the tests are scored.
        leave: asked between runs and epochs; true ends the worker.
    """
    while not leave():
        left = [folder for folder in folders if folder.status == "open"]
        if not left:
            return
        if not any(_attempt(folder, workers, tests, leave) for folder in left):
            time.sleep(WAIT)  # others work on all that is left


def _attempt(folder: RunFolder, workers: int, tests: bool, leave: Callable[[], bool]) -> bool:
    """Train a run, if nobody else works on it and it is still open."""
    if leave():
        return True
    with folder.claim() as mine:
        if not mine or folder.status != "open" or not folder.begin():
            return mine

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
        return True


def launch(
    folders: Sequence[RunFolder], jobs: int, told: Callable[[], None], **options: Any
) -> None:
    """Start workers on this machine, and start again those that die, until all runs are settled.

    Args:
        folders: of the runs.
        jobs: how many workers.
        told: called now and then, to show the progress.
        options: of `work`.

    Raises:
        LaunchError: if workers die before they begin a run.
    """
    context = multiprocessing.get_context("spawn")
    started: list[SpawnProcess] = []
    begun = useless = 0
    try:
        while any(folder.status == "open" for folder in folders):
            told()
            died = [one for one in started if one.exitcode not in (None, 0)]
            if any(one.exitcode == UNWRITABLE for one in died):
                raise LaunchError(f"no run can be written to {folders[0].path.parent}: see above")
            if died:
                before, begun = begun, sum(len(folder.attempts()) for folder in folders)
                useless = 0 if begun > before else useless + len(died)
            if useless >= IDLE * jobs:
                raise LaunchError("workers die before they begin a run: read their output above")
            started = [one for one in started if one.exitcode is None]
            while len(started) < jobs:
                one = context.Process(target=_worker, args=(folders, len(started), options))
                one.start()
                started.append(one)
            time.sleep(0.2)
    finally:
        for one in started:
            one.terminate()
        for one in started:
            one.join()
    told()


def _worker(folders: Sequence[RunFolder], slot: int, options: dict[str, Any]) -> None:
    """Work in a process of its own, until the launcher is gone."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends its workers
    if (count := torch.cuda.device_count()) > 1:  # each worker sees one GPU
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = shown.split(",")[slot % count]
    try:
        work(folders, leave=lambda: os.getppid() != launcher.pid, **options)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(UNWRITABLE)


def launch_on_ray(
    folders: Sequence[RunFolder],
    address: str,
    jobs: int | None,
    imports: Path,
    told: Callable[[], None],
    **options: Any,
) -> None:
    """Work on the runs in Ray tasks. The folder of the runs must be on a disk that all nodes share.

    Ray reads the token of a cluster from RAY_AUTH_TOKEN or from ~/.ray/auth_token.

    Args:
        folders: of the runs.
        address: HOST:PORT of a cluster, or "local" to start one on this machine.
        jobs: tasks at once; None takes one for each CPU that a run needs.
        imports: folder of the study, which holds its factories.
        told: called now and then, to show the progress.
        options: of `work`.

    Raises:
        LaunchError: if nobody answers at the address, or tasks end and runs are still open.
    """
    import ray

    if address != "local":
        _check_answers(address)
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join([root, str(imports), os.environ.get("PYTHONPATH", "")])
    environment = {"env_vars": {"PYTHONPATH": paths}}
    where = {} if address == "local" else {"address": address}
    try:
        ray.init(**where, runtime_env=environment, log_to_driver=False, include_dashboard=False)
    except Exception as error:  # Ray has many kinds
        hint = "a cluster with tokens needs RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN"
        raise LaunchError(f"Ray at {address}: {error} ({hint})") from error
    try:
        threads, gpus = folders[0].run.threads, ray.cluster_resources().get("GPU", 0)
        count = jobs or max(1, int(ray.cluster_resources().get("CPU", 1) // threads))
        task = ray.remote(num_cpus=threads, num_gpus=1 if gpus else 0, max_retries=3)(work)
        left = [task.remote(list(folders), **options) for _ in range(min(count, len(folders)))]
        while left:
            done, left = ray.wait(left, timeout=1.0)
            told()
            for one in done:
                try:
                    ray.get(one)
                except ray.exceptions.WorkerCrashedError:
                    if any(folder.status == "open" for folder in folders):
                        left.append(task.remote(list(folders), **options))
    except ray.exceptions.RayError as error:
        raise LaunchError(f"Ray at {address}: {error}") from error
    finally:
        ray.shutdown()
    told()
    if any(folder.status == "open" for folder in folders):
        raise LaunchError(
            f"all Ray tasks ended, and runs are still open: is {folders[0].path.parent} on a disk "
            "that all nodes share?"
        )


def _check_answers(address: str) -> None:
    """Refuse an address where nobody answers, before Ray waits for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            pass
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"nobody answers at the Ray address {address!r} ({error}): give HOST:PORT of the head "
            "node, as `ray start --head` prints it"
        ) from error


def default_jobs(threads: int) -> int:
    """One worker for each GPU; without a GPU, one for each CPU that a run needs."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return torch.cuda.device_count() or max(1, cpus // threads)
