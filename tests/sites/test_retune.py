"""Retune on every kind of layer that drops: what is dropped, and that all is restored."""

import copy
import functools
import importlib
import importlib.util
import math
import pickle
import random

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    Attachment,
    LinearSchedule,
    Retune,
    StepSchedule,
    attach,
    attachments,
    detach_all,
)
from tests.cases import rest_slow


class Tripled(nn.Dropout):
    """A dropout with a forward of its own."""

    def forward(self, input):
        return 3 * super().forward(input)


class Kind:
    """A kind of layer.

    Attributes:
        make: the layer at a rate.
        shape: of an input.
        decided: leading axes of which each element is decided on; None where that is not so.
        held: the attribute.
        ours: whether a hook of ours drops in its place.
        scale: of what is kept, at a rate.
    """

    def __init__(self, make, shape, decided=None, *, held="p", ours=True, scale=None):
        self.make, self.shape, self.decided, self.held = make, shape, decided, held
        self.ours = ours
        self.scale = scale or (lambda p: 1 / (1 - p) if p < 1 else 0.0)

    def rate(self, layer):
        return getattr(layer, self.held)


def one(p):
    return 1.0


def optional(name):
    """A module of a library that may not be here."""
    there = importlib.util.find_spec(name.partition(".")[0])
    return importlib.import_module(name) if there else None


layers, tvs = optional("timm.layers"), optional("torchvision.ops")
KINDS = {
    "Dropout": Kind(nn.Dropout, (40, 50), 2),
    "Dropout-inplace": Kind(functools.partial(nn.Dropout, inplace=True), (40, 50), 2),
    "Dropout1d-unbatched": Kind(nn.Dropout1d, (900, 3), 1),
    "Dropout2d": Kind(nn.Dropout2d, (30, 40, 2, 3), 2),
    "AlphaDropout": Kind(nn.AlphaDropout, (40, 50), ours=False),
    "Tripled": Kind(Tripled, (40, 50), 2, ours=False, scale=lambda p: 3 / (1 - p) if p < 1 else 0),
}
if layers:
    paths, blocks = layers.DropPath, functools.partial(layers.DropBlock2d, block_size=3)
    KINDS |= {
        "DropPath": Kind(paths, (900, 3, 2), 1, held="drop_prob"),
        "DropPath-unscaled": Kind(
            functools.partial(paths, scale_by_keep=False), (900, 3), 1, held="drop_prob", scale=one
        ),
        "timm-DropBlock2d": Kind(blocks, (8, 4, 12, 12), held="drop_prob", ours=False),
        "PatchDropout": Kind(layers.PatchDropout, (6, 41, 3), held="prob", ours=False),
    }
if tvs:
    KINDS |= {
        "StochasticDepth-row": Kind(
            functools.partial(tvs.StochasticDepth, mode="row"), (900, 3), 1
        ),
        "StochasticDepth-batch": Kind(
            functools.partial(tvs.StochasticDepth, mode="batch"), (9, 3), 0, ours=False
        ),
    }
DECIDED = [name for name, kind in KINDS.items() if kind.decided]
# torch tells what it takes a tensor of 3 axes for
pytestmark = pytest.mark.filterwarnings(
    "ignore:dropout2d. Received a 3D input:UserWarning",
    "ignore:.*torch.jit:FutureWarning",
    "ignore:.*torch.jit:DeprecationWarning",
)
each_kind = pytest.mark.parametrize("name", KINDS)


class Model(nn.Module):
    """A layer that drops behind one with a weight."""

    def __init__(self, drop):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.drop = drop

    def forward(self, x):
        return self.drop(self.weight * x)


def made(name, p=0.4):
    torch.manual_seed(0)
    return Model(KINDS[name].make(p))


def input_of(name):
    return torch.rand(KINDS[name].shape, generator=torch.Generator().manual_seed(1)) + 0.5


def attributes(model):
    """All that the layer holds, other than hooks."""
    return {
        key: (type(value), value)
        for key, value in vars(model.drop).items()
        if not key.startswith("_")
    }


def dropped_by(kind, x, y, p):
    """Which elements were dropped; the others must be scaled as the layer scales them."""
    dropped = torch.isclose(y, torch.zeros_like(x), atol=1e-6)
    torch.testing.assert_close(y, torch.where(dropped, 0, x * kind.scale(p)))
    return dropped


# What is dropped -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECIDED)
@pytest.mark.parametrize("p", [0.1, 0.6])
def test_each_is_dropped_with_the_chance_of_now(name, p):
    """Values by the formula, one decision for each unit; ``|z| <= 4`` of those dropped."""
    kind, model, x = KINDS[name], made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=p)})
    torch.manual_seed(2)
    hits = drawn = elements = 0
    for _ in range(4):
        y = model(x)
        units = dropped_by(kind, x, y, p).reshape(math.prod(x.shape[: kind.decided]), -1)
        assert (units == units[:, :1]).all()
        hits, drawn = hits + int(units[:, 0].sum()), drawn + len(units)
        elements += units.sum().item()
    assert abs(hits - drawn * p) <= 4 * math.sqrt(drawn * p * (1 - p))
    (site,) = attached.sites
    realized = pytest.approx(elements / (4 * x.numel())) if kind.ours else None
    assert (site.rate, site.realized_rate) == (p, realized)
    assert (site.calls, site.active_calls) == (4, 4)
    assert attached.verify() == []


# All put back --------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("leave", [Attachment.remove, None], ids=["remove", "detach_all"])
def test_all_is_restored(name, leave, hook_count):
    model, x = made(name), input_of(name)
    before, hooks = attributes(model), hook_count(model)
    attached = attach(model, {"drop": Retune(p=LinearSchedule(0.1, 0.5, epochs=5))})
    model(x)
    attached.step(1)
    leave(attached) if leave else detach_all(model)
    assert attributes(model) == before
    assert hook_count(model) == hooks
    assert not model.drop._forward_hooks_with_kwargs
    torch.manual_seed(1)
    y, again = model(x), Model(KINDS[name].make(0.4))
    torch.manual_seed(1)
    assert torch.equal(y, again(x))


# On and off ----------------------------------------------------------------------------------


@each_kind
def test_paused_the_layer_has_its_own_rate(name):
    kind, model, x = KINDS[name], made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=0.2)})
    with attached.paused():
        assert kind.rate(model.drop) == 0.4
        attached.step()
        attached.set("drop/Retune", p=0.3)
        assert kind.rate(model.drop) == 0.4
        if kind.decided:
            dropped_by(kind, x, model(x), 0.4)
    assert kind.rate(model.drop) == (0 if kind.ours else 0.3)
    if kind.decided:
        dropped_by(kind, x, model(x), 0.3)


# Copies --------------------------------------------------------------------------------------


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@each_kind
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_and_its_model_leave_each_other_alone(name, copied):
    kind, model, x = KINDS[name], made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=0.2)})
    model(x)
    other = copied(model).train()
    (of_other,) = attachments(other)
    held = 0 if kind.ours else 0.2
    assert kind.rate(model.drop) == kind.rate(other.drop) == held
    of_other.set("drop/Retune", p=0.6)
    assert attached.rates == {"drop/Retune": {"p": 0.2}}
    if kind.decided:
        dropped_by(kind, x, other(x), 0.6)
        dropped_by(kind, x, model(x), 0.2)
    of_other.remove()
    assert (kind.rate(other.drop), kind.rate(model.drop)) == (0.4, held)
    again = copied(model)
    attached.remove()
    assert (kind.rate(model.drop), kind.rate(again.drop)) == (0.4, held)
    assert detach_all(again) == 1
    assert kind.rate(again.drop) == 0.4


# Rates that the module around a layer reads ---------------------------------------------------


class Fused(nn.Module):
    """Reads the rate, as fused attention in timm does."""

    def __init__(self):
        super().__init__()
        self.attn_drop = nn.Dropout(0.1)

    def forward(self, x):
        return nn.functional.dropout(x, self.attn_drop.p if self.training else 0.0)


class Around(nn.Module):
    """Reads the rate of a layer inside its child."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"attn_drop": nn.Dropout(0.1)})

    def forward(self, x):
        p = self.inner.attn_drop.p if self.training else 0.0
        return nn.functional.dropout(x, p)


READS = {
    "in the forward": (Fused, "attn_drop"),
    "above its parent": (Around, "inner.attn_drop"),
}


@pytest.mark.parametrize("name", READS)
def test_a_rate_that_is_read_is_in_the_attribute(name):
    make, layer = READS[name]
    model = make()
    attached = attach(model, {layer: Retune(p=LinearSchedule(0.0, 0.4, epochs=5))})
    for epoch, p in enumerate((0.0, 0.1, 0.2, 0.3, 0.4)):
        attached.step(epoch)
        y = model(torch.rand(2000, 4) + 1)
        assert model.get_submodule(layer).p == pytest.approx(p)
        zeros = (y == 0).sum().item()
        assert abs(zeros - y.numel() * p) <= 4 * math.sqrt(y.numel() * p * (1 - p))
    assert attached.sites[0].realized_rate is None
    assert attached.verify() == []
    assert "realized_rate" not in str(attached.scalars())
    attached.remove()
    assert model.get_submodule(layer).p == 0.1


# Compiled ------------------------------------------------------------------------------------


EAGER = [(name, "eager") for name in KINDS if name in ("Dropout-inplace", "DropPath")]


@pytest.mark.parametrize(
    ("name", "backend"), rest_slow([*EAGER, *((name, "aot_eager") for name in KINDS)], EAGER)
)
def test_compiled(name, backend):
    """Values are right from the first call on, by the outputs and by the counts."""
    kind, model, x = KINDS[name], made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=StepSchedule({0: 0.3, 2: 0.6}))})
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.manual_seed(6)
    for epoch, p in enumerate((0.3, 0.3, 0.6, 0.6)):
        attached.step(epoch)
        y = compiled(x)
        site = attached.sites[0]
        if kind.decided is not None and kind.decided > 0:
            units = dropped_by(kind, x, y.detach(), p)
            units = units.reshape(math.prod(x.shape[: kind.decided]), -1)[:, 0]
            n = len(units)
            assert abs(units.sum() - n * p) <= 4 * math.sqrt(n * p * (1 - p))
        if kind.ours:
            share = dropped_by(kind, x, y.detach(), p).float().mean().item()
            assert site.realized_rate == pytest.approx(share, abs=1e-6)
        model.eval()
        expected = Model(kind.make(0.4)).eval()(x)
        assert torch.equal(compiled(x), expected)
        model.train()
    attached.remove()
    assert kind.rate(model.drop) == 0.4


# Rates that modules hold themselves ----------------------------------------------------------


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.lstm = nn.Linear(4, 400), nn.LSTM(400, 4, 2, dropout=0.5)
        self.dropout = 0

    def forward(self, x):
        self.lstm(self.fc(x))
        return nn.functional.dropout(self.fc(x), self.dropout, self.training)


def test_rates_that_modules_hold():
    model, x = Holding(), torch.ones(50, 4)
    ramp = LinearSchedule(0.0, 0.4, epochs=3)
    spec = {"attr:dropout": Retune(p=ramp), "attr:lstm.dropout": Retune(p=0.1)}
    attached = attach(model, spec)
    assert [site.at for site in attached] == ["attribute", "attribute"]
    for epoch, p in enumerate((0.0, 0.2, 0.4)):
        attached.step(epoch)
        assert (model.dropout, model.lstm.dropout) == (pytest.approx(p), 0.1)
        n = 20_000
        assert abs((model(x) == 0).sum() - n * p) <= 4 * math.sqrt(n * p * (1 - p))
    site = attached.sites[0]
    assert (site.calls, site.active_calls, site.realized_rate, site.layout) == (3, 3, None, None)
    assert attached.scalars() == {"reg/dropout/Retune/p": 0.4, "reg/lstm.dropout/Retune/p": 0.1}
    attached.remove()
    assert (model.dropout, type(model.dropout), model.lstm.dropout) == (0, int, 0.5)


class DropPath(nn.Module):
    """Draws from Python's generator."""

    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return x * 0 if self.training and random.random() < self.drop_prob else x


def test_attaching_draws_no_random_numbers():
    """The states of Python's and torch's generators stay."""
    model = nn.Sequential(nn.Dropout(0.1), nn.AlphaDropout(0.1), DropPath(0.1))
    before = random.getstate(), torch.get_rng_state()
    attach(model, {"*": Retune(p=0.3)}).remove()
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
