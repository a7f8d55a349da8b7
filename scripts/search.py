"""Run a search, or go on with it, and write what it chose for each arm.

Example: scripts/search.py experiments/configs/search.yaml
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.commands import begin, called, leave

if __name__ == "__main__":
    begin()

import shlex
from typing import Literal


def search(
    file: Path,
    out: Path = Path("runs"),
    backend: Literal["loky", "sequential"] = "loky",
    jobs: int | None = None,
    data_dir: Path = Path("data"),
    loader_workers: int = 0,
    checkpoint_seconds: float = 20.0,
) -> int:
    """Run a search, or go on with it, and write what it chose for each arm.

    Args:
        file: a search file, such as experiments/configs/search.yaml.
        out: where the search's folder is made, or found: OUT/SEARCH, with search.csv, a line for
            each run, and chosen.yaml, what each arm takes.
        backend: loky (processes on this machine) or sequential (this process).
        jobs: runs at once; as many as the cores allow by default.
        data_dir: folder of the CIFAR files.
        loader_workers: processes that load images, of each run.
        checkpoint_seconds: least time between two checkpoints of a run.
    """
    from experiments.config import Runtime

    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    file.open().close()
    from experiments.running.directories import write_text
    from experiments.running.launch import begin_study, launch
    from experiments.running.records import read_runs
    from experiments.search import best, chosen_text, read_search, table_text, tried

    runtime = Runtime(data_dir, loader_workers, checkpoint_seconds)
    plan = read_search(file, runtime)
    directory = out / plan.study.name
    begin_study(plan.study, directory, shlex.join(["python", "scripts/search.py", *sys.argv[1:]]))
    ended = launch(plan.study, directory, runtime, backend=backend, jobs=jobs)
    if ended.exit_code is not None:
        print(f"stopped; the same command goes on: {directory}", file=sys.stderr)
        return ended.exit_code
    found = tried(plan, read_runs(directory)[1])
    chosen = best(found)
    write_text(directory / "search.csv", table_text(found))
    write_text(directory / "chosen.yaml", chosen_text(chosen))
    for arm, each in chosen.items():
        numbers = ", ".join(f"{name} {number:g}" for name, number in each.drawn.items())
        print(f"{arm}: {numbers} (validation accuracy {100 * each.mean:.2f} %)")
    print(f"chosen: {directory / 'chosen.yaml'}")
    return 0


def main() -> int:
    return called(search, __doc__)


if __name__ == "__main__":
    leave(main())
