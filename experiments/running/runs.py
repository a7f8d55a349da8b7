"""One run in its directory: claimed, trained, recorded.

Two processes never work on one run at once, a run that was finished is not run again, and one
that was killed goes on from its checkpoint.
"""

from __future__ import annotations

import errno
import secrets
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.checkpoint import AnotherRun, CheckpointDamaged
from experiments.config import Config, Runtime, resolve, run_hash
from experiments.datasets.sources import fingerprint
from experiments.running.claims import LEASE_SECONDS, Claim, ClaimLost, Kind
from experiments.running.directories import (
    Damaged,
    OtherRun,
    begin,
    examine,
    make_directory,
    seal,
    set_aside,
    take_over,
    write_json,
)
from experiments.running.environment import environment, now
from experiments.running.outcomes import Outcome, look
from experiments.train import Stopped, train

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


class Unwritable(OSError):
    """The output can't be written: no run can go on."""


@dataclass(frozen=True)
class Terms:
    """How a launch goes about a run.

    Args:
        claim: lock or lease.
        wait: seconds to wait for a run that another process has.
        lease_seconds: after which a lease that nobody touched is taken over.
        launch: name of the launch, for the record.
        failure: the failure (its `id`) that is to be tried again; another one, of a launch
            beside this, counts. None: any failure is tried again.
        studies: folder of studies, of which another may have finished this very run: it is
            copied from there. None: it is run.
    """

    claim: Kind = "lock"
    wait: float = 0.0
    lease_seconds: float = LEASE_SECONDS
    launch: str | None = None
    failure: str | None = None
    studies: Path | None = None


def execute(
    config: Config,
    runtime: Runtime,
    directory: Path,
    stop: Callable[[], bool] | None = None,
    terms: Terms | None = None,
) -> Outcome:
    """Train in a run's directory, unless it is finished; go on from its checkpoint.

    Args:
        config: what to do.
        runtime: how.
        directory: of this run alone; made if need be. What was damaged there is set aside.
        stop: asked between batches; True writes a checkpoint and ends the run as stopped.
        terms: claim and record.

    Raises:
        Unwritable: if the directory can't be written, or the disk is full.
        ValueError: if the directory, not being named by its hash, holds another run.
    """
    config, terms = resolve(config), terms or Terms()
    mark = fingerprint(config, runtime.data_dir)
    job = _Job(config, runtime, directory, terms, mark, run_hash(config, mark))
    asked = stop or (lambda: False)
    try:
        make_directory(directory)
        claim = Claim(directory, terms.claim, terms.lease_seconds)
        if (outcome := job.settled()) is not None:
            return outcome
        if not claim.acquire(terms.wait, lambda: asked() or job.settled() is not None):
            return job.settled() or Outcome("busy")
        try:  # it may have been settled while the claim was waited for
            return job.settled() or job.attempt(_Stop(asked, claim))
        except ClaimLost:
            return Outcome("busy")
        finally:
            claim.release()
    except OSError as error:
        raise Unwritable(error.errno, error.strerror or str(error), str(directory)) from error


@dataclass(frozen=True)
class _Stop:
    """Asked between batches: whether to stop; raises ClaimLost if there is nothing to write."""

    asked: Callable[[], bool]
    claim: Claim

    def __call__(self) -> bool:
        asked = self.asked()
        self.claim.check()  # last: what is written next is written at once
        return asked


@dataclass(frozen=True)
class _Job:
    """A run, the fingerprint of its data, and its hash."""

    config: Config
    runtime: Runtime
    directory: Path
    terms: Terms
    fingerprint: str
    hash: str

    def settled(self) -> Outcome | None:
        """What is known without a claim: finished, or failed in a launch beside this one."""
        found = look(self.directory, self.hash)
        counts = found.result is not None or self.terms.launch is not None
        return found if counts and found.is_final(self.terms.failure) else None

    def attempt(self, stop: _Stop) -> Outcome:
        """Train it, or go on with it; the claim must be held."""
        directory = self.directory
        try:
            examine(directory, self.hash, self.fingerprint)
        except Damaged as damage:
            if isinstance(damage, OtherRun) and directory.name != self.hash:
                raise ValueError(f"{directory}: {damage}; take another directory") from damage
            set_aside(directory, str(damage))
        if stop.asked():
            return Outcome("stopped")
        if (outcome := self.taken_over()) is not None:
            return outcome
        begin(directory, self.config, environment(self.terms.launch))
        try:
            result = train(self.config, self.runtime, directory, stop=stop)
        except Stopped:
            return Outcome("stopped")
        except ClaimLost:
            raise
        except (CheckpointDamaged, AnotherRun) as damage:
            stop.claim.check()
            set_aside(directory, str(damage))
            return self.attempt(stop)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _NO_SPACE:
                raise
            stop.claim.check()
            return fail(directory, error)
        stop.claim.check()
        seal(directory, self.hash, result)
        return Outcome(result.status, result)

    def taken_over(self) -> Outcome | None:
        """The run as another study has finished it, copied; None if none has, or it was damaged."""
        studies = self.terms.studies
        for other in [] if studies is None else sorted(studies.glob(f"*/{self.hash}")):
            if other != self.directory and look(other, self.hash).result is not None:
                take_over(other, self.directory)
                found = look(self.directory, self.hash)
                if found.result is not None:
                    return found
                set_aside(self.directory, f"it was changed while it was copied from {other}")
        return None


def fail(directory: Path, error: Exception) -> Outcome:
    """Record that the run failed, and of what; the claim must be held."""
    record = {
        "id": secrets.token_hex(8),
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "when": now(),
    }
    write_json(directory / "error.json", record)
    return look(directory)
