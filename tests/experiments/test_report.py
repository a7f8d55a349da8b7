"""The statistics against known answers, and the table that shows them."""

import csv
import io

import pytest
from rich.console import Console

from experiments.report import (
    Difference,
    mean_rates,
    paired_difference,
    summarize,
    table,
    write_csv,
)
from experiments.study import Run
from experiments.train import Config, Result

# Student's sleep data (1908): mean difference 1.58, t(9) = 4.0621, p = 0.002833
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def run(condition: str, seed: int, accuracy: float, rates: tuple[float, ...] = ()) -> Run:
    nominal = {"layer4.0/Dropout2d": list(rates)} if rates else {}
    realized = {key: [rate + 0.01 for rate in values] for key, values in nominal.items()}
    result = Result(accuracy, 2.0, [1.0, 0.5], nominal, realized)
    return Run(condition, Config(seed=seed), result)


def text(runs: list[Run], width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table(summarize(runs, "none"), "none"))
    return console.file.getvalue()


def test_paired_t_on_the_sleep_data():
    difference = paired_difference(DRUG_2, DRUG_1)
    assert difference.mean == pytest.approx(1.58)
    assert difference.interval == pytest.approx((0.7001142, 2.4598858), rel=1e-6)
    assert difference.p == pytest.approx(0.00283289, rel=1e-5)


def test_no_interval_below_three_pairs_or_without_spread():
    assert paired_difference([0.8, 0.7], [0.5, 0.6]) == Difference(pytest.approx(0.2), None, None)
    assert paired_difference([0.5] * 4, [0.5] * 4) == Difference(0, None, None)
    shifted = paired_difference([0.1, 0.6, 0.9], [0.2, 0.7, 1.0])  # no spread but that of rounding
    assert shifted == Difference(pytest.approx(-0.1), None, None)
    assert paired_difference([0.8, 0.7, 0.6], [0.5, 0.6, 0.6]).interval is not None


def test_pairs_are_made_by_seed_whatever_the_order():
    runs = [run("none", seed, value) for seed, value in ((1, 0.5), (2, 0.8), (3, 0.1))]
    runs += [run("drop", seed, value) for seed, value in ((3, 0.2), (1, 0.7), (2, 0.9))]
    _, row = summarize(runs, "none")
    assert row.difference == paired_difference([0.2, 0.7, 0.9], [0.1, 0.5, 0.8])


def test_rows_summarize_their_runs():
    runs = [run("none", 1, 0.5), run("drop", 1, 0.6, (0.0, 0.5)), run("none", 2, 0.7)]
    none, drop = summarize([*runs, run("drop", 2, 0.7, (0.0, 0.5))], "none")
    assert (none.n, none.accuracy, none.difference) == (2, pytest.approx(0.6), None)
    assert none.std == pytest.approx(0.02**0.5)
    assert (none.nominal, none.realized) == (None, None)
    assert (drop.nominal, drop.realized) == (pytest.approx(0.25), pytest.approx(0.26))
    assert drop.seconds == 2


def test_sites_without_a_rate_or_a_share_are_left_out_of_the_rates():
    nominal = {"a": [1.0, 1.0], "b": [0.2, 0.4], "c": [None, None]}
    realized = {"a": [None, None], "b": [0.1, 0.5], "c": [0.7, 0.7]}
    assert mean_rates(Result(0.5, 1.0, [1.0], nominal, realized)) == pytest.approx((0.3, 0.3))
    assert mean_rates(Result(0.5, 1.0, [1.0], {}, {})) is None


def test_table_shows_percent_difference_interval_and_rates():
    pairs = [(0.50, 0.60), (0.60, 0.72), (0.55, 0.69)]
    runs = [run("none", seed, base) for seed, (base, _) in enumerate(pairs)]
    runs += [run("drop", seed, value, (0.0, 0.5)) for seed, (_, value) in enumerate(pairs)]
    lines = text(runs).splitlines()
    none = next(line for line in lines if line.startswith("none"))
    drop = next(line for line in lines if line.startswith("drop"))
    assert none.split() == ["none", "3", "55.00", "±", "5.00", "2.0"]
    assert drop.split()[2:5] == ["67.00", "±", "6.24"]
    assert "+12.00 [+7.03, +16.97]" in drop
    assert drop.split()[-3:] == ["0.2500", "0.2600", "2.0"]


def test_table_of_one_seed_has_no_spread():
    lines = text([run("none", 1, 0.5), run("drop", 1, 0.625)])
    assert "±" not in lines
    assert "[+" not in lines
    assert "+12.50" in lines


def test_table_fits_a_terminal_of_80_columns():
    runs = [run("none", seed, seed / 7) for seed in range(4)]
    runs += [run("DropBlock2d", seed, seed**2 / 17, (0.0, 0.5)) for seed in range(4)]
    assert "…" not in text(runs, width=80)


def test_csv_has_a_line_per_run(tmp_path):
    path = tmp_path / "runs.csv"
    write_csv([run("none", 1, 0.5), run("drop", 1, 0.6, (0.0, 0.5))], path)
    with path.open(newline="") as file:
        none, drop = csv.DictReader(file)
    assert (none["condition"], none["nominal"], float(none["accuracy"])) == ("none", "", 0.5)
    assert (drop["seed"], float(drop["loss"]), float(drop["realized"])) == ("1", 0.5, 0.26)
