"""Write the report of a study from its run directories, finished or not.

Example: scripts/report.py runs/quick
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.running.signals import end_on_signals, leave

if __name__ == "__main__":
    end_on_signals()  # before the imports: torch's, where there is work, take seconds


def report(run_dir: Path, out: Path | None = None) -> int:
    """Write the report of a study from its run directories, finished or not.

    Args:
        run_dir: the study's directory, such as runs/quick.
        out: a folder for report.md, runs.csv, summary.csv and the pictures; RUN_DIR/report by
            default.
    """
    try:
        if not (run_dir / "study.json").is_file():
            raise ValueError(f"{run_dir} is not a study's directory: it has no study.json")
        from rich.console import Console

        from experiments.report import summarize, table, write_report
        from experiments.running.records import read_runs

        rows = summarize(*read_runs(run_dir))
        path = write_report(run_dir, out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows))
    print(path)
    return 0


def main() -> int:
    """0: the report is written; 2: bad input; 130: Ctrl-C; 75: another signal."""
    from jsonargparse import auto_cli

    try:
        return int(auto_cli(report, description=__doc__, allow_abbrev=False))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    leave(main())
