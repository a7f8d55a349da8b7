"""Where runs are worked on: in this process, in processes of this host, on a Ray cluster.

All three through joblib, one run at a time to each worker, so that the results are the same.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import joblib
import torch
from joblib.externals.loky.process_executor import TerminatedWorkerError

from experiments.running.environment import COMMIT, commit
from experiments.running.signals import serve

Backend = Literal["loky", "sequential", "ray"]
Work = Callable[[Any], Any]
SECONDS = 5.0  # for a cluster to answer
TOKEN_HINT = (
    "if it asks for a token, it must be here too: ~/.ray/auth_token of its head, or RAY_AUTH_TOKEN"
)
RunAll = Callable[[Work, Sequence[Any], int], list[Any]]


class WorkersDied(Exception):
    """A worker was killed, and with it, whatever ran beside it."""


class Unreachable(ValueError):
    """No cluster answers at the address."""


@contextmanager
def workers(
    backend: Backend, address: str | None, threads: int, gpu: bool = False
) -> Iterator[tuple[RunAll, int]]:
    """A function that works on jobs with so many at once, and how many suit the machine.

    Args:
        backend: loky, sequential or ray.
        address: of a Ray cluster: HOST:PORT, ray://HOST:PORT, or auto for that of this host;
            None starts one on this host.
        threads: of one run.
        gpu: whether each run has a GPU for itself.

    Raises:
        ValueError: if there is no such cluster.
    """
    if address is not None and backend != "ray":
        raise ValueError(f"address is for the backend ray, not {backend}")
    if backend == "sequential":
        yield (lambda work, jobs, at_once: [work(job) for job in jobs]), 1
    elif backend == "loky":
        fitting = joblib.cpu_count() // threads
        yield _loky, max(1, min(fitting, torch.cuda.device_count()) if gpu else fitting)
    else:
        with _cluster(address) as resources:
            fitting = int(resources.get("CPU", 1)) // threads
            yield (
                (lambda work, jobs, at_once: _ray(work, jobs, at_once, threads, gpu)),
                max(1, min(fitting, int(resources.get("GPU", 0))) if gpu else fitting),
            )


def _loky(work: Work, jobs: Sequence[Any], at_once: int) -> list[Any]:
    # joblib runs with one job in this process, where a crash would take the launcher along:
    # a pool of two, of which one works
    parallel = joblib.Parallel(
        n_jobs=max(2, at_once),
        backend="loky",
        batch_size=1,
        pre_dispatch=at_once,
        initializer=serve,
        initargs=(os.getpid(),),
    )
    try:
        return list(parallel(joblib.delayed(work)(job) for job in jobs))
    except TerminatedWorkerError as error:
        raise WorkersDied from error


def _ray(work: Work, jobs: Sequence[Any], at_once: int, threads: int, gpu: bool) -> list[Any]:
    import ray

    # a pool of two for one job, as for loky; then the idle one must not wait for a core
    needs = {"num_cpus": threads if at_once > 1 else 0}
    if gpu:  # Ray shows each worker its own GPUs alone
        needs["num_gpus"] = 1 if at_once > 1 else 0.5
    with joblib.parallel_config(backend="ray", ray_remote_args=needs):
        parallel = joblib.Parallel(n_jobs=max(2, at_once), batch_size=1, pre_dispatch=at_once)
        try:
            return list(parallel(joblib.delayed(work)(job) for job in jobs))
        except ray.exceptions.RayError as error:
            raise WorkersDied from error


@contextmanager
def _cluster(address: str | None) -> Iterator[dict[str, float]]:
    """Connect to a cluster whose workers get this code; the resources that it has."""
    if address not in (None, "auto"):
        _answers(str(address))
        _use_token()
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError as error:
        raise ValueError("the backend ray needs the package ray: pip install 'ray'") from error
    root = Path(__file__).resolve().parents[2]
    carried = {
        "py_modules": [str(root / "dropblock_hooks"), str(root / "experiments")],
        "excludes": ["results", "__pycache__"],
        "env_vars": {
            COMMIT: json.dumps(commit()),
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "3000"),
        },
    }
    try:
        ray.init(
            address=address or "local",
            runtime_env=carried,
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            logging_level="warning",
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        hint = "" if address is None else f"; {TOKEN_HINT}"
        text = f"no Ray cluster answers at {address or 'local'}: {error}{hint}"
        raise Unreachable(text) from error
    register_ray()
    # of joblib's arguments, it says with each pool that it has no use for one
    logging.getLogger("ray.util.multiprocessing.pool").setLevel(logging.ERROR)
    try:
        yield ray.cluster_resources()
    finally:
        ray.shutdown()


def _use_token() -> None:
    """Have Ray show a token that this host has: to an address it does not by itself.

    The workers of a cluster that asks for none can't be started so: RAY_AUTH_MODE=disabled leaves
    the token out. Ray reads this when it is imported.
    """
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if os.environ.get("RAY_AUTH_TOKEN") or file.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _answers(address: str) -> None:
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"address must be HOST:PORT, ray://HOST:PORT or auto, got {address!r}")
    try:
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "1" and not _speaks_grpc(connection):
                raise OSError("what listens there is not Ray")
    except (OSError, OverflowError) as error:
        raise Unreachable(f"no Ray cluster answers at {address}: {error}") from error


def _speaks_grpc(connection: socket.socket) -> bool:
    """Whether a server of HTTP/2, which all of Ray's are, is at the other end: ray.init would wait.

    It answers the preface and empty settings with settings of its own, a frame of type 4.
    """
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    header = connection.recv(9, socket.MSG_WAITALL)
    return len(header) == 9 and header[3] == 4
