"""Layers that return packed sequences, nested tensors or named tuples that check their fields."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dropblock_hooks import (
    Capture,
    ClipGradNorm,
    Dropout,
    Dropout1d,
    SiteError,
    Watchdog,
    attach,
    capture,
    watch,
)

X, LENGTHS = torch.linspace(-1, 1, 4 * 9 * 6).reshape(4, 9, 6), torch.tensor([3, 9, 1, 5])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(6, 8, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(16, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = self.lstm(packed)
        assert isinstance(y, PackedSequence)
        return self.fc(pad_packed_sequence(y, batch_first=True)[0].mean(1))


class CheckedFields(NamedTuple):
    values: torch.Tensor
    count: int


class Checked(CheckedFields):
    def __new__(cls, values, count):
        if not isinstance(count, int):
            raise TypeError("count must be a number")
        return super().__new__(cls, values, count)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.pair = nn.Identity()

    def forward(self, x, lengths):
        return self.pair(Checked(self.fc(x), len(lengths))).values


opened = pytest.mark.skipif(
    torch.__version__ < "2.9",
    reason="torch 2.6 does not open tuples of a class that derives from a named tuple",
)


@opened
@pytest.mark.parametrize(("model", "layer"), [(Recurrent(), "lstm"), (Counts(), "pair")])
def test_observers_see_the_tensors_and_leave_the_output(model, layer):
    bare = copy.deepcopy(model)
    wanted = bare(X, LENGTHS)
    wanted.sum().backward()
    spec = {layer: Capture(gradients=True)}
    with attach(model, spec) as attached, watch(model, every=1) as dog:
        y = model(X, LENGTHS)
        y.sum().backward()
        dog.step()
        (record,) = attached.captured()[layer]
    assert dog.alerts == []
    assert torch.equal(y, wanted)
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    first = record.value if layer == "pair" else record.value[0]
    grads = record.grad if layer == "pair" else record.grad[0]
    assert isinstance(first[0], torch.Tensor)
    assert first[1] is None
    assert grads[0].shape == first[0].shape


@opened
def test_capture_of_a_packed_sequence():
    values, gradients = capture(Recurrent(), (X, LENGTHS), "lstm", gradients=True)
    packed, (state, cell) = values["lstm"]
    assert packed.data.shape == (18, 16)
    assert packed.batch_sizes is None
    assert gradients["lstm"][0].data.shape == (18, 16)
    assert state.shape == cell.shape == (2, 4, 8)


class WithObject(nn.Module):
    def forward(self, x):
        return 2 * x, object()


def test_capture_beside_a_plain_object():
    values = capture(WithObject(), torch.ones(2), ".")
    doubled, nothing = values["."]
    assert torch.equal(doubled, torch.full((2,), 2.0))
    assert nothing is None


@pytest.mark.parametrize(("model", "layer"), [(Recurrent(), "lstm"), (Counts(), "pair")])
def test_watching_leaves_the_output(model, layer):
    wanted = model(X, LENGTHS)
    with watch(model, every=1), attach(model, {layer: Capture()}):
        assert torch.equal(model(X, LENGTHS), wanted)


@pytest.mark.parametrize(
    "regularizer",
    [Dropout(0.5, index=0), Dropout1d(0.5, index=0), ClipGradNorm(1.0, index=0)],
    ids=lambda regularizer: regularizer.label,
)
def test_regularizers_of_a_packed_sequence_are_refused(regularizer):
    model = Recurrent()
    attach(model, {"lstm": regularizer})
    with pytest.raises(SiteError, match="a PackedSequence, which has no batch axis"):
        model(X, LENGTHS)


def nested_encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_observers_of_nested_tensors():
    model, x = nested_encoder(), torch.randn(3, 5, 16)
    mask = torch.arange(5).expand(3, 5) >= torch.tensor([[3], [5], [4]])
    dog = Watchdog(active="always")
    with torch.no_grad(), attach(model, {"layers.*.self_attn": dog}) as attached:
        wanted = model(x, src_key_padding_mask=mask)
        assert wanted.shape == x.shape
        assert attached.verify() == []
    watch(model, active="always")
    with torch.no_grad(), pytest.raises(SiteError, match="enable_nested_tensor=False"):
        model(x, src_key_padding_mask=mask)
