"""Run a study, or go on with it, and report what came of it.

Example: scripts/ablate.py experiments/configs/quick.yaml
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.commands import begin, called, leave

if __name__ == "__main__":
    begin()

import shlex
from typing import Any, Literal


def ablate(
    study: Path,
    out: Path = Path("runs"),
    data: str | None = None,
    base: dict[str, Any] | None = None,
    backend: Literal["loky", "sequential", "ray"] = "loky",
    address: str | None = None,
    jobs: int | None = None,
    shard: str | None = None,
    claim: Literal["lock", "lease"] | None = None,
    csv: Path | None = None,
    data_dir: Path = Path("data"),
    loader_workers: int = 0,
    checkpoint_seconds: float = 20.0,
    log: str | None = None,
) -> int:
    """Run a study, or go on with it, and report what came of it.

    Args:
        study: a study file, such as experiments/configs/quick.yaml.
        out: where the study's folder is made, or found: OUT/STUDY.
        data: data set to use instead of the study's, such as cifar10 or imagefolder:PATH.
        base: further fields of the base config, as YAML: '{train_images: null, epochs: 90}'.
        backend: loky (processes on this machine), sequential (this process) or ray (a cluster).
        address: of the Ray cluster: HOST:PORT, ray://HOST:PORT, or auto for that of this host;
            without it, one is started on this machine. The token of a cluster that asks for one
            is read from ~/.ray/auth_token or RAY_AUTH_TOKEN.
        jobs: runs at once; as many as the cores allow by default.
        shard: i/n runs every n-th of the runs only, from the i-th (from 0); auto takes i and n
            from SLURM's job array.
        claim: how runs are claimed: lock (the operating system's) or lease (for shared
            directories whose locks don't hold); by default, what the directory can.
        csv: where to write one line per run; an existing file is replaced at the end.
        data_dir: folder of the CIFAR files.
        loader_workers: processes that load images, of each run.
        checkpoint_seconds: least time between two checkpoints of a run.
        log: where the numbers of each epoch are also written, joined by commas: tensorboard,
            wandb, mlflow.
    """
    from experiments.config import Runtime, check_paths
    from experiments.running.shards import parse_shard

    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    part = None if shard is None else parse_shard(shard)
    study.open().close()
    check_paths(data=data, data_dir=data_dir)
    from experiments.running.launch import begin_study, launch
    from experiments.study import read_study

    runtime = Runtime(data_dir, loader_workers, checkpoint_seconds, log)
    plan = read_study(study, data, base, runtime)
    if csv is not None:
        csv.open("a").close()  # an unwritable path is told now, not after the last run
    directory = out / plan.name
    begin_study(plan, directory, shlex.join(["python", "scripts/ablate.py", *sys.argv[1:]]))
    ended = launch(
        plan,
        directory,
        runtime,
        backend=backend,
        address=address,
        jobs=jobs,
        shard=part,
        claim=claim,
    )
    if ended.exit_code is not None:
        print(f"stopped; the same command goes on: {directory}", file=sys.stderr)
        return ended.exit_code
    for label in ended.elsewhere:
        print(f"{label}: under way in another launch", file=sys.stderr)
    show(directory, csv)
    return 1 if ended.failed else 0


def show(directory: Path, csv: Path | None) -> None:
    """Print the table, and write the report when all runs are there."""
    from rich.console import Console

    from experiments.report import summarize, table, write_report
    from experiments.reporting.tables import write_runs
    from experiments.running.records import read_runs

    record, runs = read_runs(directory)
    rows = summarize(record, runs)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(rows))
    if csv is not None:
        write_runs(rows, csv)
    missing = sum(run.status == "missing" for run in runs)
    if missing:
        console.print(f"{missing} of {len(runs)} runs are still to come, and then the report")
    else:
        console.print(f"report: {write_report(directory)}", soft_wrap=True, highlight=False)


def main() -> int:
    return called(ablate, __doc__)


if __name__ == "__main__":
    leave(main())
