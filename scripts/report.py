"""Write the report of a study again, from its runs.csv and study.yaml.

Example: python scripts/report.py runs/quick

Where the folder of runs is beside it (runs/runs), the runs are read, so that an unfinished study
can be looked at. The exit status of an unfinished study is 3.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(arguments: list[str] | None = None) -> int:
    """Write the report; return the exit status.

    Raises:
        ValueError: if the folder has no study.yaml, or there are no runs.
    """
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="of the report: it has study.yaml")
    folder = parser.parse_args(arguments).folder
    if not (folder / "study.yaml").is_file():
        raise ValueError(
            f"{folder} has no study.yaml: give the folder of a study, such as runs/quick"
        )
    from experiments.commands import imports_of, report, show
    from experiments.report import read_report, write_report
    from experiments.runs import folders_of

    sys.path.insert(0, str(imports_of(folder)))
    study, frame, epochs = read_report(folder)
    pool = folder.parent / "runs"
    results = [run.result() for _, run in folders_of(study, pool)]
    there = sum(result is not None for result in results)
    finished = (frame["status"] == "finished").sum()
    if pool.is_dir() and there >= finished:
        return report(study, folder, pool)
    if not len(frame):
        raise ValueError(f"{folder} has no runs.csv, and there are no runs in {pool}")

    written = write_report(folder, study, frame, epochs)
    return show(written, frame)


if __name__ == "__main__":
    from scripts.ablate import called

    sys.exit(called(main))
