"""Tables: as wide as the terminal and one line for equal sites; whole in rows and notebooks."""

import copy
import random
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from html import unescape

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    ByDepth,
    ClampGrad,
    ClipGradNorm,
    CosineSchedule,
    DropBlock2d,
    Dropout,
    Dropout2d,
    DropPath,
    Foreign,
    LinearSchedule,
    ScaleGrad,
    StepSchedule,
    ZeroGrad,
    attach,
    layers,
    plan,
)
from dropblock_hooks.quoting import shorten
from dropblock_hooks.tables import WIDTH, Section, Short, Table, Varying


@dataclass(frozen=True)
class Wide:
    values: tuple


def stack(n, **outer):
    """A model with `n` equal layers, and a line of the report for each of its sites."""
    return nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(n)))


def train(model, shape=(2, 2, 9, 9), times=1):
    for _ in range(times):
        model(torch.randn(shape)).sum().backward()


def lines_of(table, **options):
    """The lines of the rows of each section, without title, notes and headings."""
    sections = table.to_text(**options).split("\n\n")
    return [line for part in sections for line in re.split(r"\n-[- ]*\n", part)[1].splitlines()]


def first_cell(line):
    return line.split("  ")[0]


@pytest.mark.parametrize("rate", [0.2, LinearSchedule(0.2, 0.4, epochs=5)], ids=str)
def test_equal_sites_of_one_entry_are_one_line(rate):
    model = stack(9)
    attached = attach(model, {"*": DropBlock2d(rate, 3)})
    train(model, times=3)
    (line,) = lines_of(attached.report())
    shares = [site.realized_rate for site in attached]
    low, high = min(shares), max(shares)
    assert line.startswith("9 sites */DropBlock2d  block_size=3  0.2 ")
    realized = f"{sum(shares) / 9:.3f}, {low:.3f} to {high:.3f}".replace("0.", ".")
    assert f"  {realized}  3      3       9x9" in line
    lines = lines_of(attached.report(), wide=True)
    assert [first_cell(line) for line in lines] == [site.key for site in attached]
    assert all(repr(site.regularizer) in line for site, line in zip(attached, lines, strict=True))


def test_a_site_that_differs_has_a_line_of_its_own():
    model = stack(6)
    attached = attach(model, {"*": Dropout2d(0.2)})
    train(model)
    model[3].eval()
    train(model)
    same, other = lines_of(attached.report())
    assert same.startswith("5 of 6 sites */Dropout2d ")
    assert other.startswith("3/Dropout2d ")
    assert other.split()[-3:] == ["2", "1", "9x9"]


def test_sites_of_different_entries_are_different_lines():
    model = stack(6)
    spec = {"[012]": [Dropout2d(0.2), Dropout(0.1)], "[34]": Dropout2d(0.2), "5": Dropout2d(0.2)}
    attached = attach(model, spec)
    assert [first_cell(line) for line in lines_of(attached.report())] == [
        "3 sites [012]/Dropout2d",
        "3 sites [012]/Dropout",
        "2 sites [34]/Dropout2d",
        "5/Dropout2d",
    ]


def test_each_line_names_its_sites():
    """Whatever rows are equal: what the lines of single sites leave out is in the line of many."""
    generator = random.Random(0)
    for _ in range(50):
        n = generator.randint(1, 12)
        rows = [Wide((f"a.{i}", generator.choice("xyz"), generator.random())) for i in range(n)]
        columns = {
            "name": lambda row: row.values[0],
            "kept": lambda row: row.values[1],
            "measured": lambda row: Varying(row.values[2]),
        }
        entry = Section(rows, columns, entry=lambda row: "a.*")
        left = {row.values[0]: row.values[1] for row in rows}
        merged = []
        for line in lines_of(Table(rows, columns, sections=[entry])):
            name, kept, *_ = re.split(" {2,}", line)
            if name in left:
                assert left.pop(name) == kept
            else:
                merged.append((name, kept))
        if merged:
            ((name, kept),) = merged
            of = "" if len(left) == n else f" of {n}"
            assert name == f"{len(left)}{of} sites a.*"
            assert set(left.values()) == {kept}
        else:
            assert left == {}


def test_a_common_prefix_of_names_is_printed_once():
    block = nn.ModuleDict({"multi_head_self_attention_projection": nn.Linear(4, 4)})
    blocks = nn.ModuleList([copy.deepcopy(block) for _ in range(12)])
    model = nn.ModuleDict({"vision_tower": nn.ModuleDict({"transformer_encoder_blocks": blocks})})
    attached = attach(model, {"**.multi_head*": DropPath(ByDepth(0.0, 0.1))})
    prefix = "vision_tower.transformer_encoder_blocks."
    text = attached.report().to_text()
    assert text.count(prefix) == 1
    assert f"names begin with {prefix}\n" in text
    names = [prefix + first_cell(line) for line in lines_of(attached.report())]
    assert names == [site.key for site in attached]
    assert attached.report().to_text(wide=True).count(prefix) == 12


def test_columns_say_their_windows():
    model = stack(3)
    spec = {"*": [Dropout2d(0.2), ClipGradNorm(1.0), ActivationStats()]}
    attached = attach(model, spec)
    train(model)
    text = str(attached)
    for part in ("realized", "changed", "norms before the bound, ", "ActivationStats, "):
        assert part in text
    assert (text.count("this epoch"), text.count("last epoch")) == (4, 0)
    attached.step()
    text = str(attached)
    assert (text.count("this epoch"), text.count("last epoch")) == (0, 4)
    with attached.paused():
        train(model)
    assert str(attached).count("last epoch") == 4, "nothing was counted in this one"
    train(model[:2])
    shown, silent = lines_of(attached.report())[:2]
    assert shown.startswith("2 of 3 sites")
    assert silent.startswith("2/Dropout2d")
    assert "  -  " in silent


@pytest.mark.parametrize("width", [80, 100, 200])
def test_tables_are_as_wide_as_the_terminal(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    columns = {"a": lambda row: row.values[0], "b": lambda row: Short(row.values[1])}
    table = Table([Wide(("name", "l" * 300))], columns)
    assert max(map(len, str(table).splitlines())) == width
    assert "l" * 300 in table.to_text(width, wide=True)


def test_names_and_numbers_are_never_shortened():
    columns = {"a": lambda row: row.values[0], "b": lambda row: row.values[1]}
    rows = [Wide(("n" * 70, "1" * 70))]
    assert "…" not in Table(rows, columns).to_text(80)


@pytest.mark.parametrize("length", [1, 9, 300])
@pytest.mark.parametrize("columns", [1, 5, 20])
def test_any_number_of_columns(columns, length):
    heads = {f"column {i}": (lambda row, i=i: row.values[i]) for i in range(columns)}
    rows = [Wide(tuple("l" * length for _ in range(columns)))] * 2
    lines = Table(rows, heads, "title").to_text(80).splitlines()
    assert lines[0] == "title"
    assert len(lines) == 5
    assert "column" in lines[1]


def test_all_that_is_long_is_printed():
    steps = StepSchedule({float(t): t / 100 for t in range(40)})
    rate = ByDepth(LinearSchedule(0.0, 0.1, 5, delay=2.5), CosineSchedule(0.0, 0.25, 7))
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU())
    spec = {
        "0": [DropBlock2d(rate, 9, calibration="paper", normalize="sample"), Dropout(0)],
        "1": [Dropout2d(steps), ClampGrad(-1.23456789e-9, rate), Foreign(nn.Dropout, p=rate)],
    }
    x = torch.randn(2, 2, 9, 9)
    planned = plan(model, spec, x)
    attached = attach(model, spec)
    model(x).sum().backward()
    for table in (planned, attached.report(), layers(model, x)):
        text = table.to_text()
        assert max(map(len, text.splitlines())) <= WIDTH + 20  # names and numbers are whole
        assert all(line.count("  ") or len(line) < WIDTH for line in text.splitlines())
        assert len(table.to_dict()) == len(table)
    assert attached.report()[0].regularizer == repr(attached.sites[0].regularizer)


def test_notebooks_get_everything_whole_and_escaped():
    model = nn.Sequential()
    model.add_module("<b>&'" + "n" * 200, nn.Conv2d(2, 2, 3))
    spec = {"type:Conv2d": [DropBlock2d(LinearSchedule(0.0, 0.1, 5), 9), ClipGradNorm(1.0)]}
    planned = plan(model, spec)  # without shapes, which is a warning
    for table in (planned, attach(model, spec).report()):
        page = table._repr_html_()
        tag, _, text = page.partition(">")
        assert tag.startswith("<pre ")
        assert "<b>" not in text
        assert unescape(text) == table.to_text(wide=True) + "</pre>"


def test_a_plan_s_problems_are_wrapped_and_whole_words_stay():
    model = nn.Sequential()
    model.add_module("a_layer_with_a_long_name", nn.Linear(2, 2))
    planned = plan(model, {"*": DropBlock2d(0.1)}, torch.ones(2, 2))
    (problem,) = planned.problems
    assert len(problem) > WIDTH
    assert max(map(len, planned.to_text().splitlines())) <= WIDTH
    assert " ".join(problem.split()) in " ".join(planned.to_text().split())


def test_a_short_cell_is_whole_where_there_is_no_limit():
    columns = {"a": lambda row: "name", "b": lambda row: Short("short", "whole")}
    table = Table([Wide(())], columns)
    assert (lines_of(table), lines_of(table, wide=True)) == (["name  short"], ["name  whole"])


def test_a_column_in_which_nothing_stands_is_left_out():
    columns = {"a": lambda row: row.values[0], "b": lambda row: ""}
    assert Table([Wide(("x",))], columns).to_text().splitlines() == ["a", "-", "x"]
    assert Table([], columns).to_text().splitlines() == ["a  b", "-  -"]


def test_shortened_in_the_middle():
    text = "start" + "l" * 300 + "end"
    for width in range(3, 120):
        short = shorten(text, width)
        assert len(short) == width
        assert fnmatch(short, "s*d")
    assert shorten("short", 9) == "short"


def test_lines_in_a_cell():
    table = Table([Wide(("a\nb\tc",))], {"a": lambda row: row.values[0]}, "two\nlines")
    assert str(table).splitlines() == ["two lines", "a", "-----", "a b c"]


def test_rows_of_gradients_have_headings_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    spec = {
        "0": [Dropout(0.5), ClampGrad(-1.0, 2.0), ScaleGrad(-0.1)],
        "1": [ClampGrad(min=-3.0), ClipGradNorm(0.5)],
        "param:1.bias": ClampGrad(max=4.0),
    }
    attached = attach(model, spec)
    train(model, (3, 2))
    above, below, norms = attached.report().to_text().split("\n\n")
    assert "realized" in above
    assert "Grad" not in above
    for part in ("min=-1, max=2", "scale=-0.1", "min=-3", "max_norm=0.5", "max=4"):
        assert f"  {part}  " in below
    assert re.findall(r"^\S+/\S+", norms, re.MULTILINE) == [
        "0/ClampGrad", "1/ClampGrad", "1/ClipGradNorm", "1.bias/ClampGrad",
    ]  # fmt: skip
    only = attach(nn.Sequential(nn.Linear(2, 2)), {"0": ZeroGrad()})
    assert "realized" not in str(only)
    assert only.report().to_dict()[0]["values"] == {}


def test_one_site_is_no_plural():
    attached = attach(nn.Sequential(nn.ReLU()), {"0": Dropout()})
    assert repr(attached) == "<Attachment: 1 site on Sequential, epoch 0>"
