"""Tables: at most 100 columns of a terminal, whole in rows, dicts and notebooks."""

import copy
import random
from dataclasses import dataclass
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from dropblock_hooks import (
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
    WindowSchedule,
    ZeroGrad,
    attach,
    layers,
    plan,
)
from dropblock_hooks.tables import UNLIMITED, WIDTH, Forms, Table, elide, fit


def too_wide(text):
    return [line for line in text.splitlines() if len(line) > WIDTH]


def nested(name, depth):
    """A model of one layer, `depth` modules below, each of that name."""
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(inplace=True))
    for _ in range(depth):
        outer = nn.Sequential()
        outer.add_module(name, model)
        model = outer
    return model


@pytest.mark.parametrize(
    ("letter", "length", "depth"),
    [("層", 200, 1), ("l", 200, 1), ("l", 40, 6), ("l", 1, 60), ("l", 3, 1)],
)
def test_no_line_is_wider_however_names_and_regularizers_are(letter, length, depth):
    model = nested(letter * length, depth)
    steps = StepSchedule({float(t): t / 100 for t in range(40)})
    rate = ByDepth(LinearSchedule(0.0, 0.1, 5, delay=2.5), CosineSchedule(0.0, 0.25, 7))
    spec = {
        "type:Conv2d": [DropBlock2d(rate, 9, calibration="paper", normalize="sample"), Dropout(0)],
        "type:ReLU": [
            Dropout2d(steps),
            ClampGrad(-1.23456789e-9, rate),
            Foreign(nn.Dropout, p=rate),
        ],
    }
    x = torch.randn(2, 2, 9, 9)
    planned = plan(model, spec, x)
    attached = attach(model, spec)
    model(x).sum().backward()
    tables = planned, attached.report(), layers(model, x)
    for table in tables:
        assert too_wide(str(table)) == []
        assert len(table.to_dict()) == len(table)
    assert not too_wide(str(attached))
    site = attached.sites[0]
    assert attached.report()[0].site == site.key
    assert attached.report()[0].regularizer == repr(site.regularizer)
    assert site.key in attached._repr_html_()
    if letter == "l" and length == 3:
        assert site.key in str(attached)
    elif length * depth > 100:
        assert "…" in str(attached)


class Cells(HTMLParser):
    """The texts in a page by tag."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open = {}, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        assert not attrs
        self.open.append(tag)
        self.found.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.found[self.open[-1]][-1] += data


def test_notebooks_get_everything_whole_and_escaped():
    model = nested("<b>&'" + "n" * 200, 1)
    spec = {"type:Conv2d": [DropBlock2d(LinearSchedule(0.0, 0.1, 5), 9), ClipGradNorm(1.0)]}
    attached = attach(model, spec)
    attached.remove()
    planned = plan(model, spec)  # without shapes, which is a warning
    page = Cells(attached.report()._repr_html_())
    assert not page.open
    assert {"realized", "changed"} <= set(page.found["th"])
    assert [site.key for site in attached] == [c for c in page.found["td"] if c.startswith("<b>")]
    assert repr(attached.sites[0].regularizer) in page.found["td"]
    assert "2 sites on Sequential, epoch 0, removed" in page.found["p"]
    page = Cells(planned._repr_html_())
    assert tuple(page.found["li"]) == (*planned.problems, *planned.warnings)
    assert planned.warnings
    assert page.found["p"] == ["2 sites on Sequential", "warnings:"]
    assert not any("<b>" in tag for tag in page.found)


def test_a_plan_s_problems_are_wrapped_and_whole_words_stay():
    model = nn.Sequential()
    model.add_module("a_layer_with_a_long_name", nn.Linear(2, 2))
    planned = plan(model, {"*": DropBlock2d(0.1)}, torch.ones(2, 2))
    (problem,) = planned.problems
    assert len(problem) > WIDTH
    assert too_wide(str(planned)) == []
    assert " ".join(problem.split()) in " ".join(str(planned).split())


@dataclass(frozen=True)
class Wide:
    values: tuple


@pytest.mark.parametrize("columns", [1, 5, 20])
@pytest.mark.parametrize("length", [1, 9, 300])
def test_any_number_of_columns(columns, length):
    heads = {f"column {i}": (lambda row, i=i: row.values[i]) for i in range(columns)}
    rows = [Wide(tuple("l" * length for _ in range(columns)))] * 2
    text = str(Table(rows, heads, "l" * length))
    assert too_wide(text) == []
    lines = text.splitlines()[1:]
    assert len(lines) == 4
    assert "column" in lines[0] or columns > 7


def test_columns_share_what_there_is():
    generator = random.Random(0)
    for _ in range(500):
        natural = [generator.randint(1, 150) for _ in range(generator.randint(1, 7))]
        heads = [min(n, generator.randint(1, 12)) for n in natural]
        widths = fit(natural, heads)
        total = sum(widths) + 2 * (len(widths) - 1)
        assert len(widths) == len(natural)
        assert all(0 < w <= n for w, n in zip(widths, natural, strict=True))
        if widths != natural:
            assert total == WIDTH
            widest = max(w for w, n in zip(widths, natural, strict=True) if w < n)
            assert all(w == n or w >= min(8, n) for w, n in zip(widths, natural, strict=True))
            assert all(n >= w for w, n in zip(widths, natural, strict=True) if w > widest)


def test_a_cell_has_its_longest_form_that_fits():
    columns = {"a": lambda row: Forms(("x" * 90, "y" * 50, "z")), "b": lambda row: row.values[0]}
    for length, letter in ((8, "x"), (9, "y"), (48, "y"), (49, "z"), (200, "z")):
        assert letter in str(Table([Wide(("b" * length,))], columns)).splitlines()[2]


def test_a_column_in_which_nothing_stands_is_left_out():
    columns = {"a": lambda row: row.values[0], "b": lambda row: Forms(("b" * 9, ""))}
    table = Table([Wide(("x" * 30,))], columns)
    assert table.to_text(41).splitlines()[0].split() == ["a", "b"]
    assert table.to_text(40).splitlines() == ["a", "-" * 30, "x" * 30]
    assert "bbb" in table._repr_html_()


def test_any_width():
    table = Table([Wide(("l" * 300,))], {"a": lambda row: row.values[0]}, "t" * 300)
    for width in (40, 80, 200):
        assert max(map(len, table.to_text(width).splitlines())) == width
    assert table.to_text(UNLIMITED).splitlines() == ["t" * 300, "a", "-" * 300, "l" * 300]


def test_shortened_in_the_middle():
    text = "start" + "l" * 300 + "end"
    for width in range(3, 120):
        short = elide(text, width)
        assert len(short) == width
        assert short.startswith("s")
        assert short.endswith("d")
    assert elide("short") == "short"


def test_lines_in_a_cell():
    table = Table([Wide(("a\nb\tc",))], {"a": lambda row: row.values[0]}, "two\nlines")
    assert str(table).splitlines() == ["two lines", "a", "-----", "a b c"]


@pytest.mark.parametrize(
    ("regularizer", "short"),
    [
        (DropBlock2d(LinearSchedule(0.0, 0.1, epochs=5), 7), "p=0 to 0.1, block_size=7"),
        (Dropout(WindowSchedule(0.2, 0, 5)), "p=0 to 0.2"),
        (Foreign(nn.Dropout2d, p=LinearSchedule(0.1, 0.3, 3)), "p=0.1 to 0.3"),
        (ClampGrad(LinearSchedule(-2, -1, 3), 1.0), "min=-2 to -1, max=1.0"),
        (Dropout(abs), "p=abs"),
        (ZeroGrad(), "ZeroGrad()"),
        (Foreign(nn.Dropout2d), "Foreign(Dropout2d)"),
    ],
)
def test_schedules_are_shortened(regularizer, short):
    from dropblock_hooks.attachment.report import shortened

    assert shortened(regularizer).texts[0] == repr(regularizer)
    assert shortened(regularizer).texts[-1] == short


def test_rows_of_gradients_have_headings_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    spec = {
        "0": [Dropout(0.5), ClampGrad(-1.0, 2.0), ScaleGrad(-0.1)],
        "1": [ClampGrad(min=-3.0), ClipGradNorm(0.5)],
        "param:1.bias": ClampGrad(max=4.0),
    }
    attached = attach(model, spec)
    model(torch.ones(3, 2)).sum().backward()
    above, below, norms = str(attached).split("\n\n")
    assert "realized" in above
    assert "Grad" not in above
    note, heads, _, *rows = below.splitlines()
    assert "changed: share of their values" in note
    assert heads.split("  ")[0] == "site"
    assert [" ".join(h.split()) for h in heads.split("  ") if h] == [
        "site", "regularizer", "bound now", "changed", "calls", "active",
    ]  # fmt: skip
    note, heads, _, *sized = norms.splitlines()
    assert note.startswith("norms before the bound")
    assert heads.split() == ["site", "mean", "p50", "p90", "p99", "largest"]
    assert [row.split()[0] for row in sized] == [
        "0/ClampGrad", "1/ClampGrad", "1/ClipGradNorm", "1.bias/ClampGrad",
    ]  # fmt: skip
    for row, bound in zip(rows, ["-1 to 2", "x -0.1", ">= -3", "0.5", "<= 4"], strict=True):
        assert f"  {bound}  " in row
    only = attach(nn.Sequential(nn.Linear(2, 2)), {"0": ZeroGrad()})
    assert "realized" not in str(only)
    assert only.report().to_dict()[0]["values"] == {}


def test_one_site_is_no_plural():
    attached = attach(nn.Sequential(nn.ReLU()), {"0": Dropout()})
    assert repr(attached) == "<Attachment: 1 site on Sequential, epoch 0>"


def test_shortened_names_of_different_layers_stay_different():
    block = nn.ModuleDict({"multi_head_self_attention_projection": nn.Linear(4, 4)})
    blocks = nn.ModuleList([block])
    blocks.extend(copy.deepcopy(blocks[0]) for _ in range(11))
    model = nn.ModuleDict({"vision_tower": nn.ModuleDict({"transformer_encoder_blocks": blocks})})
    rate, bound = LinearSchedule(0, 0.1, epochs=3), CosineSchedule(1, 2, epochs=5)
    both = [DropPath(rate), ClipGradNorm(bound, per="sample")]
    attached = attach(model, {"**.multi_head*": both})
    lines = [line for line in str(attached).splitlines() if "…" in line]
    first_cells = [line.split("  ")[0] for line in lines]
    assert len(set(first_cells)) == len(first_cells) == 24
    assert max(map(len, str(attached).splitlines())) <= 100
