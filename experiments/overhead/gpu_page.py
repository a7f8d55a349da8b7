"""The table of the measurements on a GPU, for `experiments.overhead.page`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd

FILES = Path(__file__).parents[2] / "docs/benchmarks/gpu"
FUNCTIONS = ("drop_block2d", "dropout2d", "F.dropout2d", "dropout", "F.dropout")
NOT_MEASURED = "–"


@cache
def _measured() -> pd.DataFrame:
    """Return the times of the kernels: a row for each function and activation."""
    return pd.read_csv(FILES / "kernels.csv")


def of_kernels() -> str:
    """Return a table of the time of the GPU: one row for each activation."""
    frame = _measured()
    heads = ["activation", *(f"`{name}`" for name in FUNCTIONS), "µs of the floor"]
    rows = [heads, ["---"] * len(heads)]
    for keys, measured in frame.groupby(["shape", "dtype", "memory_format"], sort=False):
        shape, dtype, memory_format = map(str, keys)
        # with spaces, because the search of the site fails on some words of many digits
        name = f"{shape.replace('x', ' × ')}, {dtype}"
        if memory_format != "contiguous":
            name += f", {memory_format}"

        times = measured.set_index("function")["us"]
        cells = [ratio_to_floor(times, function) for function in FUNCTIONS]
        rows.append([name, *cells, f"{times['floor']:.0f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def ratio_to_floor(times: pd.Series[float], function: str) -> str:
    """Return how many times longer a function takes than the floor, with two decimals."""
    if function not in times:
        return NOT_MEASURED
    return f"{times[function] / times['floor']:.2f}"


def ratios(function: str, dtype: str, reference: str = "floor") -> list[str]:
    """Return the ratio of two functions for each activation, with two decimals."""
    frame = _measured()
    of_type = frame[frame["dtype"].eq(dtype)]
    times = of_type.pivot(
        index=["shape", "memory_format"],
        columns="function",
        values="us",
    )
    return [f"{ratio:.2f}" for ratio in (times[function] / times[reference]).dropna()]
