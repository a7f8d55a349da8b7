"""A launch: the runs of a study, or a shard of them, worked on until none is left."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.config import Config, Runtime
from experiments.files import among_writers
from experiments.running.backends import Backend, workers
from experiments.running.claims import Kind, agree
from experiments.running.directories import write_json
from experiments.running.outcomes import look
from experiments.running.progress import Shown, shown
from experiments.running.rounds import Job, Rounds
from experiments.running.runs import Terms
from experiments.running.signals import caught
from experiments.study import Study


@dataclass(frozen=True)
class Ended:
    """How a launch ended.

    Args:
        failed: labels of the runs that failed.
        elsewhere: labels of the runs that other launches have; of a shard.
        exit_code: exit code of the signal that stopped it, if one did.
    """

    failed: list[str]
    elsewhere: list[str]
    exit_code: int | None


def begin_study(study: Study, directory: Path, command: str) -> None:
    """Make a study's directory, and write what is run there.

    Args:
        study: what is to be run.
        directory: of the study; made if need be.
        command: that runs it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with among_writers(directory, ".study.json.*.part"):
        write_json(directory / "study.json", study.record(command))


def launch(
    study: Study,
    directory: Path,
    runtime: Runtime | None = None,
    *,
    backend: Backend = "loky",
    address: str | None = None,
    jobs: int | None = None,
    shard: tuple[int, int] | None = None,
    claim: Kind | None = None,
) -> Ended:
    """Work on a study's runs.

    Args:
        study: what to run.
        directory: of the study; exists.
        runtime: how.
        backend: loky, sequential or ray.
        address: of a Ray cluster.
        jobs: runs at once; None for as many as the cores allow.
        shard: (i, n): only every n-th run, from the i-th.
        claim: lock or lease; None for what the directory uses, or can use.

    Raises:
        ValueError: for a cluster that does not answer, or another kind of claim.
        WorkersUseless: if workers die, again and again, before they begin a run.
        Unwritable: if the directory can't be written, or the disk is full.
    """
    runtime, directory = runtime or Runtime(), directory.absolute()
    name = secrets.token_hex(4)
    stop_file = directory / f"stop-{name}"
    plan = Job(
        label="",
        config=Config(),
        runtime=replace(runtime, data_dir=runtime.data_dir.absolute()),
        directory=directory,
        terms=Terms(agree(directory, claim), launch=name, studies=directory.parent),
        stop_file=stop_file,
        parent=os.getpid() if backend == "loky" else None,
    )
    todo = _jobs(study, plan, shard)
    if not todo and shard is not None:
        number, count = shard
        runs = len(study.runs())
        print(f"shard {number}/{count} has no runs: the study has {runs}", file=sys.stderr)
        return Ended([], [], None)
    threads = max(job.config.threads for job in todo)
    gpu = any(job.config.accelerator == "cuda" for job in todo)
    with ExitStack() as stack:
        found = stack.enter_context(caught(stop_file))
        stack.callback(_remove, stop_file)
        run_all, fitting = stack.enter_context(workers(backend, address, threads, gpu))
        rows = [Shown(j.label, j.directory, j.config.epochs, j.terms.failure) for j in todo]
        stack.enter_context(shown(rows))
        rounds = Rounds(run_all, jobs or fitting, found, waits=shard is None)
        elsewhere = rounds.run(todo)
    failed = [job.label for job in todo if look(job.directory).status == "failed"]
    return Ended(failed, elsewhere, found.exit_code)


def _jobs(study: Study, like: Job, shard: tuple[int, int] | None) -> list[Job]:
    jobs = []
    for number, run in enumerate(study.runs()):
        if shard is None or number % shard[1] == shard[0]:
            directory = like.directory / run.hash
            jobs.append(
                replace(
                    like,
                    label=f"{run.condition}, seed {run.config.seed}",
                    config=_absolute(run.config),
                    directory=directory,
                    terms=replace(like.terms, failure=look(directory).failure),
                )
            )
    return jobs


def _remove(path: Path) -> None:
    with suppress(OSError):  # its name stops no other launch
        path.unlink()


def _absolute(config: Config) -> Config:
    kind, _, path = config.data.partition(":")
    return replace(config, data=f"{kind}:{os.path.abspath(path)}") if path else config
