"""Writes the tables of docs/models.md and docs/matrix.md again.

    python -m tests.write_tables families|retuned [FAMILY]
    python -m tests.write_tables transformers|models|matrix

The first three measure models, and write docs/models/*.csv. Then, as `models` does alone, the
tables of docs/models.md are made from these files. The text of a page stays.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import torch

from tests import families, retuned, supported
from tests.axes.layouts_table import TRANSFORMERS, rows_of
from tests.matrix import COLUMNS, covering

DOCS = Path(__file__).parents[1] / "docs"


def family_row(member):
    """The cells of a family, and whether all is as it should be."""
    plain = families.observe(member)
    checkpointing, faults = "the family has none", stage_faults(plain)
    if families.has_checkpointing(member):
        again = stage_faults(families.observe(member, checkpointing=True))
        checkpointing, faults = "; ".join(again) or "ok", [*faults, *again]
    cells = (
        member.family,
        member.model,
        str(member.size),
        each_stage(plain, lambda s: f"`{s.name}`"),
        each_stage(plain, lambda s: s.layout),
        each_stage(plain, map_of),
        each_stage(plain, lambda s: f"{s.realized:.3f} (z {s.z:+.1f})"),
        member.shown(),
        checkpointing,
    )
    return cells, faults


def each_stage(outcome, show):
    return ", ".join(dict.fromkeys(show(stage) for stage in outcome.stages))


def map_of(stage):
    size = "x".join(map(str, stage.map_size))
    return f"{size} ({stage.prefix})" if stage.layout in ("NLC", "NCL") else size


def stage_faults(outcome):
    faults = [
        f"{stage.name}: {stage.calls} calls, {stage.layout}, dropped {stage.realized:.3f}"
        for stage in outcome.stages
        if stage.calls != 1 or not stage.channels_right or abs(stage.z) > 4
    ]
    named = {
        "gradients are not finite": outcome.gradients_finite,
        "evaluation differs": outcome.evaluation_equal,
        "something is left after remove()": outcome.removed_clean,
    }
    return faults + [name for name, right in named.items() if not right]


def retuned_row(member):
    """The cells of a family whose own dropout is retuned, and whether all is as it should be."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of timm's own
        model = retuned.with_rates(member)
    x = torch.randn(families.BATCH, 3, member.size, member.size)
    outcome = retuned.observe(model, x)
    kinds = [
        Counter(rate.type for rate in outcome.rates if rate.kind == kind)
        for kind in ("ours", "itself", "read", "attribute", "idle")
    ]
    shown = [", ".join(f"{name} {number}" for name, number in kind.items()) for kind in kinds]
    measured = [abs(rate.z) for rate in outcome.rates if rate.share is not None]
    faults = [f"{rate.name} is wrong" for rate in outcome.rates if not rate.right]
    named = {
        "gradients are not finite": outcome.gradients_finite,
        "what was told is wrong": outcome.told_right,
        "evaluation differs": outcome.evaluation_equal,
        "something is left after remove()": outcome.restored,
    }
    faults += [name for name, right in named.items() if not right]
    return (member.family, member.model, *shown, f"{max(measured, default=0):.1f}"), faults


def matrix_rows():
    """The rows of the matrix of stacks, as its tests record them."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records"
        records.touch()
        command = ["-m", "pytest", "-q", "-n", "1", "-m", "", "--exhaustive"]
        subprocess.run(
            [sys.executable, *command, "tests/models/test_matrix.py"],
            cwd=DOCS.parent,
            env={**os.environ, "MATRIX_RECORDS": str(records)},
            check=False,
        )
        lines = [json.loads(line) for line in records.read_text().splitlines()]
    shown = {tuple(line[column] for column in COLUMNS): line for line in lines}
    rows, _ = covering()
    for row in sorted(rows, key=lambda row: [getattr(row, c) for c in reversed(COLUMNS)]):
        values = tuple(getattr(row, column) for column in COLUMNS)
        if values not in shown:
            yield (*values, "failed", "", "")
            continue
        calls, active, realized = shown[values]["counts"]
        share = "" if realized is None else f"{realized:.3f}"
        yield (*values, f"{calls}, {active} active", share, f"{shown[values]['difference']:.0e}")


def transformers_rows():
    """For each model of Transformers, how many tensors of its layers are read without options."""
    for name in TRANSFORMERS:
        tensors = rows_of(name)
        unread = [row for row in tensors if row[4] == "-"]
        layers = dict.fromkeys(f"`{layer_kind(row[1])}`" for row in unread)
        yield {
            "model": name,
            "tensors": str(len(tensors)),
            "read": str(len(tensors) - len(unread)),
            "maps": str(sum(row[5] != "-" for row in tensors)),
            "not read": ", ".join(layers),
        }


def layer_kind(name):
    """The last part of a layer's name that is no number."""
    return next((part for part in reversed(name.split(".")) if not part.isdigit()), name)


def replaced(page, rows):
    """The page with another table."""
    lines = page.splitlines()
    first = max(i for i, line in enumerate(lines) if line.startswith("| ---")) + 1
    text = "\n".join([*lines[:first], *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
    return re.sub(r"torch \d[\d.]*\d", f"torch {version('torch').partition('+')[0]}", text)


def measure(which, only=None):
    """Measure the families of timm; return whether all is as it should be."""
    torch.set_num_threads(1)  # so that the digits are the same on every machine
    make = {"families": family_row, "retuned": retuned_row}[which]
    members = [member for member in families.MEMBERS if only in (None, member.family)]
    made = [make(member) for member in members]
    rows = [(*cells, "; ".join(faults) or "ok") for cells, faults in made]
    if only is not None:
        print(*rows, sep="\n")
    else:
        header = list(supported.read(which)[0])
        supported.write(which, [dict(zip(header, row, strict=True)) for row in rows])
    return not any(faults for _, faults in made)


def main(which, only=None):
    """Write one table; return the exit status."""
    if which == "matrix":
        path = DOCS / "matrix.md"
        page = path.read_text(encoding="utf-8")
        path.write_text(replaced(page, list(matrix_rows())), encoding="utf-8")
        return 0
    right = True
    if which in ("families", "retuned"):
        right = measure(which, only)
    elif which == "transformers":
        supported.write(which, list(transformers_rows()))
    page = supported.PAGE.read_text(encoding="utf-8")
    supported.PAGE.write_text(supported.with_tables(page), encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
