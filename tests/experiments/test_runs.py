"""A run in its directory: finished for good, or resumed; damage set aside; claims exclusive."""

import errno
import json
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from experiments.config import Runtime, make_config, resolve, run_hash
from experiments.running import claims, directories, runs
from experiments.running import environment as environments
from experiments.running.claims import Claim, ClaimLost, agree
from experiments.running.directories import Damaged, read_result
from experiments.running.outcomes import Outcome, look
from experiments.running.runs import Terms, Unwritable, execute
from tests.experiments.launches import DROP, OFTEN, ONE, kill, timeless, until, wait

OTHER = replace(ONE, seed=3)


@pytest.fixture
def home(tmp_path):
    return tmp_path / run_hash(resolve(ONE), "fake")


@pytest.fixture
def trained(monkeypatch):
    """How often a training was begun."""
    calls = []

    def count(*args, **kwargs):
        calls.append(args)
        return train(*args, **kwargs)

    train = runs.train
    monkeypatch.setattr(runs, "train", count)
    return calls


def run(home: Path, config=ONE, **terms) -> Outcome:
    return execute(config, Runtime(), home, terms=Terms(**terms))


def test_a_run_leaves_what_it_did_and_is_not_run_again(home, trained):
    outcome = run(home, launch="first")
    assert outcome.status == "finished"
    assert sorted(path.name for path in home.iterdir()) == [
        "checkpoint.pt",
        "config.yaml",
        "done.json",
        "environment.json",
        "lock",
        "metrics.jsonl",
        "result.json",
    ]
    assert make_config(yaml.safe_load((home / "config.yaml").read_text())) == resolve(ONE)
    environment = json.loads((home / "environment.json").read_text())
    assert {"versions", "commit", "dirty", "host", "platform", "started"} < set(environment)
    assert [attempt["launch"] for attempt in environment["attempts"]] == ["first"]
    assert run(home) == outcome
    assert len(trained) == 1


DAMAGES = {
    "result changed": lambda home: (home / "result.json").write_text("{}"),
    "metrics changed": lambda home: append(home / "metrics.jsonl", "\n"),
    "metrics missing": lambda home: (home / "metrics.jsonl").unlink(),
    "config missing": lambda home: (home / "config.yaml").unlink(),
    "config changed": lambda home: append(home / "config.yaml", "lr: 3\n"),
    "done cut": lambda home: (home / "done.json").write_text('{"run"'),
    "done of another form": lambda home: (home / "done.json").write_text("[3]"),
    "done a directory": lambda home: ((home / "done.json").unlink(), (home / "done.json").mkdir()),
    "no directory": lambda home: (shutil.rmtree(home), home.write_text("a file")),
    "another's, finished": lambda home: put_another(home),
    "another's, not finished": lambda home: (put_another(home), (home / "done.json").unlink()),
    "checkpoint cut": lambda home: (unfinish(home), cut(home / "checkpoint.pt")),
    "checkpoint, a bit": lambda home: (unfinish(home), flip(home / "checkpoint.pt")),
    "environment changed": lambda home: append(home / "environment.json", "\n"),
    "checkpoint of another": lambda home: (
        unfinish(home),
        shutil.copy(home.with_name("elsewhere") / "checkpoint.pt", home),
    ),
    "unfinished, config changed": lambda home: (
        unfinish(home),
        (home / "config.yaml").write_text("epochs: 9"),
    ),
    "unfinished, environment a directory": lambda home: (
        unfinish(home),
        (home / "environment.json").unlink(),
        (home / "environment.json").mkdir(),
    ),
    "unfinished, error a directory": lambda home: (
        unfinish(home),
        (home / "error.json").mkdir(),
    ),
    "unfinished, draft a directory": lambda home: (
        unfinish(home),
        (home / ".x.part").mkdir(),
    ),
    "unfinished, config no YAML": lambda home: (
        unfinish(home),
        (home / "config.yaml").write_text("["),
    ),
}
PLAIN = (
    "result changed", "no directory", "another's, finished", "checkpoint, a bit",
    "unfinished, config changed",
)  # fmt: skip


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def unfinish(home: Path) -> None:
    (home / "done.json").unlink()
    (home / "result.json").unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def put_another(home: Path) -> None:
    shutil.rmtree(home)
    home.with_name("elsewhere").rename(home)


@pytest.mark.parametrize(
    "damage", [pytest.param(d, marks=() if d in PLAIN else pytest.mark.slow) for d in DAMAGES]
)
def test_a_damaged_directory_is_set_aside_and_run_again(home, finished, trained, damage):
    before = timeless(finished(home).result)
    finished(home.with_name("elsewhere"), OTHER)
    DAMAGES[damage](home)
    trained.clear()
    outcome = run(home)
    assert outcome.status == "finished"
    assert timeless(outcome.result) == before
    [aside] = home.parent.glob(f"{home.name}.damaged-*")
    assert (aside / "damage.txt").read_text().strip()
    assert len(trained) == (2 if damage.startswith("checkpoint") else 1)
    assert look(home).status == "finished"
    run(home)
    assert len(list(home.parent.glob("*.damaged-*"))) == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"attempts": ["a"]}',
        "{",
        pytest.param('{"attempts": 5}', marks=pytest.mark.slow),
        pytest.param("[5]", marks=pytest.mark.slow),
    ],
)
def test_a_record_of_attempts_that_is_none_is_healed(home, finished, text):
    finished(home)
    unfinish(home)
    (home / "environment.json").write_text(text)
    assert run(home, launch="next").status == "finished"
    environment = json.loads((home / "environment.json").read_text())
    assert [attempt["launch"] for attempt in environment["attempts"]] == ["next"]
    assert not list(home.parent.glob("*.damaged-*"))


def test_each_attempt_has_its_versions(home, monkeypatch):
    asked = iter([False, False, True])
    assert execute(ONE, Runtime(), home, lambda: next(asked)).status == "stopped"
    known = environments._versions()
    monkeypatch.setattr(environments, "_versions", lambda: {**known, "torch": "9.9"})
    monkeypatch.setattr(environments, "commit", lambda: {"commit": "abc", "dirty": True})
    assert run(home).status == "finished"
    recorded = directories.read_environment(home)
    first, second = directories.environments(recorded)
    assert first["versions"] == known
    assert (second["versions"]["torch"], second["commit"]) == ("9.9", "abc")
    assert first["commit"] != "abc"
    assert recorded["versions"]["torch"] == "9.9"
    made = ["started", "host", "pid", "launch", "versions", "commit", "dirty", "platform"]
    assert [attempt.keys() >= set(made) for attempt in recorded["attempts"]] == [True, True]


def test_a_kill_right_after_done_leaves_no_failure(home, finished, monkeypatch):
    """Of a run that failed once, and was finished by another launch."""
    finished(home)
    unfinish(home)
    (home / "error.json").write_text('{"id": "1", "type": "T", "message": "m"}')
    real = os.replace

    def replace_and_die(source, target):
        real(source, target)
        if Path(target).name == "done.json":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_and_die)
        with pytest.raises(KeyboardInterrupt):
            run(home)
    assert look(home).status == "finished"
    assert not (home / "error.json").exists()


def test_an_own_directory_with_another_run_is_refused(tmp_path, finished):
    finished(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"mine: .* another run; take another directory"):
        run(tmp_path / "mine", OTHER)
    assert not list(tmp_path.glob("*.damaged-*"))


def test_a_kill_between_result_and_done_is_no_damage(home, finished):
    before = finished(home).result
    (home / "done.json").unlink()
    (home / ".done.json.123.part").write_text("{")
    after = run(home).result
    assert timeless(after) == timeless(before)
    assert not list(home.parent.glob("*.damaged-*"))
    assert not list(home.glob("*.part"))


def test_a_set_aside_that_was_killed_is_taken_up(home, finished):
    finished(home)
    (home / "config.yaml").unlink()  # the first to be moved
    (home / "done.json").unlink()
    assert run(home).status == "finished"
    assert len(list(home.parent.glob("*.damaged-*"))) == 1


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("config.yaml", marks=pytest.mark.slow),
        "environment.json",
        pytest.param("result.json", marks=pytest.mark.slow),
        "done.json",
    ],
)
def test_a_full_disk_leaves_nothing_half_written(home, monkeypatch, name):
    real = os.replace

    def replace_unless_full(source, target):
        return full() if Path(target).name == name else real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_unless_full)
        with pytest.raises(Unwritable, match="No space left on device"):
            run(home)
    assert not (home / name).exists()
    assert not list(home.glob(".*part"))
    assert not (home / "error.json").exists()
    assert look(home).status == "missing"
    assert run(home).status == "finished"


def test_a_full_disk_during_training_is_no_failure_of_the_run(home, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(runs, "train", full)
        with pytest.raises(Unwritable, match="No space left on device"):
            run(home)
    assert look(home).status == "missing"


def test_an_unwritable_directory_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Unwritable, match="Not a directory"):
        run(tmp_path / "file" / "run")


def test_a_failure_is_recorded_and_tried_again_by_the_next_launch(home, monkeypatch, trained):
    def broken(*_, **__):
        raise RuntimeError("out of cheese")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "train", broken)
        outcome = run(home, launch="a")
    assert (outcome.status, outcome.error) == ("failed", "RuntimeError: out of cheese")
    error = json.loads((home / "error.json").read_text())
    assert "in broken" in error["traceback"]
    assert look(home) == Outcome("failed", None, outcome.error, error["id"])
    assert run(home, launch="b").status == "failed"  # one that began before it failed
    assert not trained
    assert run(home, launch="c", failure=error["id"]).status == "finished"
    assert look(home).status == "finished"
    assert not (home / "error.json").exists()


def test_a_diverged_run_is_finished_for_good(tmp_path, trained):
    config = replace(ONE, lr=1e30, epochs=2)
    home = tmp_path / run_hash(resolve(config), "fake")
    outcome = run(home, config)
    assert (outcome.status, outcome.result.scores) == ("diverged", {})
    assert run(home, config) == outcome
    assert look(home).status == "diverged"
    assert len(trained) == 1


def other_studys(home: Path) -> Path:
    """The folder of the same run in another study beside."""
    other = home.parent.parent / "another" / home.name
    other.parent.mkdir(parents=True, exist_ok=True)
    return other


@pytest.fixture
def beside(tmp_path):
    """A run's folder in a study's, which has others beside it."""
    return tmp_path / "studies" / "study" / run_hash(resolve(ONE), "fake")


def test_what_another_study_has_finished_is_copied(beside, finished, trained):
    theirs = other_studys(beside)
    outcome = finished(theirs)
    assert run(beside, studies=beside.parent.parent) == outcome
    assert trained == []
    for name in ("config.yaml", "metrics.jsonl", "result.json", "environment.json", "done.json"):
        assert (beside / name).read_bytes() == (theirs / name).read_bytes()
    assert look(beside) == outcome


def test_a_run_of_no_other_study_is_not_looked_for(beside, finished, trained):
    finished(other_studys(beside))
    assert run(beside).status == "finished"
    assert len(trained) == 1


def test_what_is_damaged_in_another_study_is_not_copied(beside, finished, trained):
    theirs = other_studys(beside)
    finished(theirs)
    (theirs / "metrics.jsonl").write_text("{}")
    assert run(beside, studies=beside.parent.parent).status == "finished"
    assert len(trained) == 1


def test_what_is_changed_while_it_is_copied_is_set_aside(beside, finished, trained, monkeypatch):
    theirs = other_studys(beside)
    finished(theirs)

    def change(source, target):
        take_over(source, target)
        (target / "result.json").write_text("{}")

    take_over = runs.take_over
    monkeypatch.setattr(runs, "take_over", change)
    assert run(beside, studies=beside.parent.parent).status == "finished"
    assert len(trained) == 1
    (note,) = beside.parent.glob("*/damage.txt")
    assert note.read_text() == f"it was changed while it was copied from {theirs}\n"


def test_a_copy_that_was_killed_goes_on(beside, finished, trained, monkeypatch):
    theirs = other_studys(beside)
    outcome = finished(theirs)
    copied = []

    def killed(path, write):
        copied.append(path.name)
        if path.name == "done.json":
            raise KeyboardInterrupt
        write_atomically(path, write)

    write_atomically = directories.write_atomically
    with monkeypatch.context() as patch:
        patch.setattr(directories, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            run(beside, studies=beside.parent.parent)
    assert copied[-1] == "done.json"
    assert run(beside, studies=beside.parent.parent) == outcome
    assert trained == []


def test_a_stopped_run_goes_on_where_it_was(home, finished):
    whole = finished(home.parent / "whole").result
    asked = iter([False, False, True])
    assert execute(ONE, Runtime(), home, lambda: next(asked)).status == "stopped"
    assert look(home).status == "missing"
    outcome = run(home)
    assert timeless(outcome.result) == timeless(whole)


def test_lines_that_are_not_the_results_are_put_right(home, monkeypatch):
    def train_beside_another(config, runtime, out, stop):
        result = train(config, runtime, out, stop=stop)
        with (out / "metrics.jsonl").open("a") as file:  # as a holder that lost its claim may
            file.write("{}\n")
        return result

    train = runs.train
    monkeypatch.setattr(runs, "train", train_beside_another)
    result = run(home).result
    assert read_result(home, home.name) == result


@pytest.mark.parametrize("kind", ["lock", "lease"])
def test_a_claim_is_one_processs_and_free_when_it_is_killed(tmp_path, kind):
    (tmp_path / "told").touch()
    if (pid := os.fork()) == 0:
        claim = Claim(tmp_path, kind)
        claim.acquire()
        (tmp_path / "told").unlink()
        time.sleep(60)
        os._exit(0)
    try:
        until(lambda: not (tmp_path / "told").exists())
        mine = Claim(tmp_path, kind)
        assert not mine.acquire()
    finally:
        kill(pid)
    assert mine.acquire(2.0)
    mine.check()
    mine.release()


def test_a_busy_run_is_left_to_who_has_it(home, trained):
    home.mkdir()
    other = Claim(home)
    assert other.acquire()
    assert run(home).status == "busy"
    assert not trained
    other.release()
    assert run(home, wait=5.0).status == "finished"


def test_a_run_that_another_finishes_meanwhile_is_not_waited_for_any_longer(
    home, finished, tmp_path
):
    finished(tmp_path / "whole")
    home.mkdir()
    other = Claim(home)
    other.acquire()

    def finish():
        for path in (tmp_path / "whole").iterdir():
            if path.name not in ("lock", "done.json"):
                shutil.copy(path, home)
        shutil.copy(tmp_path / "whole" / "done.json", home)

    timer = threading.Timer(0.3, finish)
    timer.start()
    assert run(home, wait=60.0).status == "finished"
    timer.join()
    other.release()


@pytest.mark.slow
def test_a_stale_lease_is_taken_over_and_its_former_holder_writes_no_more(home, finished):
    """The first holder is put to sleep in the middle; awake again, it ends as busy."""
    whole = finished(home.parent / "whole").result
    terms = Terms(claim="lease", lease_seconds=1.5, wait=20.0)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            calls = []

            def pause() -> bool:
                calls.append(1)
                if len(calls) == 2:
                    os.kill(os.getpid(), signal.SIGSTOP)
                return False

            outcome = execute(ONE, OFTEN, home, pause, terms)
            code = 42 if outcome.status == "busy" else 2
        finally:
            os._exit(code)
    try:
        until(lambda: os.waitpid(pid, os.WUNTRACED | os.WNOHANG)[0])
        outcome = execute(ONE, OFTEN, home, terms=terms)
        assert outcome.status == "finished"
        before = {path.name: path.stat().st_mtime_ns for path in home.iterdir()}
        os.kill(pid, signal.SIGCONT)
        assert wait(pid) == 42
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            kill(pid)
    assert {path.name: path.stat().st_mtime_ns for path in home.iterdir()} == before
    assert timeless(outcome.result) == timeless(whole)


def test_a_claim_whose_directory_is_taken_away_is_lost(tmp_path):
    claim = Claim(tmp_path / "run")
    (tmp_path / "run").mkdir()
    claim.acquire()
    claim.check()
    (tmp_path / "run").rename(tmp_path / "gone")
    with pytest.raises(ClaimLost):
        claim.check()
    claim.release()


def test_all_launches_into_a_directory_use_one_kind_of_claim(tmp_path, monkeypatch):
    assert agree(tmp_path, None) == "lock"
    assert agree(tmp_path, "lock") == "lock"
    with pytest.raises(ValueError, match=r"claim must be 'lock', .* got 'lease'; .* remove"):
        agree(tmp_path, "lease")
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(claims, "locks_hold", lambda directory: False)
    assert agree(other, None) == "lease"
    assert agree(other, None) == "lease"
    (other / "claims").write_text("leese\n")
    with pytest.raises(ValueError, match="must hold 'lock' or 'lease', got 'leese'"):
        agree(other, None)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_locks_is_noticed(tmp_path, monkeypatch, number):
    import fcntl

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    assert claims.locks_hold(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not claims.locks_hold(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_result_reads_as_it_was(home):
    result = run(home).result
    assert read_result(home, home.name) == result
    with pytest.raises(Damaged, match="it holds the run"):
        read_result(home, "0" * 16)
    assert read_result(home.with_name("nothing"), "0") is None


def test_specs_survive(tmp_path):
    config = replace(ONE, spec=DROP)
    home = tmp_path / run_hash(resolve(config), "fake")
    run(home, config)
    assert directories.read_config(home).spec == DROP
