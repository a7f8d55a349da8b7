"""A launch: the runs of a study (or a shard of them) worked on until none is left.

What came of a run is read from its directory, never from a worker's answer: workers may die, and
other launches may work on the same study.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.backends import Backend, RunAll, WorkersDied, workers
from experiments.claims import LEASE_SECONDS, Claim, Kind, agree
from experiments.config import Config, Runtime
from experiments.directories import Damaged, read_environment, read_epochs, read_error, read_result
from experiments.progress import Shown, shown
from experiments.runs import Outcome, Terms, Unwritable, execute, fail
from experiments.signals import Caught, Watch, caught, touch
from experiments.study import Study

DEATHS = 3  # of a run's worker, without progress, until the run is given up


@dataclass(frozen=True)
class Job:
    """One run for a worker."""

    label: str
    config: Config
    runtime: Runtime
    directory: Path
    terms: Terms
    stop_file: Path
    launcher: tuple[str, int]
    child: bool


@dataclass(frozen=True)
class Ended:
    """How a launch ended.

    Args:
        failed: labels of the runs that failed.
        elsewhere: labels of the runs that other launches have; of a shard.
        signal: exit code of the signal that stopped it, if one did.
    """

    failed: list[str]
    elsewhere: list[str]
    exit_code: int | None


def work(job: Job) -> Outcome | str:
    """What a worker does with a job; the text of an error if the output can't be written."""
    with ExitStack() as stack:
        here = (socket.gethostname(), os.getpid())
        found = Caught() if here == job.launcher else stack.enter_context(caught())
        watch = Watch(found, job.stop_file, job.launcher[1] if job.child else None)
        if watch():
            return Outcome("stopped")
        try:
            return execute(job.config, job.runtime, job.directory, watch, job.terms)
        except Unwritable as error:
            touch(job.stop_file)  # the other workers end with what they could write
            return f"{error.filename}: {error.strerror}"


def launch(
    study: Study,
    directory: Path,
    runtime: Runtime = Runtime(),
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
        Unwritable: if the directory can't be written, or the disk is full.
    """
    kind = agree(directory, claim)
    name = secrets.token_hex(4)
    stop_file = directory / f"stop-{name}"
    threads = max(config.threads for config in study.conditions.values())
    with ExitStack() as stack:
        found = stack.enter_context(caught(stop_file))
        stack.callback(stop_file.unlink, missing_ok=True)
        run_all, fitting = stack.enter_context(workers(backend, address, threads))
        terms = Terms(claim=kind, launch=name)
        todo = [
            Job(
                label=f"{run.condition}, seed {run.config.seed}",
                config=_absolute(run.config),
                runtime=replace(runtime, data_dir=runtime.data_dir.absolute()),
                directory=directory.absolute() / run.hash,
                terms=replace(terms, failure=_failure(directory / run.hash)),
                stop_file=stop_file.absolute(),
                launcher=(socket.gethostname(), os.getpid()),
                child=backend == "loky",
            )
            for number, run in enumerate(study.runs())
            if shard is None or number % shard[1] == shard[0]
        ]
        rows = [Shown(j.label, j.directory, j.config.epochs, j.terms.failure) for j in todo]
        stack.enter_context(shown(rows))
        rounds = Rounds(run_all, jobs or fitting, found, waits=shard is None)
        elsewhere = rounds.run(todo)
        failed = [job.label for job in todo if _failure(job.directory) is not None]
    return Ended(failed, elsewhere, found.exit_code)


def _absolute(config: Config) -> Config:
    kind, _, path = config.data.partition(":")
    return replace(config, data=f"{kind}:{os.path.abspath(path)}") if path else config


def _failure(directory: Path) -> str | None:
    error = read_error(directory)
    return None if error is None else str(error.get("id"))


@dataclass
class Rounds:
    """Works on jobs in rounds: of each, what is left goes into the next.

    Args:
        run_all: works on jobs, so many at once.
        at_once: how many.
        caught: the launcher's signals.
        waits: whether to wait for runs that other launches have.
    """

    run_all: RunAll
    at_once: int
    caught: Caught
    waits: bool

    def run(self, jobs: Sequence[Job]) -> list[str]:
        """Work until nothing is left; labels of those that other launches have."""
        left = {job.directory: job for job in jobs if not _ended(job)}
        deaths: dict[Path, int] = {}
        elsewhere: list[str] = []
        wait = 0.0
        while left and self.caught.number is None:
            group = [
                replace(job, terms=replace(job.terms, wait=wait))
                for job in left.values()
                if deaths.get(job.directory, 0) < 2
            ]
            group = group or [next(iter(left.values()))]  # a suspect, alone
            before = {job.directory: _progress(job) for job in group}
            busy: list[Path] = []
            try:
                outcomes = self.run_all(work, group, self.at_once if len(group) > 1 else 1)
            except WorkersDied:
                self._bury(group, before, deaths)
            else:
                busy = self._busy(group, outcomes)
            for path in [path for path, job in left.items() if _ended(job)]:
                del left[path]
            if not self.waits:
                elsewhere += [left.pop(path).label for path in busy if path in left]
            wait = _patience(group) if len(busy) == len(group) else 0.0
        return elsewhere

    def _busy(self, group: Sequence[Job], outcomes: Sequence[Outcome | str]) -> list[Path]:
        for outcome in outcomes:
            if isinstance(outcome, str):
                raise Unwritable(outcome)
        return [
            job.directory
            for job, outcome in zip(group, outcomes, strict=True)
            if isinstance(outcome, Outcome) and outcome.status == "busy"
        ]

    def _bury(
        self,
        group: Sequence[Job],
        before: Mapping[Path, tuple[int, int]],
        deaths: dict[Path, int],
    ) -> None:
        """Count the deaths of the runs that were under way; give up one that dies again and again."""
        for job in group:
            attempts, epochs = before[job.directory]
            now, reached = _progress(job)
            if now == attempts or _ended(job):
                continue
            path = job.directory
            deaths[path] = 1 if reached > epochs else deaths.get(path, 0) + 1
            if len(group) == 1 and deaths[path] >= 2 + DEATHS:
                self._give_up(job)

    def _give_up(self, job: Job) -> None:
        claim = Claim(job.directory, job.terms.claim)
        if claim.acquire(LEASE_SECONDS + 5, lambda: _ended(job)):
            try:
                fail(job.directory, WorkerDied(f"{DEATHS} times while the run was alone"))
            finally:
                claim.release()


class WorkerDied(Exception):  # noqa: N818 - names what happened, as its message goes on
    """The worker of a run was killed, by a lack of memory or a crash."""


def _patience(group: Sequence[Job]) -> float:
    return 1.5 * LEASE_SECONDS if group[0].terms.claim == "lease" else 5.0


def _progress(job: Job) -> tuple[int, int]:
    """How often this launch began the run, and how many epochs it has."""
    attempts = read_environment(job.directory).get("attempts", [])
    mine = [attempt for attempt in attempts if attempt.get("launch") == job.terms.launch]
    try:
        return len(mine), len(read_epochs(job.directory))
    except (OSError, Damaged):
        return len(mine), 0


def _ended(job: Job) -> bool:
    """Whether the run is finished, or failed in this launch or one beside it."""
    try:
        if read_result(job.directory) is not None:
            return True
    except Damaged:
        return False
    failure = _failure(job.directory)
    return failure is not None and failure != job.terms.failure


def parse_shard(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """The shard `i/n`, or with `auto` that of this task of a SLURM job array.

    Example:
        >>> parse_shard("0/4")
        (0, 4)
        >>> slurm = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "1"}
        >>> parse_shard("auto", {**slurm, "SLURM_ARRAY_TASK_COUNT": "4"})
        (2, 4)

    Raises:
        ValueError: if it is none, or out of range.
    """
    if text == "auto":
        names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "COUNT")]
        missing = [name for name in names if not environment.get(name, "").isdigit()]
        if missing:
            raise ValueError(
                f"shard auto reads {', '.join(names)}, of which {', '.join(missing)} "
                "must be numbers: is this a SLURM job array?"
            )
        task, first, count = (int(environment[name]) for name in names)
        number = task - first
    else:
        index, slash, total = text.partition("/")
        if not (slash and index.isdigit() and total.isdigit()):
            raise ValueError(f"shard must be i/n or auto, got {text!r}")
        number, count = int(index), int(total)
    if not 0 <= number < count:
        raise ValueError(f"shard must be i/n with 0 <= i < n, got {number}/{count}")
    return number, count
