"""Tables: as wide as the terminal and one line for equal sites; whole in rows and notebooks."""

import copy
import random
import re
from dataclasses import dataclass
from html import unescape

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    ByDepth,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    Dropout2d,
    DropPath,
    LinearSchedule,
    attach,
    plan,
)
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
    realized = f"{sum(shares) / 9:.3f}, {low:.3f} to {high:.3f}"
    assert f"  {realized}  3      3       9x9" in line
    lines = lines_of(attached.report(), wide=True)
    assert [first_cell(line) for line in lines] == [site.key for site in attached]
    assert all(repr(site.regularizer) in line for site, line in zip(attached, lines, strict=True))


def test_small_norms_of_one_line_keep_their_digits():
    """Only shares have three decimals, in which a small norm would look like zero."""
    norms = [0.00008125, 0.032, 0.001]
    columns = {"name": lambda row: row.values[0], "norm": lambda row: Varying(row.values[1])}
    rows = [Wide((f"a.{i}", norm)) for i, norm in enumerate(norms)]
    table = Table(rows, columns, sections=[Section(rows, columns, entry=lambda row: "a.*")])
    (line,) = lines_of(table)
    assert line.split("  ") == ["3 sites a.*", "0.011, 8.12e-05 to 0.032"]


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
            neighbors = re.fullmatch(r"(\d+) sites a\.(\d+) to a\.(\d+)", name)
            if name in left:
                assert left.pop(name) == kept
            elif neighbors:
                number, first, last = map(int, neighbors.groups())
                assert number == last - first + 1 > 1
                assert {left.pop(f"a.{i}") for i in range(first, last + 1)} == {kept}
            else:
                merged.append((name, kept))
        if merged:
            ((name, kept),) = merged
            of = "" if len(left) == n else f" of {n}"
            assert name == f"{len(left)}{of} sites a.*"
            assert set(left.values()) == {kept}
        else:
            assert left == {}


def test_neighbors_share_a_line_of_a_plan():
    """The layers of a stage are equal, and those of the next stage see a smaller map."""
    stages = [[*stack(4)], [nn.MaxPool2d(2), *stack(2)], [nn.MaxPool2d(2), *stack(1)]]
    layers = nn.Sequential(*(layer for stage in stages for layer in stage))
    model = nn.Sequential()
    model.add_module("network_with_stages", layers)
    table = plan(model, {"type:Conv2d": DropBlock2d(0.1, 3)}, torch.ones(2, 2, 32, 32))
    assert [first_cell(line) for line in lines_of(table)] == [
        "4 of 7 sites type:Conv2d/DropBlock2d",
        "2 sites 5 to 6/DropBlock2d",
        "8/DropBlock2d",
    ]
    assert "names begin with network_with_stages." in str(table)
    assert len(lines_of(table, wide=True)) == 7


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


def test_a_single_name_is_printed_as_a_whole():
    model = nn.ModuleDict({"vision_tower": nn.ModuleList([nn.ReLU(), nn.ReLU()])})
    attached = attach(model, {"vision_tower.1": Dropout2d(0.2)})
    assert [first_cell(line) for line in lines_of(attached.report())] == [
        "vision_tower.1/Dropout2d"
    ]
    assert "names begin" not in str(attached)


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


def test_a_pipe_or_a_file_gets_whole_texts_and_wrapped_notes(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    columns = {"a": lambda row: row.values[0], "b": lambda row: Short(row.values[1])}
    rows = [Wide(("name", "l" * 300))]
    table = Table(rows, columns, notes={"notes": ["word " * 60]})
    print(table)
    row, *notes = capsys.readouterr().out.splitlines()[2:]
    assert row == f"name  {'l' * 300}"
    assert max(map(len, notes)) <= WIDTH


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
