"""builtin: what a model drops already."""

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ByDepth,
    LinearSchedule,
    Retune,
    Select,
    Spec,
    SpecError,
    attach,
    builtin,
)

timm = pytest.importorskip("timm", reason="the layers are timm's")


class Block(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)
        self.drop_path = timm.layers.DropPath(rate) if rate else nn.Identity()

    def forward(self, x):
        return x + self.drop_path(self.drop(self.fc(x)))


class Net(nn.Module):
    """Blocks whose rates grow, and rates that modules hold themselves."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(rate) for rate in (0.0, 0.1, 0.2)))
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        self.head_dropout, self.drop_last, self.prob, self.p = 0.4, 1, 0.5, 0.5
        self.drop_text = "no"

    def forward(self, x):
        x = self.attention(*[self.blocks(x)] * 3)[0]
        return nn.functional.dropout(x, self.head_dropout, self.training)


def rows_of(model, **options):
    return [(row.selector, row.type, row.rate, row.on) for row in builtin(model, **options)]


ROWS = [
    ("attr:head_dropout", "Net", 0.4, True),
    ("blocks.0.drop", "Dropout", 0.1, True),
    ("blocks.1.drop", "Dropout", 0.1, True),
    ("blocks.1.drop_path", "DropPath", 0.1, True),
    ("blocks.2.drop", "Dropout", 0.1, True),
    ("blocks.2.drop_path", "DropPath", 0.2, True),
    ("attr:attention.dropout", "MultiheadAttention", 0.3, True),
]


def test_rows():
    assert rows_of(Net()) == ROWS
    text = str(builtin(Net()))
    assert text.startswith("7 rates in Net\n")
    assert '"attr:attention.dropout": Retune(p=0.3)' in text
    assert "held by" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_off_are_rates_of_0_and_layers_in_evaluation():
    model = nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.5), nn.Dropout(0.5)).train()
    model[2].eval()
    assert [row.on for row in builtin(model)] == [False, True, False]


class Stores(nn.Module):
    """Two rates that only ``__init__`` sees, and two that a forward reads."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.drop_rate = self.used_drop = self.fc.drop_alone = self.fc.drop_prob = 0.3

    def forward(self, x):
        return nn.functional.dropout(self.fc(x), self.used_drop + self.fc.drop_prob)


def test_off_are_attributes_that_nothing_reads():
    on = {row.selector: row.on for row in builtin(Stores())}
    assert on == {
        "attr:drop_rate": False,
        "attr:used_drop": True,
        "attr:fc.drop_alone": False,
        "attr:fc.drop_prob": True,
    }


def test_a_model_without_any():
    found = builtin(nn.Sequential(nn.Linear(3, 3), nn.Identity()))
    assert len(found) == 0
    assert str(found).startswith("0 rates in Sequential")
    with pytest.raises(ValueError, match="drops nothing by itself: there is nothing to retune"):
        found.spec()


def test_what_is_retuned_shows_the_rate_that_holds():
    model = Net()
    spec = {
        "blocks.*.drop": Retune(p=LinearSchedule(0.0, 0.6, 4)),
        "attr:head_dropout": Retune(0.5),
    }
    attached = attach(model, spec)
    model(torch.ones(2, 3, 4))
    attached.step(2)
    assert model.blocks[0].drop.p == 0
    rates = {row.selector: (row.rate, row.retuned) for row in builtin(model)}
    assert rates["blocks.0.drop"] == (pytest.approx(0.4), "blocks.0.drop/Retune")
    assert rates["attr:head_dropout"] == (0.5, "head_dropout/Retune")
    assert rates["blocks.1.drop_path"] == (0.1, None)
    assert "held by" in str(builtin(model))
    with attached.paused():
        assert rows_of(model) == ROWS
    attached.remove()
    assert rows_of(model) == ROWS


# Specs ---------------------------------------------------------------------------------------


def rates_under(spec):
    model = Net()
    return {site.name: site.rate for site in attach(model, spec)}


def test_a_spec_keeps_each_rate():
    spec = builtin(Net()).spec()
    assert rates_under(spec) == {name.removeprefix("attr:"): rate for name, _, rate, _ in ROWS}
    assert "blocks.*.drop" in spec.to_plain()


def test_a_spec_of_one_rate_leaves_identities_out():
    spec = builtin(Net()).spec(p=0.25)
    rates = rates_under(spec)
    assert rates.keys() == {name.removeprefix("attr:") for name, *_ in ROWS}
    assert set(rates.values()) == {0.25}
    assert repr(Select(names=("blocks.1.drop_path", "blocks.2.drop_path"))) in repr(spec)
    by_depth = rates_under(builtin(Net()).spec(p=ByDepth(0.0, 0.2)))
    assert [by_depth[f"blocks.{i}.drop_path"] for i in (1, 2)] == [0.0, 0.2]


@pytest.mark.parametrize("p", [None, 0.25, ByDepth(0.0, 0.2), LinearSchedule(0.0, 0.2, epochs=3)])
def test_a_spec_is_written_and_read(p, tmp_path):
    spec = builtin(Net()).spec(p=p)
    spec.save(tmp_path / "spec.yaml")
    assert Spec.load(tmp_path / "spec.yaml") == spec
    attach(Net(), tmp_path / "spec.yaml")


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_drops_between_its_layers_only(cls):
    model = nn.Sequential(cls(3, 3), cls(3, 3, 2, dropout=0.1))
    assert [row.name for row in builtin(model).rows] == ["1.dropout"]
    attach(model, builtin(model).spec(p=0.5)).remove()
    with pytest.raises(SpecError, match="drops between its layers, and this one has one layer"):
        attach(model, {"attr:0.dropout": Retune(0.5)})
