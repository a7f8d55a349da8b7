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

Compilers, precisions, memory savings, parallel wrappers and regularizers: every pair of values of
two columns is in one of these {count} rows, each a training step. `scripts/matrix.py` has run them
and written this page (torch {version} on the CPU; ddp and fsdp2 are two processes with gloo).

A row's masks, counts and loss are those of one process in float32 without checkpoints. So are its
gradients (for ddp and fsdp2 the mean of two such processes): in float32 to 1e-4 of their norm,
under autocast to 0.2. *difference* is the largest over the parameters, as a share of the norm.
Inductor runs with torch's `fallback_random`, so that it draws the numbers that eager mode draws;
with checkpoints it may draw the two numbers of a mask in the other order, and is held against that.
With fsdp2 the blocks are compiled, each inside its checkpoint: compiled code can't tell that it
runs again there, and counts its calls twice; rates, as shares, are the same. Disout and
GaussianNoise keep nothing for the backward, and are not run again. With a GradScaler that has not
scaled yet, regularizers of gradients fail in the first backward of such a block: torch finds that
the recomputation took another graph. Those rows are left out; `scaler.scale(torch.zeros(()))`,
on the device of the loss, before the first forward is the way around.

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
