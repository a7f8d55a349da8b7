"""Write the report of a study from its run directories, finished or not.

Example: scripts/report.py runs/quick

With --study, a report is made again from its own runs.csv, say with other contrasts:
scripts/report.py experiments/results/quick --study experiments/configs/quick.yaml
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.commands import begin, called, leave

if __name__ == "__main__":
    begin()


def report(run_dir: Path, out: Path | None = None, study: Path | None = None) -> int:
    """Write the report of a study from its run directories, finished or not.

    Args:
        run_dir: the study's directory, such as runs/quick; with --study, the folder of a report.
        out: a folder for report.md, runs.csv, summary.csv and the pictures; RUN_DIR/report by
            default.
        study: the study's file: make the report again, in its place, from its own runs.csv. What
            was run, the cost and the pictures over the epochs stay as they are.
    """
    if study is not None:
        if out is not None:
            raise ValueError("--out does not go with --study: the report is made in its place")
        return report_again(run_dir, study)
    if not (run_dir / "study.json").is_file():
        raise ValueError(f"{run_dir} is not a study's directory: it has no study.json")
    from experiments.report import summarize, write_report
    from experiments.running.records import read_runs

    rows = summarize(*read_runs(run_dir))
    path = write_report(run_dir, out)
    show(rows, path)
    return 0


def report_again(folder: Path, study: Path) -> int:
    """Make a report again from its own `runs.csv`."""
    from experiments.report import rewrite_report, summarize
    from experiments.reporting.reported import read_reported
    from experiments.study import read_study

    plan = read_study(study)
    path = rewrite_report(folder, plan)
    show(summarize(*read_reported(folder / "runs.csv", plan)), path)
    return 0


def show(rows: list, path: Path) -> None:
    """Print the table, and where the report is."""
    from rich.console import Console

    from experiments.report import table

    Console(width=None if sys.stdout.isatty() else 120).print(table(rows))
    print(path)


def main() -> int:
    return called(report, __doc__)


if __name__ == "__main__":
    leave(main())
