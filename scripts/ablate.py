"""Run a study and print its table.

Example: scripts/ablate.py experiments/configs/quick.yaml --csv quick.csv
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # threads that spin starve when a core is busy

from jsonargparse import auto_cli
from rich.console import Console

from experiments.report import summarize, table, write_csv
from experiments.study import Run, progress_bar, read_study, run_study


def ablate(study: Path, csv: Path | None = None) -> int:
    """Run a study and print its table.

    Args:
        study: a study file, such as experiments/configs/quick.yaml.
        csv: where to write one line per run; an existing file is replaced at the end.
    """
    runs: list[Run] = []
    try:
        plan = read_study(study)
        if csv is not None:
            csv.open("a").close()  # an unwritable path is told now, not after the last run
        with progress_bar() as progress:
            for run in run_study(plan, progress):
                runs.append(run)
    except KeyboardInterrupt:
        print(f"interrupted after {len(runs)} finished runs", file=sys.stderr)
        return 130
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, FloatingPointError) else 2
    if csv is not None:
        write_csv(runs, csv)
    show(runs, plan.baseline)
    return 0


def show(runs: list[Run], baseline: str) -> None:
    """Print the table, and with what it was made."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(summarize(runs, baseline), baseline))
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(run.config.seed for run in runs))
    seconds = sum(run.result.seconds for run in runs)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "timm"))
    console.print(f"{len(runs)} runs in {seconds:.0f} s; seeds {seeds}; {versions}")


def main() -> int:
    """Return 0 if all went well, 1 if a training failed, 2 for bad input, 130 for Ctrl-C."""
    return int(auto_cli(ablate, description=__doc__, allow_abbrev=False))


if __name__ == "__main__":
    sys.exit(main())
