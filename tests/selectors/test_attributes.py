"""attr: selectors: the numbers that modules hold as rates."""

import pytest
import torch
from torch import nn

from dropblock_hooks import ClipGradNorm, Dropout, Retune, Select, SpecError, attach


class Layer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.fc, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)
        self.dropout = dropout
        self.attention_dropout = 0.25

    def forward(self, x):
        return self.drop(self.fc(x))


class Holder(nn.Module):
    """Holds rates, and what is none, under names of rates."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(0.0), Layer(1)])
        self.lstm = nn.LSTM(3, 3, 2, dropout=0.5)
        self.drop_rate, self.prob_mask, self.p, self.threshold = 0.125, 0.0, 0.5, 0.75
        self.drop_tensor, self.drop_text, self.drop_bool = torch.tensor(0.5), "0.5", True
        self.drop_none, self.drop_large, self.drop_negative = None, 2.0, -0.1
        self.drop_nan = float("nan")
        self.register_buffer("drop_buffer", torch.tensor(0.5))

    of_class_dropout = 0.5

    @property
    def drop_property(self):
        return 0.5

    def forward(self, x):
        return x


MATCHES = {
    "attr:drop_rate": ["drop_rate"],
    "attr:layers.1.*dropout": ["layers.1.dropout", "layers.1.attention_dropout"],
    Select("attr:layers.*.dropout", where=lambda name, module: module.dropout == 1): [
        "layers.1.dropout"
    ],
    "attr:*": ["drop_rate", "prob_mask", "p"],
    "attr:layers.*.drop.p": ["layers.0.drop.p", "layers.1.drop.p"],
    r"attr:re:layers\.[01]\.dropout": ["layers.0.dropout", "layers.1.dropout"],
}


@pytest.mark.parametrize("selector", MATCHES, ids=str)
def test_matches(selector):
    expected = MATCHES[selector]
    attached = attach(Holder(), {selector: Retune(p=0.25)})
    assert [site.name for site in attached] == expected
    assert [site.at for site in attached] == ["attribute"] * len(expected)


NO_RATES = [
    "zzz*", "re:zzz", "nowhere.p", "drop_tensor", "drop_buffer", "drop_text", "drop_bool",
    "drop_none", "drop_large", "drop_negative", "drop_nan", "threshold", "drop_property",
    "of_class_dropout", "layers.0.fc.in_features", "layers.0.training",
]  # fmt: skip
NOTHING = {
    **{f"attr:{name}": r"matches nothing: a rate is a number in \[0, 1\]" for name in NO_RATES},
    "attr:drop_rato": r"'attr:drop_rato' matches nothing.* \(closest: attr:drop_rate",
    "attr:re:(": "'attr:re:\\(' is not a pattern",
    "attr:": "'attr:' matches nothing",
    "attr:lstm": r"write .attr:lstm\.\*\*., because",
    "atr:dropout": r"unknown prefix atr: \(closest: attr\)",
    Select(names="attr:drop_*", expect=7): "expected 7 layers, got 1: drop_rate",
}


@pytest.mark.parametrize("selector", NOTHING, ids=str)
def test_what_matches_nothing(selector):
    with pytest.raises(SpecError, match=f"^1 problem in the spec:\n.*{NOTHING[selector]}"):
        attach(Holder(), {selector: Retune(p=0.25)})


@pytest.mark.parametrize("other", [Dropout(p=0.2), ClipGradNorm(max_norm=1.0)], ids=repr)
def test_only_retune_is_put_on_a_rate(other):
    model = Holder()
    with pytest.raises(SpecError, match=r"1 problem.*\n.*an attribute takes only Retune"):
        attach(model, {"attr:drop_rate": other})
    assert model.drop_rate == 0.125
