"""Run a study, or continue it, and write its report.

Example: python scripts/ablate.py experiments/configs/quick.yaml
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options. `--help` answers before anything large is imported."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("study", type=Path, help="a study file")
    add("--out", type=Path, default=Path("runs"), help="folder of runs and reports (runs)")
    add("--search", action="store_true", help="search first; writes STUDY.chosen.yaml beside it")
    add("--jobs", type=int, help="runs at a time (one for each CPU or GPU)")
    add("--ray", metavar="ADDRESS", help="HOST:PORT of a Ray cluster; local starts one here")
    add("--seeds", metavar="1-6", help="only these seeds, such as 1-6 or 1,4")
    add("--only", action="append", default=[], metavar="NAME", help="only this condition")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="change the base")
    add("--workers", type=int, default=0, help="processes that load items of each run (0)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the study; return the exit status: 0, or 3 for an unfinished study."""
    options = read_options(arguments)
    sys.path.insert(0, str(options.study.resolve().parent))  # for the study's own factories
    from experiments.commands import begin_report, changes_of, report, run_all_with, seeds_of
    from experiments.runs import folders_of
    from experiments.study import fit, read_study

    changes = changes_of(options.set)
    seeds = seeds_of(options.seeds)
    study = read_study(options.study, changes, seeds, options.only)
    fit(study)

    pool = options.out / "runs"
    folder = options.out / study.name
    run_all = run_all_with(options, study)
    begin_report(study, folder)
    if options.search:
        from experiments.commands import searched
        from experiments.search import search

        results = search(study, pool, run_all)
        print(searched(study, results, folder))
        return 0

    names, folders = zip(*folders_of(study, pool), strict=True)
    run_all(folders, names)
    return report(study, folder, pool)


def called(work: object) -> int:
    """Return the exit status of a command; errors of users are one message without a traceback."""
    try:
        return work()  # type: ignore[operator, no-any-return]
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.perf_counter()
    status = called(main)
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    sys.exit(status)
