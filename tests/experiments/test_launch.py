"""A launch: killed, stopped, doubled, sharded, on any backend, its study ends the same."""

import json
import os
import random
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.running import backends
from experiments.running import launch as launches
from experiments.running.backends import Unreachable, WorkersDied
from experiments.running.launch import launch
from experiments.running.records import read_runs
from experiments.running.rounds import DEATHS, IDLE, WorkersUseless
from experiments.running.runs import Unwritable, execute
from experiments.running.shards import parse_shard
from tests.experiments.launches import (
    DROP,
    TINY,
    attempts,
    begin,
    kill,
    make_study,
    start,
    started,
    summary,
    until,
    wait,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks and kills")


@pytest.fixture
def home(tmp_path):
    return tmp_path / "study"


def run(study, home: Path, **how):
    begin(study, home)
    return launch(study, home, **{"backend": "sequential", **how})


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The summary of a study of which nothing was killed."""
    found = {}

    def make(study):
        key = repr(study)
        if key not in found:
            home = tmp_path_factory.mktemp("whole") / "study"
            assert run(study, home).failed == []
            found[key] = summary(home)
        return found[key]

    return make


def test_a_launch_runs_everything_once(home, capsys):
    study = make_study(epochs=1)
    assert run(study, home) == launches.Ended([], [], None)
    assert {status for status, _ in summary(home).values()} == {"finished"}
    assert len(attempts(home)) == 4
    assert "4/4 drop, seed 2: finished" in capsys.readouterr().err
    run(study, home)
    assert len(attempts(home)) == 4
    assert not list(home.glob("stop-*"))


def test_studies_share_what_they_have_in_common(home):
    one, other = make_study(seeds=(1,)), make_study(seeds=(1, 2))
    assert run(one, home).failed == []
    assert run(other, home.with_name("other")).failed == []
    mine, theirs = summary(home), summary(home.with_name("other"))
    assert len(theirs) == 4
    assert mine.items() < theirs.items()
    begun = {attempt["launch"] for attempt in attempts(home)}
    assert sum(a["launch"] in begun for a in attempts(home.with_name("other"))) == 2


def test_what_damage_was_set_aside_is_told(home, capsys):
    study = make_study(epochs=1, seeds=(1,), none=TINY)
    run(study, home)
    first = study.runs()[0].hash
    (home / first / "result.json").write_text("{}")
    run(study, home)
    told = capsys.readouterr().err
    assert f"damaged: {first}: result.json was changed since the run was finished" in told
    assert f"set aside as {home / first}.damaged-1" in told


def test_a_directory_in_a_files_place_is_told_and_the_others_go_on(home, capsys):
    study = make_study(epochs=1, seeds=(1, 2, 3, 4), none=TINY)
    begin(study, home)
    damaged = {"environment.json": 0, "error.json": 1, ".x.part": 2}
    for name, number in damaged.items():
        (home / study.runs()[number].hash / name).mkdir(parents=True)
    assert {status for status, _ in summary(home).values()} == {"missing"}
    assert run(study, home).failed == []
    assert {status for status, _ in summary(home).values()} == {"finished"}
    told = capsys.readouterr().err
    for name, number in damaged.items():
        assert f"damaged: {study.runs()[number].hash}: {name} is a directory; set aside" in told


def test_attempts_that_are_none_do_not_end_the_launch(home):
    texts = ["5", '["a"]']
    study = make_study(epochs=1, seeds=(1, 2), none=TINY)
    begin(study, home)
    for planned, text in zip(study.runs(), texts, strict=True):
        (home / planned.hash).mkdir()
        (home / planned.hash / "environment.json").write_text(f'{{"attempts": {text}}}')
    assert run(study, home).failed == []
    assert {status for status, _ in summary(home).values()} == {"finished"}


def test_a_finished_run_with_an_error_left_behind_is_no_failure(home):
    study = make_study(epochs=1, seeds=(1,), none=TINY)
    run(study, home)
    error = home / study.runs()[0].hash / "error.json"
    error.write_text('{"id": "1", "type": "T", "message": "m"}')
    assert run(study, home).failed == []


def test_what_is_wrong_in_a_runs_directory_is_not_the_studys(home):
    study = make_study(epochs=1, seeds=(1,))
    begin(study, home)
    environment = home / study.runs()[0].hash / "environment.json"
    environment.parent.mkdir()
    environment.symlink_to(environment)  # can't be read, whoever asks
    with pytest.raises(OSError, match=r"environment\.json") as error:
        read_runs(home)
    assert "study.json" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"baseline": ["none"]}, r"a study: baseline must be text, got \['none'\]"),
        ({"question": 3}, "a study: question must be text, got 3"),
        ({"seeds": ["1"]}, r"a study: seeds must be whole numbers, got \['1'\]"),
        ({"seeds": 3}, "a study: TypeError"),
        ({"conditions": []}, "a study: AttributeError"),
        ({"factors": None}, "a study: conditions.none.factors must map .* got None"),
        ({"factors": {"rate": [1]}}, "a study: conditions.none.factors must map .* got {'rate'"),
        ({"config": {"lrr": 1}}, "a study: .*lrr"),
    ],
)
def test_a_study_json_of_another_form_is_told(home, change, message):
    record = make_study().record("a test")
    of = record["conditions"]["none"] if change.keys() & {"factors", "config"} else record
    of.update(change)
    home.mkdir()
    (home / "study.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message) as error:
        read_runs(home)
    assert "ValueError(" not in str(error.value)


def test_failed_and_diverged_runs_are_told_and_the_others_go_on(home, capsys, monkeypatch):
    study = make_study(
        none=TINY,
        broken=replace(TINY, replica=1),
        wild=replace(TINY, lr=1e30),
        last=replace(TINY, replica=2),
        seeds=(1,),
    )

    def fail_one(config, *args, **kwargs):
        if config.replica == 1:
            raise RuntimeError("out of cheese")
        return real(config, *args, **kwargs)

    real = execute.__globals__["train"]
    monkeypatch.setitem(execute.__globals__, "train", fail_one)
    ended = run(study, home)
    assert ended.failed == ["broken, seed 1"]
    statuses = {name: status for (name, _), (status, _) in summary(home).items()}
    assert statuses == {
        "none": "finished",
        "broken": "failed",
        "wild": "diverged",
        "last": "finished",
    }
    told = capsys.readouterr().err
    assert "broken, seed 1: failed: RuntimeError: out of cheese" in told
    assert "wild, seed 1: diverged" in told
    _, runs = read_runs(home)
    errors = {run.error for run in runs if run.condition == "broken"}
    assert errors == {"RuntimeError: out of cheese"}
    monkeypatch.setitem(execute.__globals__, "train", real)
    assert run(study, home).failed == []
    assert len(attempts(home)) == 5


def test_a_launch_that_cannot_write_ends_at_once(home, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(execute.__globals__, "train", full)
    with pytest.raises(Unwritable, match="No space left on device"):
        run(make_study(), home)
    assert len(attempts(home)) == 1
    assert not list(home.glob("*/error.json"))


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["lock", "lease"])
def test_two_launches_never_run_a_run_twice(home, whole, claim):
    study = make_study()
    with started(study, home, backend="sequential", claim=claim) as one:
        until(lambda: list(home.glob("*/metrics.jsonl")))
        with started(study, home, backend="sequential", claim=claim) as other:
            assert (wait(one), wait(other)) == (0, 0)
    assert len(attempts(home)) == 4
    assert len({attempt["pid"] for attempt in attempts(home)}) == 2
    assert summary(home) == whole(study)


def test_a_stop_file_of_another_launch_stops_nobody(home):
    study = make_study(epochs=1, seeds=(1,), none=TINY)
    begin(study, home)
    (home / "stop-12345678").touch()
    assert run(study, home).exit_code is None
    assert {status for status, _ in summary(home).values()} == {"finished"}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 75, marks=pytest.mark.slow),
    ],
)
def test_signals_leave_a_state_that_is_resumed(home, whole, number, code):
    study = make_study(epochs=10, seeds=(1,))
    with started(study, home, backend="sequential") as pid:
        until(lambda: list(home.glob("*/checkpoint.pt")))
        os.kill(pid, number)
        assert wait(pid) == code
    assert len(attempts(home)) == 1
    assert "missing" in {status for status, _ in summary(home).values()}
    assert run(study, home).failed == []
    assert len(attempts(home)) == 3
    assert summary(home) == whole(study)


@pytest.mark.slow
def test_a_study_that_was_killed_three_times_ends_the_same(home, whole):
    study = make_study()
    moments = random.Random(1)
    for _ in range(3):
        pid = start(study, home, backend="sequential")
        time.sleep(moments.uniform(0.1, 0.9))
        kill(pid)
    assert run(study, home).failed == []
    assert summary(home) == whole(study)


def loky_workers(launcher: int) -> list[int]:
    """The workers that are children of a launcher."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == launcher and b"popen_" in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_workers_that_outlive_their_launcher_hand_over_to_the_next(home, whole):
    study = make_study(epochs=60, seeds=(1,))
    with started(study, home, backend="loky", jobs=2) as pid:
        until(lambda: len(list(home.glob("*/checkpoint.pt"))) == 2)
        orphans = loky_workers(pid)
        kill(pid)
    assert len(orphans) == 2
    assert run(study, home).failed == []
    assert summary(home) == whole(study)
    until(lambda: not any(Path(f"/proc/{orphan}").exists() for orphan in orphans))
    assert len(attempts(home)) == 4  # each run is begun once and resumed once


@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize("times", [6, 25])
def test_a_study_killed_many_times_ends_with_the_same_table(home, whole, times):
    study = make_study(
        epochs=12,
        none=TINY,
        again=replace(TINY, replica=1),
        drop=replace(TINY, spec=DROP),
        mixed=replace(TINY, spec=DROP, batch_size=4, mixup=0.2, ema=0.9),
        chosen=replace(TINY, spec=DROP, batch_size=20, train_images=120, validation=0.5, ema=0.5),
    )
    moments = random.Random(4)
    kills = {"launcher": 0, "worker": 0}
    pid = None
    while sum(kills.values()) < times:
        if pid is None:
            begun = len(attempts(home)) if home.exists() else 0
            pid = start(study, home, backend="loky", jobs=2)
            if moments.random() < 0.8:  # most kills come while runs are under way
                wait_for_another_attempt(home, begun, pid)
        time.sleep(moments.uniform(0, 3))
        workers = loky_workers(pid)
        if moments.random() < 0.5 and workers:
            os.kill(moments.choice(workers), signal.SIGKILL)
            kills["worker"] += 1
        else:
            kill(pid)
            kills["launcher"] += 1
            pid = None
    print(kills)
    if pid is None or wait(pid, 600) != 0:  # a run that was killed too often is tried again
        assert wait(start(study, home, backend="loky", jobs=2), 600) == 0
    assert summary(home) == whole(study)
    assert len(summary(home)) == 10
    assert not list(home.glob("*.damaged-*"))


def wait_for_another_attempt(home: Path, begun: int, pid: int) -> None:
    """Wait for one more than were begun, or for the launcher's end."""
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: len(attempts(home)) > begun or stat.read_text().split()[2] == "Z")


def deadly(at_once_seen):
    """A backend whose workers die with the run of replica 1, as loky's do."""

    def run_all(work, jobs, at_once):
        at_once_seen.append((len(jobs), at_once))
        for job in jobs:
            if job.config.replica == 1:
                path = job.directory / "environment.json"
                path.parent.mkdir(exist_ok=True)
                known = json.loads(path.read_text())["attempts"] if path.exists() else []
                path.write_text(json.dumps({"attempts": [*known, {"launch": job.terms.launch}]}))
                raise WorkersDied
            work(job)
        return [work(job) for job in jobs]

    return run_all


def test_a_run_whose_worker_dies_again_and_again_is_given_up(home, monkeypatch):
    study = make_study(
        none=TINY, deadly=replace(TINY, replica=1), last=replace(TINY, replica=2), seeds=(1,)
    )
    seen = []

    @contextmanager
    def workers(*_):
        yield deadly(seen), 2

    monkeypatch.setattr(launches, "workers", workers)
    ended = run(study, home)
    assert ended.failed == ["deadly, seed 1"]
    statuses = {name: status for (name, _), (status, _) in summary(home).items()}
    assert statuses == {"none": "finished", "deadly": "failed", "last": "finished"}
    assert [n for n, _ in seen] == [3, 2, 1] + DEATHS * [1]
    [error] = [r.error for r in read_runs(home)[1] if r.error]
    assert error.startswith("WorkerDied: 3 times")


def dying(begins):
    """A backend whose workers die; in round i, `begins(i)` of the runs were begun before."""
    rounds = []

    def run_all(work, jobs, at_once):
        rounds.append(len(jobs))
        for job in jobs[: begins(len(rounds))]:
            work(job)
        raise WorkersDied

    @contextmanager
    def workers(*_):
        yield run_all, 2

    return workers, rounds


def test_workers_that_die_before_any_run_end_the_launch(home, monkeypatch):
    workers, rounds = dying(lambda number: 0)
    monkeypatch.setattr(launches, "workers", workers)
    with pytest.raises(WorkersUseless, match=f"workers died in {IDLE} rounds in a row"):
        run(make_study(), home)
    assert len(rounds) == IDLE


@pytest.mark.slow
def test_workers_that_die_but_get_on_do_not_end_the_launch(home, monkeypatch):
    workers, rounds = dying(lambda number: number % IDLE == 0)
    monkeypatch.setattr(launches, "workers", workers)
    assert run(make_study(epochs=1), home).failed == []
    assert len(rounds) == 4 * IDLE


@pytest.mark.slow
def test_loky_gives_the_metrics_of_sequential(home, whole):
    study = make_study()
    with started(study, home, backend="loky", jobs=2) as pid:
        assert wait(pid) == 0
    assert len(attempts(home)) == 4
    assert pid not in {attempt["pid"] for attempt in attempts(home)}
    assert summary(home) == whole(study)


@pytest.mark.slow
def test_shards_are_a_partition_and_do_not_wait(home, whole):
    study = make_study()
    for i in range(3):
        before = len(attempts(home)) if home.exists() else 0
        assert run(study, home, shard=(i, 3)).failed == []
        assert len(attempts(home)) - before == [2, 1, 1][i]
    assert summary(home) == whole(study)


def test_a_shard_tells_what_another_launch_has(home):
    study = make_study(epochs=2000, seeds=(1,))
    with started(study, home, backend="sequential") as pid:
        until(lambda: list(home.glob("*/metrics.jsonl")))
        assert run(study, home, shard=(0, 2)).elsewhere == ["none, seed 1"]
        kill(pid)


def test_a_shard_without_runs_does_nothing_and_says_so(home, capsys):
    study = make_study(seeds=(1,))
    assert run(study, home, shard=(5, 9)) == launches.Ended([], [], None)
    assert "shard 5/9 has no runs: the study has 2" in capsys.readouterr().err
    assert attempts(home) == []


SLURM = {
    "SLURM_ARRAY_TASK_ID": "7",
    "SLURM_ARRAY_TASK_MIN": "5",
    "SLURM_ARRAY_TASK_COUNT": "4",
}


def test_shards_are_read():
    assert parse_shard("2/5") == (2, 5)
    assert parse_shard("auto", SLURM) == (2, 4)


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("5/5", {}, "0 <= i < n, got 5/5"),
        ("0/0", {}, "0 <= i < n, got 0/0"),
        ("-1/5", {}, "i/n or auto, got '-1/5'"),
        ("1", {}, "i/n or auto, got '1'"),
        ("a/b", {}, "i/n or auto, got 'a/b'"),
        ("auto", {}, "of which SLURM_ARRAY_TASK_ID, SLURM_ARRAY_TASK_MIN"),
        ("auto", {**SLURM, "SLURM_ARRAY_TASK_ID": "12"}, "0 <= i < n, got 7/4"),
        ("auto", {**SLURM, "SLURM_ARRAY_TASK_MIN": "8"}, "0 <= i < n, got -1/4"),
    ],
)
def test_a_shard_out_of_range_is_refused(text, environment, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_shard(text, environment)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"address": "127.0.0.1:1"}, "address is for the backend ray, not sequential"),
        ({"backend": "ray", "address": "127.0.0.1"}, "address must be HOST:PORT"),
        ({"backend": "ray", "address": "127.0.0.1:many"}, "address must be HOST:PORT"),
        ({"backend": "ray", "address": "127.0.0.1:1"}, "no Ray cluster answers at 127.0.0.1:1"),
        ({"backend": "ray", "address": "ray://127.0.0.1:1"}, "no Ray cluster answers at ray://127"),
        ({"backend": "ray", "address": "127.0.0.1:99999"}, "no Ray cluster answers"),
    ],
)
def test_an_address_that_does_not_answer_is_told_at_once(home, how, message):
    start = time.monotonic()
    with pytest.raises(ValueError, match=re.escape(message)):
        run(make_study(), home, **how)
    assert time.monotonic() - start < 6
    assert attempts(home) == []


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_server_that_is_not_ray_is_told_within_seconds(home, answer, monkeypatch):
    monkeypatch.setattr(backends, "SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer)
                ended.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Unreachable, match=f"no Ray cluster answers at {address}"):
            run(make_study(), home, backend="ray", address=address)
        ended.set()
        thread.join()
