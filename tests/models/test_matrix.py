"""The pairwise matrix of stacks and regularizers; its table is ``docs/matrix.md``."""

import dataclasses

import pytest

from tests.cases import rest_slow
from tests.matrix import COLUMNS, covering, impossible, pairs_of, run_row
from tests.pair import ROOT, run_pair

ROWS, NEVER = covering()
SINGLE = [row for row in ROWS if row.parallel == "single"]
EAGER = [row for row in SINGLE if row.compiler == "eager"]
PARTS = 6  # of the rows in two processes


@pytest.mark.filterwarnings("ignore")  # of the compilers; of our own, other tests
@pytest.mark.every(4)
@pytest.mark.parametrize("row", rest_slow(SINGLE, EAGER), ids=str)
def test_a_row(row):
    run_row(row)


def rows_in_two_processes(rank, compiler, parallel, part):
    rows = [row for row in ROWS if (row.compiler, row.parallel) == (compiler, parallel)]
    for row in rows[int(part) :: PARTS]:
        print(row, flush=True)
        run_row(row, rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(1, PARTS))]
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_rows_in_two_processes(tmp_path, compiler, parallel, part):
    call = f"rows_in_two_processes:{compiler}:{parallel}:{part}"
    run_pair(tmp_path, "tests.models.test_matrix", [call], warn="ignore", seconds=900)


def test_every_pair_is_in_a_row_or_named():
    found = set().union(*map(pairs_of, ROWS))
    assert not found & NEVER.keys()
    assert all(NEVER.values())
    columns = list(COLUMNS.items())
    total = sum(len(a) * len(b) for i, (_, a) in enumerate(columns) for _, b in columns[i + 1 :])
    assert len(found) + len(NEVER) == total
    assert all(impossible(row) is None for row in ROWS)
    assert len(ROWS) < total / 4


def test_the_table_has_these_rows():
    lines = (ROOT / "docs" / "matrix.md").read_text().splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert table[0][: len(COLUMNS)] == list(COLUMNS)
    shown = {tuple(cells[: len(COLUMNS)]): cells for cells in table[2:]}
    assert set(shown) == {dataclasses.astuple(row) for row in ROWS}, "write the table anew"
    assert not any("failed" in cells for cells in shown.values())
