"""Run the matrix of training stacks and regularizers, and write its table to docs/matrix.md.

Example: scripts/matrix.py (some 10 minutes on 2 cores)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.commands import begin, called, leave

if __name__ == "__main__":
    begin()

import json
import os
import subprocess
import tempfile
from importlib.metadata import version
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATH = "tests/models/test_matrix.py"
PAGE = """# Training stacks

This page tests compilers, precisions, memory options, parallel wrappers and regularizers
together. Each pair of values of two columns is in one of {count} rows. Each row is one training
step. `scripts/matrix.py` ran them and wrote this page with torch {version} on a CPU. `ddp` and
`fsdp2` are two processes with gloo.

Each row is compared with one process in eager mode, in float32, without checkpoints:

- The masks, counts and the loss are the same.
- The gradients are the same. For `ddp` and `fsdp2` they are compared with the mean of two
  processes. The tolerance is 1e-4 of their norm in float32, and 0.2 under autocast. The column
  *difference* is the largest difference of all parameters, relative to the norm.

Compiled rows are compared with the `aot_eager` backend, because compiled code draws other masks
than eager code. Inductor runs with torch's `fallback_random`, so that it draws the same random
numbers.

These pairs cannot be tested:

{impossible}

{table}
"""


def run() -> dict[tuple[str, ...], dict[str, Any]]:
    """What each row has shown, by its values; rows that failed are not there."""
    from tests.matrix import COLUMNS

    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records"
        records.touch()
        command = ["-m", "pytest", "-q", "-n", "1", "-m", "", "--exhaustive", PATH]
        environment = {**os.environ, "MATRIX_RECORDS": str(records)}
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False)
        lines = [json.loads(line) for line in records.read_text().splitlines()]
    return {tuple(line[column] for column in COLUMNS): line for line in lines}


def page(shown: dict[tuple[str, ...], dict[str, Any]]) -> str:
    """The page."""
    from tests.matrix import COLUMNS, covering

    rows, never = covering()
    lines = [
        f"| {' | '.join((*COLUMNS, 'calls', 'realized', 'difference'))} |",
        f"|{' --- |' * (len(COLUMNS) + 3)}",
    ]
    for row in sorted(rows, key=lambda row: [getattr(row, c) for c in reversed(COLUMNS)]):
        values = tuple(getattr(row, column) for column in COLUMNS)
        record = shown.get(values)
        if record is None:
            ending = ["failed", "", ""]
        else:
            calls, active, realized = record["counts"]
            share = "" if realized is None else f"{realized:.3f}"
            ending = [f"{calls}, {active} active", share, f"{record['difference']:.0e}"]
        lines.append(f"| {' | '.join((*values, *ending))} |")
    impossible = [f"- {a[1]} × {b[1]}: {reason}" for (a, b), reason in sorted(never.items())]
    return PAGE.format(
        count=len(rows),
        version=version("torch").partition("+")[0],
        impossible="\n".join(impossible) or "No pair is impossible.",
        table="\n".join(lines),
    )


def write(out: Path = ROOT / "docs" / "matrix.md") -> int:
    """Run the matrix, and write its page.

    Args:
        out: the page.
    """
    shown = run()
    if not shown:
        print("error: no row has run: see what pytest said", file=sys.stderr)
        return 1
    out.write_text(page(shown), encoding="utf-8")
    return 0


def main() -> int:
    return called(write, __doc__)


if __name__ == "__main__":
    leave(main())
