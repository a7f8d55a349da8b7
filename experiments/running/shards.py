"""Shards: every n-th run of a study, for a job of a cluster's queue."""

from __future__ import annotations

import os
from collections.abc import Mapping


def parse_shard(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """The shard `i/n`, or with `auto` that of this task of a SLURM job array.

    Example:
        >>> parse_shard("0/4")
        (0, 4)
        >>> slurm = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "1"}
        >>> parse_shard("auto", {**slurm, "SLURM_ARRAY_TASK_COUNT": "4"})
        (2, 4)

    Raises:
        ValueError: if it is none, or out of range.
    """
    if text == "auto":
        names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "COUNT")]
        missing = [name for name in names if not environment.get(name, "").isdigit()]
        if missing:
            raise ValueError(
                f"shard auto reads {', '.join(names)}, of which {', '.join(missing)} "
                "must be numbers: is this a SLURM job array?"
            )
        task, first, count = (int(environment[name]) for name in names)
        number = task - first
    else:
        index, slash, total = text.partition("/")
        if not (slash and index.isdigit() and total.isdigit()):
            raise ValueError(f"shard must be i/n or auto, got {text!r}")
        number, count = int(index), int(total)
    if not 0 <= number < count:
        raise ValueError(f"shard must be i/n with 0 <= i < n, got {number}/{count}")
    return number, count
