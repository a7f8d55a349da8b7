"""Recount the tables and claims of the committed reports, and the claims of both READMEs.

Claims are scores, differences, intervals, p values and their words; settings are not recounted.

Example: scripts/recount.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jsonargparse import auto_cli

from experiments.files import reason
from experiments.recounting import recount

ROOT = Path(__file__).resolve().parent.parent


def report(root: Path = ROOT) -> int:
    """Print what is not so: file, line, what is said, what the runs give; 1 if there is any.

    Args:
        root: of the repository, with experiments/results, README.md and experiments/README.md.
    """
    try:
        faults = recount(root)
    except (ValueError, OSError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 2
    for fault in faults:
        print(fault)
    n = len(faults)
    print(f"{n} fault{'s' if n > 1 else ''}" if faults else "all is as the runs tell")
    return 1 if faults else 0


def main() -> int:
    """0: all is so; 1: something is not; 2: there is nothing to recount."""
    return int(auto_cli(report, description=__doc__, allow_abbrev=False))


if __name__ == "__main__":
    sys.exit(main())
