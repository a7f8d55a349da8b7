"""Write the report of a study from its run directories, finished or not.

Example: scripts/report.py runs/quick

With --study, a report is made again from its own runs.csv, say with other contrasts:
scripts/report.py experiments/results/quick --study experiments/configs/quick.yaml
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jsonargparse import auto_cli
from rich.console import Console

from experiments.report import rewrite_report, summarize, table, write_report
from experiments.reporting.reported import read_reported
from experiments.reporting.summary import Row
from experiments.running.records import read_runs
from experiments.study import read_study


def report(run_dir: Path, out: Path | None = None, study: Path | None = None) -> int:
    """Write the report of a study from its run directories, finished or not.

    Args:
        run_dir: the study's directory, such as runs/quick; with --study, the folder of a report.
        out: a folder for report.md, runs.csv, summary.csv and the pictures; RUN_DIR/report by
            default.
        study: the study's file: make the report again, in its place, from its own runs.csv. What
            was run, the cost and the pictures over the epochs stay as they are.
    """
    try:
        if study is not None:
            if out is not None:
                raise ValueError("--out does not go with --study: the report is made in its place")
            plan = read_study(study)
            path = rewrite_report(run_dir, plan)
            show(summarize(*read_reported(run_dir / "runs.csv", plan)), path)
            return 0
        if not (run_dir / "study.json").is_file():
            raise ValueError(f"{run_dir} is not a study's directory: it has no study.json")
        rows = summarize(*read_runs(run_dir))
        path = write_report(run_dir, out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(rows, path)
    return 0


def show(rows: list[Row], path: Path) -> None:
    """Print the table, and where the report is."""
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows))
    print(path)


def main() -> int:
    """Return 0 if the report is written, 2 for bad input, 130 for Ctrl-C."""
    try:
        return int(auto_cli(report, description=__doc__, allow_abbrev=False))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
