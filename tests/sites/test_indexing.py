"""One element of a structure is regularized; the layer's own structure is left alone."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from dropblock_hooks import Dropout, attach

Point = namedtuple("Point", ["x", "y"])


class Doubled(Point):
    """Takes other arguments than it has fields."""

    def __new__(cls, x):
        return super().__new__(cls, x, 2 * x)


class Numbers(list):
    """A list of its own."""


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value


def x():
    return torch.arange(1.0, 4.0)


STRUCTURES = {
    "tuple": ((x(), x() + 1), 1),
    "from the end": ((x(), x() + 1), -2),
    "list": ([x(), None], 0),
    "list of its own": (Numbers([x(), None]), 0),
    "dict": ({"a": x(), "b": 1}, "a"),
    "OrderedDict": (OrderedDict(b=1, a=x()), "a"),
    "namedtuple": (Point(x(), 1), 0),
    "namedtuple with a constructor": (Doubled(x()), 1),
    "return type": (torch.stack([x(), x()]).max(1), 0),
    "nested": (((x(), x()), x(), {"c": x()}), 1),
    "same twice": ((lambda t: (t, t))(x()), 0),
}


def parts(value):
    return dict(value if isinstance(value, dict) else enumerate(value))


@pytest.mark.parametrize("name", STRUCTURES)
def test_only_that_element_is_another(name):
    value, index = STRUCTURES[name]
    before = parts(value)
    model = Returns(value)
    attach(model, {".": Dropout(1.0, index=index)})
    changed = model(x())
    assert type(changed) is type(value)
    after = parts(changed)
    assert after.keys() == before.keys()
    key = index % len(value) if isinstance(index, int) else index
    assert [k for k in before if after[k] is not before[k]] == [key]
    assert after[key].count_nonzero() == 0
    assert all(parts(value)[k] is before[k] for k in before), "the layer's own is left alone"


def test_a_packed_sequence_keeps_what_goes_with_it():
    packed = pack_sequence([x(), x()[:2]], enforce_sorted=False)
    model = Returns(packed)
    attach(model, {".": Dropout(1.0, index=0)})
    changed = model(x())
    assert isinstance(changed, PackedSequence)
    assert changed.data.count_nonzero() == 0
    assert changed.sorted_indices is packed.sorted_indices


class Calls(nn.Module):
    """Calls a layer with a positional argument, or by keyword."""

    def __init__(self, by_keyword):
        super().__init__()
        self.inner = Takes()
        self.by_keyword = by_keyword

    def forward(self, x):
        return self.inner(states=x) if self.by_keyword else self.inner(x)


class Takes(nn.Module):
    def forward(self, states):
        return states * 2


WRONG = [
    (True, None, "called by keyword only: say which of them, 'states', as in index='states'"),
    (True, 0, "called by keyword only: say which of them, 'states', as in index='states'"),
    (False, "states", "without the keyword 'states': say the place of the argument"),
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("by_keyword", "index", "message"), WRONG)
def test_an_argument_that_is_passed_in_another_way(by_keyword, index, message, compiled):
    torch._dynamo.reset()
    model = Calls(by_keyword)
    attach(model, {"inner": Dropout(0.5, at="input", index=index)})
    call = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(Exception, match=message):
        call(torch.ones(4, 3))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("by_keyword", "index"), [(True, "states"), (False, None), (False, 0)])
def test_an_argument_that_is_passed_as_index_says(by_keyword, index, compiled):
    torch._dynamo.reset()
    model = Calls(by_keyword)
    attach(model, {"inner": Dropout(1.0, at="input", index=index)})
    call = torch.compile(model, backend="eager") if compiled else model
    assert torch.equal(call(torch.ones(4, 3)), torch.zeros(4, 3))
