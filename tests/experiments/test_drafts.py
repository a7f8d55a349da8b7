"""What writers that were killed leave is cleared up by the next one, and nothing of live ones."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from experiments.files import among_writers, draft_folder, write_atomically
from experiments.running.claims import agree
from tests.experiments.launches import kill, until, wait

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks, kills and locks")


def writer(folder: Path, seconds: float = 60.0) -> int:
    """A process that writes in a draft folder until it is killed, or for so long."""
    if pid := os.fork():
        return pid
    with suppress(BaseException), draft_folder(folder) as new:
        (new / "half").write_text("ha")
        (folder / f"told-{os.getpid()}").touch()
        time.sleep(seconds)
    os._exit(0)


def drafts(folder: Path) -> list[Path]:
    return sorted(folder.glob(".new-*"))


def test_the_drafts_of_killed_writers_go_and_those_of_live_ones_stay(tmp_path):
    killed, live = writer(tmp_path), writer(tmp_path)
    try:
        until(lambda: len(list(tmp_path.glob("told-*"))) == 2)
        assert len(drafts(tmp_path)) == 2
        kill(killed)
        with draft_folder(tmp_path) as mine:
            assert (mine in drafts(tmp_path), len(drafts(tmp_path))) == (True, 3)
        assert len(drafts(tmp_path)) == 2  # one writer is alive: whose which is, nobody knows
        os.kill(live, signal.SIGSTOP)  # asleep, it is alive
        with draft_folder(tmp_path):
            pass
        assert len(drafts(tmp_path)) == 2
    finally:
        os.kill(live, signal.SIGCONT)
        kill(live)
    with draft_folder(tmp_path) as mine:
        assert drafts(tmp_path) == [mine]
    assert drafts(tmp_path) == []


def test_two_writers_at_a_time_do_not_wait_for_each_other(tmp_path):
    with draft_folder(tmp_path) as one:
        other = writer(tmp_path, seconds=0)
        assert wait(other, 20) == 0
        assert one.exists()


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError), draft_folder(tmp_path) as new:
        (new / "half" / "deep").touch()
    assert list(tmp_path.iterdir()) == []


def test_without_locks_nothing_is_cleared_up(tmp_path, monkeypatch):
    import fcntl

    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".new-old").mkdir()
    with draft_folder(tmp_path) as new:
        assert drafts(tmp_path) == sorted([tmp_path / ".new-old", new])


def test_drafts_of_files_go_too(tmp_path):
    for name in (".study.json.1.part", ".claims.1.2.part", ".probe.1.part", "kept.part"):
        (tmp_path / name).touch()
    with among_writers(tmp_path, ".study.json.*.part"):
        write_atomically(tmp_path / "study.json", lambda part: part.write_text("{}"))
    assert agree(tmp_path, None) == "lock"
    assert {path.name for path in tmp_path.iterdir()} == {"study.json", "claims", "kept.part"}
