"""Recount the tables and claims of the committed reports, and the claims of both READMEs.

Claims are scores, differences, intervals, p values and their words; settings are not recounted. A
saliency/saliency.md beside a report is recounted, too, from its saliency.csv.

Example: scripts/recount.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.commands import begin, called, leave

if __name__ == "__main__":
    begin()

ROOT = Path(__file__).resolve().parent.parent


def report(root: Path = ROOT) -> int:
    """Print what is not so: file, line, what is said, what the runs give; 1 if there is any.

    Args:
        root: of the repository, with experiments/results, README.md and experiments/README.md.
    """
    from experiments.recounting import recount

    faults = recount(root)
    for fault in faults:
        print(fault)
    n = len(faults)
    print(f"{n} fault{'s' if n > 1 else ''}" if faults else "all is as the runs tell")
    return 1 if faults else 0


def main() -> int:
    return called(report, __doc__)


if __name__ == "__main__":
    leave(main())
