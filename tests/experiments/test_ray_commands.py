"""A Ray cluster as the documentation has it started: its commands, run as they stand there."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from experiments.running.environment import commit
from experiments.running.launch import launch
from experiments.study import read_study
from tests.experiments.launches import attempts, begin, summary, until

from .test_commands import STUDY

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes"),
]

ROOT = Path(__file__).parents[2]


def documented() -> list[str]:
    """The commands of the README's block about a Ray cluster, without their comments."""
    text = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    [block] = [block for block in blocks if "ray start" in block]
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


class Cluster:
    """Commands in a shell, with a home of their own, that knows of no token."""

    def __init__(self, home: Path) -> None:
        self.home, self.host = home, ""
        kept = {n: text for n, text in os.environ.items() if not n.startswith("RAY_")}
        path = f"{Path(sys.executable).parent}:{kept['PATH']}"
        self.environment = {**kept, "HOME": str(home), "PATH": path, "MARK": str(home)}
        (home / "STUDY.yaml").write_text(yaml.safe_dump(STUDY))
        (home / "scripts").symlink_to(ROOT / "scripts")

    def run(self, command: str, seconds: float = 600.0) -> subprocess.CompletedProcess[str]:
        """One line of the documentation; its HOST is the head's."""
        told = self.home / "told"
        with told.open("w") as file:  # a pipe would be open as long as the cluster is
            code = subprocess.run(
                ["bash", "-c", command.replace("HOST", self.host)],
                cwd=self.home,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
        text = told.read_text()
        if found := re.search(r"ray start --address='([^:']+):", text):
            self.host = found[1]
        return subprocess.CompletedProcess(command, code, text)

    def run_patiently(self, command: str) -> subprocess.CompletedProcess[str]:
        """The same, again where Ray has given up: it waits for 30 s, on a busy machine too."""
        before = self.processes()
        done = self.run(command)
        for _ in range(3):
            if "timed out during startup" not in done.stdout:
                break
            self.kill(set(self.processes()) - set(before))
            done = self.run(command)
        return done

    def kill(self, pids: Iterable[int]) -> None:
        pids = set(pids)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not pids & set(self.processes()), 60)

    def processes(self) -> list[int]:
        """Those that this cluster has left."""
        mark, found = f"MARK={self.home}".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return found


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.kill(cluster.processes())


def check(cluster: Cluster) -> None:
    """The study is finished, by workers of the cluster, with the code carried along."""
    study = cluster.home / "runs" / "STUDY"
    assert {status for status, _ in summary(study).values()} == {"finished"}
    assert [(a["commit"], a["dirty"]) for a in attempts(study)] == 2 * [tuple(commit().values())]
    assert (study / "report" / "report.md").exists()


def test_the_documented_commands_run_a_study(cluster):
    commands = documented()
    assert len(commands) == 4
    for command in commands:
        done = cluster.run_patiently(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
    check(cluster)
    study = read_study(cluster.home / "STUDY.yaml")
    begin(study, cluster.home / "sequential")
    launch(study, cluster.home / "sequential", backend="sequential")
    assert summary(cluster.home / "runs" / "STUDY") == summary(cluster.home / "sequential")


def test_a_token_left_by_a_local_run_does_not_shut_the_client_out(cluster):
    """`ray start` asks for it then, without a word in its command."""
    assert cluster.run("ray get-auth-token --generate").returncode == 0
    started = cluster.run_patiently("ray start --head --port 6380 --num-cpus 2")
    assert started.returncode == 0, started.stdout
    ablate = "python scripts/ablate.py STUDY.yaml --backend ray --address"
    done = cluster.run(f"RAY_AUTH_TOKEN=wrong {ablate} HOST:6380")
    assert done.returncode == 2
    assert "if it asks for a token, it must be here too: ~/.ray/auth_token" in done.stdout
    assert "Traceback" not in done.stdout
    done = cluster.run(f"{ablate} HOST:6380")
    assert done.returncode == 0, done.stdout
    check(cluster)


def test_a_cluster_without_tokens_takes_clients_that_leave_theirs_out(cluster):
    started = cluster.run_patiently("ray start --head --port 6381 --num-cpus 2")
    assert started.returncode == 0, started.stdout
    assert cluster.run("ray get-auth-token --generate").returncode == 0
    ablate = "RAY_AUTH_MODE=disabled python scripts/ablate.py STUDY.yaml --backend ray --address"
    done = cluster.run(f"{ablate} HOST:6381")
    assert done.returncode == 0, done.stdout
    check(cluster)
