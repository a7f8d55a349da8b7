"""Run the matrix of training stacks and regularizers, and write its table to docs/matrix.md.

Example: scripts/matrix.py (some 10 minutes on 2 cores)
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import torch
from jsonargparse import auto_cli

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.matrix import COLUMNS, covering  # noqa: E402  # found from the root only

PAGE = """# Training stacks

Compilers, precisions, memory savings, parallel wrappers and regularizers: every pair of values of
two columns is in one of these {count} rows, each a training step. `scripts/matrix.py` has run them
and written this page (torch {version} on the CPU; ddp and fsdp2 are two processes with gloo).

A row's masks, counts and loss are those of one process in float32 without checkpoints. So are its
gradients (for ddp and fsdp2 the mean of two such processes): in float32 to 1e-4 of their norm,
under autocast to 0.2. *difference* is the largest over the parameters, as a share of the norm.
Inductor runs with torch's `fallback_random`, so that it draws the numbers that eager mode draws.
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
    with tempfile.TemporaryDirectory() as folder:
        records = pathlib.Path(folder) / "records"
        records.touch()
        command = ["-m", "pytest", "-q", "-n", "1", "-m", "", "tests/models/test_matrix.py"]
        environment = {**os.environ, "MATRIX_RECORDS": str(records)}
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False)
        lines = [json.loads(line) for line in records.read_text().splitlines()]
    return {tuple(line[column] for column in COLUMNS): line for line in lines}


def page(shown: dict[tuple[str, ...], dict[str, Any]]) -> str:
    """The page."""
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
        version=torch.__version__.partition("+")[0],
        impossible="\n".join(impossible) or "No pair is impossible.",
        table="\n".join(lines),
    )


def write(out: pathlib.Path = ROOT / "docs" / "matrix.md") -> int:
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


if __name__ == "__main__":
    sys.exit(auto_cli(write, description=__doc__, allow_abbrev=False))
