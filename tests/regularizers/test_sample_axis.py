"""What takes axis 0 for the samples: refused where it may be another, unless layout= is said."""

import copy

import pytest
import torch
from torch import nn

import dropblock_hooks as r


class Adds(nn.Module):
    """A residual block around a linear layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x)


class Model(nn.Module):
    """A sequence layer between a block and a head."""

    def __init__(self, sequence, takes=1):
        super().__init__()
        self.block, self.sequence, self.head = Adds(), sequence, nn.Linear(8, 3)
        self.takes = takes

    def forward(self, x):
        y = self.sequence(*[self.block(x)] * self.takes)
        return self.head(y[0] if isinstance(y, tuple) else y)


def sequences(batch_first):
    options = {"batch_first": batch_first}
    return {
        "LSTM": Model(nn.LSTM(8, 8, **options)),
        "MultiheadAttention": Model(nn.MultiheadAttention(8, 2, **options), takes=3),
        "TransformerEncoderLayer": Model(nn.TransformerEncoderLayer(8, 2, 8, 0.0, **options)),
        "TransformerEncoder": Model(
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 8, 0.0, **options), 1, enable_nested_tensor=False
            )
        ),
    }


class RowDropPath(nn.Module):
    """A peer's."""

    def forward(self, x):
        return x


RowDropPath.__name__ = "DropPath"

SAMPLEWISE = {
    "DropPath": r.DropPath(0.5),
    "StochasticDepth": r.StochasticDepth(0.5),
    "ClipGradNorm": r.ClipGradNorm(1.0, per="sample"),
    "Foreign": r.Foreign(RowDropPath),
    "Dropout1d": r.Dropout1d(0.5),
    "DropBlock1d": r.DropBlock1d(0.5, 3, normalize="sample", share_channels=True),
}


def _with(regularizer, **options):
    changed = copy.copy(regularizer)
    for name, value in options.items():
        object.__setattr__(changed, name, value)
    return changed


def tuples(model):
    return isinstance(model.sequence, nn.RNNBase | nn.MultiheadAttention)


@pytest.mark.pairwise
@pytest.mark.parametrize("layer", ["block", "sequence", "head"])
@pytest.mark.parametrize("kind", sequences(False))
@pytest.mark.parametrize("name", SAMPLEWISE)
def test_time_is_not_taken_for_samples(name, kind, layer):
    if name == "StochasticDepth" and layer == "head":
        return  # no residual block
    regularizer = SAMPLEWISE[name]
    model, x = sequences(False)[kind], torch.randn(5, 4, 8)
    index = 0 if layer == "sequence" and tuples(model) else None
    refused = pytest.raises(r.SiteError, match=r"batch_first=False.*say layout=")
    with r.attach(model, {layer: _with(regularizer, index=index)}), refused:
        model(x)
    with r.attach(model, {layer: _with(regularizer, index=index, layout="NLC")}) as told:
        model(x).sum().backward()
        assert told.sites[0].active_calls == 1
    model = sequences(True)[kind]
    with r.attach(model, {layer: _with(regularizer, index=index)}) as first:
        model(x).sum().backward()
        assert first.sites[0].active_calls == 1


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", sequences(False))
def test_a_single_sequence_has_no_samples(kind, batch_first):
    model = sequences(batch_first)[kind]
    index = 0 if tuples(model) else None
    refused = pytest.raises(r.SiteError, match=r"no axis of samples.*3 axes")
    with r.attach(model, {"sequence": r.DropPath(0.5, index=index)}), refused:
        model(torch.randn(5, 8))
    with r.attach(model, {"head": r.DropPath(0.5)}) as attached:  # a batch of vectors
        model(torch.randn(5, 8))
    assert attached.sites[0].active_calls == 1


MAPS = {
    "Conv1d": (nn.Conv1d(4, 4, 3), 1),
    "Conv2d": (nn.Conv2d(4, 4, 3), 2),
    "Conv3d": (nn.Conv3d(4, 4, 3), 3),
    "MaxPool2d": (nn.MaxPool2d(2), 2),
    "InstanceNorm2d": (nn.InstanceNorm2d(4), 2),
}


@pytest.mark.parametrize(
    "regularizer",
    [r.DropPath(0.5), r.ClipGradNorm(1.0, per="sample"), r.ClipGradNorm(1.0, per="channel")],
    ids=str,
)
@pytest.mark.parametrize("kind", MAPS)
def test_a_single_map_has_no_samples(kind, regularizer):
    layer, rank = MAPS[kind]
    model = nn.Sequential(copy.deepcopy(layer))
    x = torch.randn(4, *[6] * rank, requires_grad=True)
    with r.attach(model, {"0": regularizer}) as attached:
        with pytest.raises(r.SiteError, match=f"no axis of samples.*{rank + 2} axes"):
            model(x)
        model(x[None]).sum().backward()
    assert attached.sites[0].active_calls == 1
