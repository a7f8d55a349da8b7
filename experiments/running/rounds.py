"""Working on runs in rounds, until none is left.

What came of a run is read from its directory, never from a worker's answer: workers may die, and
other launches may work on the same study.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments.config import Config, Runtime
from experiments.files import reason
from experiments.running.backends import RunAll, WorkersDied
from experiments.running.claims import Claim
from experiments.running.directories import Damaged, read_environment, read_epochs
from experiments.running.gpus import own_gpu
from experiments.running.outcomes import Outcome, look
from experiments.running.runs import Terms, Unwritable, execute, fail
from experiments.running.signals import Caught, Watch, caught, touch

DEATHS = 3  # of the worker of a run that is alone, without an epoch in between: it is given up
IDLE = 5  # rounds in a row in which workers died and no run went on: the launch is given up


@dataclass(frozen=True)
class Job:
    """One run for a worker.

    Args:
        label: condition and seed.
        config: what to do.
        runtime: how.
        directory: of the run, named by its hash.
        terms: claim and record.
        stop_file: of the launch.
        parent: process id of the launcher if the workers are its children, else None.
    """

    label: str
    config: Config
    runtime: Runtime
    directory: Path
    terms: Terms
    stop_file: Path
    parent: int | None


def work(job: Job) -> Outcome | str:
    """What a worker does with a job; the text of an error if the output can't be written."""
    with caught() as found:
        watch = Watch(found, job.stop_file, job.parent)
        with own_gpu(job.config, watch) as gpu:
            if watch():
                return Outcome("stopped")
            runtime = replace(job.runtime, gpu=gpu)
            try:
                return execute(job.config, runtime, job.directory, watch, job.terms)
            except Unwritable as error:
                touch(job.stop_file)  # the other workers end with what they could write
                return reason(error)


@dataclass
class Rounds:
    """Works on jobs in rounds: what is left of one goes into the next.

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
    _crowd: Counter[Path] = field(default_factory=Counter, init=False)  # deaths beside others
    _alone: Counter[Path] = field(default_factory=Counter, init=False)
    _idle: int = field(default=0, init=False)  # rounds in a row that brought workers' deaths alone

    def run(self, jobs: Sequence[Job]) -> list[str]:
        """Work until nothing is left; labels of those that other launches have.

        Raises:
            WorkersUseless: if workers die, again and again, before they begin a run.
        """
        left = {job.directory: job for job in jobs if not ended(job)}
        elsewhere: list[str] = []
        wait = 0.0
        while left and not self._asked(jobs):
            if self._idle >= IDLE:
                raise WorkersUseless(
                    f"workers died in {IDLE} rounds in a row, in which no run began or had another "
                    "epoch: are they short of memory, or can't they be started here?"
                )
            group = [replace(job, terms=replace(job.terms, wait=wait)) for job in self._next(left)]
            busy = self._round(group)
            for path in [path for path, job in left.items() if ended(job)]:
                del left[path]
            if not self.waits:
                elsewhere += [left.pop(path).label for path in busy if path in left]
            wait = _wait_seconds(group[0]) if len(busy) == len(group) else 0.0
        return elsewhere

    def _asked(self, jobs: Sequence[Job]) -> bool:
        if self.caught.number is None and jobs[0].stop_file.exists():
            self.caught.number = signal.SIGTERM  # the file was made by hand
        return self.caught.number is not None

    def _next(self, left: Mapping[Path, Job]) -> list[Job]:
        """All that are not suspect; then the suspects, each alone."""
        group = [job for path, job in left.items() if self._crowd[path] < 2]
        return group or list(left.values())[:1]

    def _round(self, group: Sequence[Job]) -> list[Path]:
        """Work on each job; the directories of those that other launches have."""
        before = {job.directory: _progress(job) for job in group}
        try:
            outcomes = self.run_all(work, group, self.at_once if len(group) > 1 else 1)
        except WorkersDied:
            for job in group:
                self._count_death(job, *before[job.directory], alone=len(group) == 1)
            moved = any(ended(job) or _progress(job) != before[job.directory] for job in group)
            self._idle = 0 if moved else self._idle + 1
            return []
        self._idle = 0
        for outcome in outcomes:
            if isinstance(outcome, str):
                raise Unwritable(outcome)
        return [
            job.directory
            for job, outcome in zip(group, outcomes, strict=True)
            if isinstance(outcome, Outcome) and outcome.status == "busy"
        ]

    def _count_death(self, job: Job, attempts: int, epochs: int, alone: bool) -> None:
        """Count it if the run was under way; give up a run whose worker dies again and again."""
        now, reached = _progress(job)
        if now == attempts or ended(job):
            return
        path = job.directory
        if reached > epochs:
            self._crowd[path] = self._alone[path] = 0
        (self._alone if alone else self._crowd)[path] += 1
        if self._alone[path] >= DEATHS:
            claim = Claim(path, job.terms.claim, job.terms.lease_seconds)
            if claim.acquire(job.terms.lease_seconds + 5, lambda: ended(job)):
                try:
                    fail(path, WorkerDied(f"{DEATHS} times, of memory or a crash, the run alone"))
                finally:
                    claim.release()


class WorkerDied(Exception):
    """The worker of a run was killed."""


class WorkersUseless(ValueError):
    """Workers die before they begin a run."""


def _wait_seconds(job: Job) -> float:
    return 1.5 * job.terms.lease_seconds if job.terms.claim == "lease" else 5.0


def _progress(job: Job) -> tuple[int, int]:
    """How often this launch began the run, and how many epochs it has."""
    attempts = read_environment(job.directory).get("attempts", [])
    mine = [attempt for attempt in attempts if attempt.get("launch") == job.terms.launch]
    try:
        return len(mine), len(read_epochs(job.directory))
    except (OSError, Damaged):
        return len(mine), 0


def ended(job: Job) -> bool:
    """Whether the run is finished, or failed in this launch or one beside it."""
    return look(job.directory).is_final(job.terms.failure)
