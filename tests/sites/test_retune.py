"""Retune on every layer that drops by itself: what it drops, and that it puts all back."""

import copy
import functools
import importlib
import importlib.util
import io
import math
import pickle
import warnings

import pytest
import torch
from scipy import stats
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    ByDepth,
    GaussianNoise,
    HookWarning,
    LinearSchedule,
    Retune,
    StepSchedule,
    attach,
    attachments,
    detach_all,
    plan,
)
from tests.cases import rest_slow

ALPHA = 1.7580993408473766  # of SELU


class DropPaths(nn.Module):
    """As Transformers write it."""

    def __init__(self, drop_prob=None):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, hidden_states):
        if self.drop_prob == 0.0 or not self.training:
            return hidden_states
        keep = 1 - self.drop_prob
        shape = (hidden_states.shape[0],) + (1,) * (hidden_states.ndim - 1)
        mask = keep + torch.rand(shape, dtype=hidden_states.dtype, device=hidden_states.device)
        return hidden_states.div(keep) * mask.floor()


class Tripled(nn.Dropout):
    """A dropout with a forward of its own."""

    def forward(self, input):
        return 3 * super().forward(input)


class Masks(nn.Module):
    """A user's layer: drops elements and rescales nothing."""

    def __init__(self, prob):
        super().__init__()
        self.prob = prob

    def forward(self, x):
        return x * (torch.rand_like(x) >= self.prob) if self.training else x


class Kind:
    """A kind of layer.

    Attributes:
        make: the layer at a rate.
        shape: of an input.
        decided: leading axes of which each element is decided on; None where that is not so.
        held: the attribute.
        ours: whether ours acts in its place.
        scale: of what is kept, at a rate.
    """

    def __init__(self, make, shape, decided=None, *, held="p", ours=True, scale=None, alpha=False):
        self.make, self.shape, self.decided, self.held = make, shape, decided, held
        self.ours, self.alpha = ours, alpha
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
    "Dropout1d": Kind(nn.Dropout1d, (30, 40, 3), 2),
    "Dropout1d-unbatched": Kind(nn.Dropout1d, (900, 3), 1),
    "Dropout2d": Kind(nn.Dropout2d, (30, 40, 2, 3), 2),
    "Dropout2d-inplace": Kind(functools.partial(nn.Dropout2d, inplace=True), (30, 40, 2, 3), 2),
    "Dropout2d-3d": Kind(nn.Dropout2d, (30, 40, 3), 2),
    "Dropout3d": Kind(nn.Dropout3d, (30, 40, 2, 1, 3), 2),
    "Dropout3d-unbatched": Kind(nn.Dropout3d, (900, 2, 1, 3), 1),
    "AlphaDropout": Kind(nn.AlphaDropout, (40, 50), 2, alpha=True),
    "AlphaDropout-inplace": Kind(
        functools.partial(nn.AlphaDropout, inplace=True), (40, 50), 2, alpha=True
    ),
    "FeatureAlphaDropout": Kind(nn.FeatureAlphaDropout, (30, 40, 2, 3), 2, alpha=True),
    "Transformers": Kind(DropPaths, (900, 3, 2), 1, held="drop_prob"),
    "Tripled": Kind(Tripled, (40, 50), 2, ours=False, scale=lambda p: 3 / (1 - p) if p < 1 else 0),
    "Masks": Kind(Masks, (40, 50), 2, held="prob", ours=False, scale=one),
}
if layers:
    paths, blocks = layers.DropPath, functools.partial(layers.DropBlock2d, block_size=3)
    KINDS |= {
        "DropPath": Kind(paths, (900, 3, 2), 1, held="drop_prob"),
        "DropPath-unscaled": Kind(
            functools.partial(paths, scale_by_keep=False), (900, 3), 1, held="drop_prob", scale=one
        ),
        "timm-DropBlock2d": Kind(blocks, (8, 4, 12, 12), held="drop_prob", ours=False),
        "timm-DropBlock2d-inplace": Kind(
            functools.partial(blocks, inplace=True), (8, 4, 12, 12), held="drop_prob", ours=False
        ),
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
        "DropBlock2d": Kind(
            functools.partial(tvs.DropBlock2d, block_size=3), (8, 4, 12, 12), ours=False
        ),
        "DropBlock2d-inplace": Kind(
            functools.partial(tvs.DropBlock2d, block_size=3, inplace=True),
            (8, 4, 12, 12),
            ours=False,
        ),
        "DropBlock3d": Kind(
            functools.partial(tvs.DropBlock3d, block_size=3), (4, 2, 6, 6, 6), ours=False
        ),
    }
OURS = [name for name, kind in KINDS.items() if kind.ours]
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


def rated(name, layer):
    return getattr(layer, KINDS[name].held)


def attributes(model):
    """All that the layer holds, other than hooks."""
    return {
        key: (type(value), value)
        for key, value in vars(model.drop).items()
        if not key.startswith("_") or key == "_p"
    }


def dropped_by(kind, x, y, p):
    """Which elements were dropped, if each is what the formula has."""
    if kind.alpha:
        a = ((ALPHA**2 * p + 1) * (1 - p)) ** -0.5
        drop = torch.full_like(x, -ALPHA * a + ALPHA * a * p)
        kept = x * a + ALPHA * a * p
    else:
        drop, kept = torch.zeros_like(x), x * kind.scale(p)
    dropped = torch.isclose(y, drop, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y, torch.where(dropped, drop, kept))
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
    assert site.realized_rate == pytest.approx(elements / (4 * x.numel()))
    assert (site.expected_rate, site.calls, site.active_calls) == (pytest.approx(p), 4, 4)
    assert attached.verify() == []


@each_kind
@pytest.mark.parametrize("p", [0.15, 0.5])
def test_distributed_as_the_layer_itself(name, p):
    """The share of zeros, or of what is gone, in 150 calls: ours and that of the bare layer."""
    x, shares = input_of(name), []
    kept = x.numel()
    bare, retuned = KINDS[name].make(p), made(name)
    attach(retuned, {"drop": Retune(p=p)})
    torch.manual_seed(3)
    for layer in (bare, retuned):
        ys = [layer(x.clone()) for _ in range(150)]
        if KINDS[name].alpha:
            shares.append([y.mean().item() for y in ys])
        else:
            shares.append([1 - y.count_nonzero().item() / kept for y in ys])
    assert stats.ks_2samp(*shares).pvalue > 1e-4


@each_kind
def test_a_rate_of_0_leaves_all(name):
    model, x = made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=0)})
    for _ in range(3):
        y = model.drop(x)
        assert torch.equal(y, 3 * x if name == "Tripled" else x)
    assert attached.sites[0].realized_rate in (0, None)
    assert attached.verify() == []


@pytest.mark.parametrize("name", [n for n in KINDS if "Block" not in n and "Patch" not in n])
def test_a_rate_of_1_leaves_nothing(name):
    model, x = made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=1)})
    if KINDS[name].ours:
        assert torch.equal(model(x), torch.zeros_like(x))
        assert attached.sites[0].realized_rate == 1
    else:
        assert torch.equal(model(x).nan_to_num(0.0), torch.zeros_like(x))


@each_kind
def test_evaluation_is_what_the_layer_computes(name):
    model, x = made(name).eval(), input_of(name)
    expected = model(x)
    attached = attach(model, {"drop": Retune(p=0.7)})
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for _ in range(2):
        assert torch.equal(model(x), expected)
    assert torch.equal(torch.get_rng_state(), state)
    model.train()
    model(x)
    model.eval()
    assert torch.equal(model(x), expected)
    attached.remove()
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", [n for n in KINDS if "inplace" in n])
def test_what_a_layer_in_place_is_given_stays(name):
    """The layer would write into it; what is dropped is counted all the same."""
    model, x = made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=0.3)})
    for _ in range(2):
        given = x.clone()
        y = model.drop(given)
        assert torch.equal(given, x)
    assert attached.sites[0].realized_rate > 0.1
    attached.remove()
    assert model.drop.inplace is True
    if "Alpha" not in name:  # torch's takes it, and does not heed it
        assert model.drop(given) is given
    assert not torch.equal(y, x)


# Who acts ------------------------------------------------------------------------------------


@each_kind
def test_who_holds_the_rate(name):
    """The layer, until it is called; then ours, where that is its function."""
    kind, model, x = KINDS[name], made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=LinearSchedule(0.1, 0.5, epochs=5))})
    assert kind.rate(model.drop) == 0.1
    attached.step(1)
    assert kind.rate(model.drop) == pytest.approx(0.2)
    model.drop.forward(x.clone())  # enters no hook
    assert kind.rate(model.drop) == pytest.approx(0.2)
    model(x)
    assert kind.rate(model.drop) == (0 if kind.ours else pytest.approx(0.2))
    attached.step(2)
    assert kind.rate(model.drop) == (0 if kind.ours else pytest.approx(0.3))
    assert attached.rates["drop/Retune"]["p"] == pytest.approx(0.3)


@pytest.mark.parametrize("name", DECIDED)
def test_a_layer_that_only_its_forward_is_called_of_drops_by_itself(name):
    model, x = made(name, 0.0), input_of(name)
    attach(model, {"drop": Retune(p=0.5)})
    torch.manual_seed(0)
    y = model.drop.forward(x.clone())
    dropped = dropped_by(KINDS[name], x, y, 0.5)
    assert 0.3 < dropped.float().mean() < 0.7


@each_kind
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_first_call_may_be_checkpointed(name, reentrant):
    """The gradient of a weight w in front is the sum of what is kept, over w."""
    model, x = made(name), input_of(name).requires_grad_()
    attached = attach(model, {"drop": Retune(p=0.5)})
    torch.manual_seed(4)
    for _ in range(2):
        model.weight.grad = x.grad = None
        y = checkpoint(model, x, use_reentrant=reentrant)
        if KINDS[name].alpha:
            dropped = dropped_by(KINDS[name], x.detach(), y.detach(), 0.5)
            a = ((ALPHA**2 * 0.5 + 1) * 0.5) ** -0.5
            expected = (x * a * ~dropped).sum()
        else:
            expected = y.sum()
        y.sum().backward()
        torch.testing.assert_close(model.weight.grad, expected.detach(), rtol=1e-4, atol=1e-3)
    assert attached.sites[0].calls == 2
    assert attached.verify() == []


def test_a_hook_before_it_and_other_sites_see_what_the_layer_gives():
    """In written order, as the layer itself would come before them all."""
    model = made("Dropout")
    model.drop.register_forward_hook(lambda module, args, y: y + 1)
    attach(model, {"drop": [GaussianNoise(0.0), Retune(p=0.5)]})
    for _ in range(2):
        assert set(model(torch.ones(99)).tolist()) == {1.0, 3.0}
    model = made("Dropout")
    model.drop.register_forward_hook(lambda module, args, y: y + 1)
    attach(model, {"drop": Retune(p=0.5)})
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert set(compiled(torch.ones(99)).tolist()) == {1.0, 3.0}


# All put back --------------------------------------------------------------------------------


def leave(attached, model, x):
    attached.remove()


def leave_all(attached, model, x):
    assert detach_all(model) == 1


def leave_with(attached, model, x):
    with attached:
        model(x)


def leave_after_an_error_in_a_step(attached, model, x):
    attached.set("drop/Retune", p=lambda t: t / 2)
    with pytest.raises(ValueError, match=r"drop/Retune: p must be in \[0, 1\], got 1.5 at t=3"):
        attached.step(3)
    model(x)
    attached.remove()


def leave_after_an_error_in_a_forward(attached, model, x):
    with pytest.raises((RuntimeError, AttributeError, TypeError, ValueError)):
        model.drop(None)
    attached.remove()


def leave_twice(attached, model, x):
    attached.remove()
    before = attributes(model)
    attached.remove()
    assert attributes(model) == before


def leave_paused(attached, model, x):
    attached.enabled = False
    model(x)
    attached.remove()


LEAVING = [value for key, value in globals().items() if key.startswith("leave")]


@each_kind
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.pairwise
@pytest.mark.parametrize("leaving", LEAVING, ids=lambda function: function.__name__)
def test_all_is_put_back(name, leaving, called, hook_count):
    model, x = made(name), input_of(name)
    before, hooks = attributes(model), hook_count(model)
    attached = attach(model, {"drop": Retune(p=LinearSchedule(0.1, 0.5, epochs=5))})
    if called:
        model(x)
        attached.step(1)
    leaving(attached, model, x)
    assert attributes(model) == before
    assert hook_count(model) == hooks
    assert not model.drop._forward_hooks_with_kwargs
    torch.manual_seed(1)
    y, again = model(x), Model(KINDS[name].make(0.4))
    torch.manual_seed(1)
    assert torch.equal(y, again(x))


@pytest.mark.parametrize("own", [0, 0.0, 1, 0.1 + 0.2])
def test_the_very_number_is_put_back(own):
    model = made("Dropout", own)
    attached = attach(model, {"drop": Retune(p=0.5)})
    model(torch.ones(3))
    attached.remove()
    assert model.drop.p is own or (type(model.drop.p) is type(own) and model.drop.p == own)


def test_where_another_site_fails_to_install_all_is_put_back(monkeypatch, hook_count):
    from dropblock_hooks.sites.retune import RetuneHook

    model = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Dropout(0.25))
    install = RetuneHook.install

    def failing(hook, module):
        if module is model[1]:
            raise RuntimeError("of a full disk")
        install(hook, module)

    monkeypatch.setattr(RetuneHook, "install", failing)
    with pytest.raises(RuntimeError, match="full disk"):
        attach(model, {"type:Dropout": Retune(p=0.1)})
    assert (model[0].p, model[0].inplace, model[1].p) == (0.5, True, 0.25)
    assert hook_count(model) == 0


def test_where_a_warning_is_an_error_all_is_put_back():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.25))
    with pytest.raises(HookWarning):
        attach(model, {"0": Retune(p=LinearSchedule(0, 0.1, epochs=9))}, epochs=3)
    assert (model[0].p, model[1].p) == (0.5, 0.25)


# On and off ----------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("called", [True, False])
def test_paused_the_layer_has_its_own_rate(name, called):
    kind, model, x = KINDS[name], made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=0.2)})
    if called:
        model(x)
    during = kind.rate(model.drop)
    assert during == (0 if called and kind.ours else 0.2)
    with attached.paused():
        assert kind.rate(model.drop) == 0.4
        attached.step()
        assert kind.rate(model.drop) == 0.4
        with attached.paused():
            assert kind.rate(model.drop) == 0.4
        assert kind.rate(model.drop) == 0.4
        attached.set("drop/Retune", p=0.3)
        assert kind.rate(model.drop) == 0.4
    assert kind.rate(model.drop) == (0 if called and kind.ours else 0.3)
    attached.set(Retune, p=0.25)
    assert kind.rate(model.drop) == (0 if called and kind.ours else 0.25)
    attached.enabled = False
    assert kind.rate(model.drop) == 0.4
    attached.enabled = True
    if kind.decided:
        dropped_by(kind, x, model(x), 0.25)


def test_paused_a_first_call_drops_at_its_own_rate_once():
    model, x = made("Dropout", 0.5), torch.ones(5000)
    attached = attach(model, {"drop": Retune(p=0.2)})
    with attached.paused():
        assert set(model(x).unique().tolist()) == {0.0, 2.0}
        assert model.drop.p == 0.5
    assert model.drop.p == 0
    assert set(model(x).unique().tolist()) == {0.0, 1.25}


@pytest.mark.parametrize("name", OURS)
def test_ours_can_act_in_evaluation(name):
    kind, model, x = KINDS[name], made(name).eval(), input_of(name)
    attached = attach(model, {"drop": Retune(p=0.3)})
    expected = model(x)
    with attached.always():
        dropped = dropped_by(kind, x, model(x), 0.3)
    assert 0 < dropped.float().mean() < 1
    assert torch.equal(model(x), expected)


# Copies --------------------------------------------------------------------------------------


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def ema(model):
    utils = pytest.importorskip("timm.utils", reason="the average is timm's")
    return utils.ModelEmaV3(model).module


def averaged(model):
    return AveragedModel(model).module


@each_kind
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved, ema, averaged])
def test_a_copy_and_its_model_leave_each_other_alone(name, copied, called):
    kind, model, x = KINDS[name], made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=0.2)})
    if called:
        model(x)
    other = copied(model).train()
    (of_other,) = attachments(other)
    held = 0 if called and kind.ours else 0.2
    assert kind.rate(model.drop) == kind.rate(other.drop) == held
    other(x)
    assert kind.rate(model.drop) == held
    of_other.step(0)
    of_other.set("drop/Retune", p=0.6)
    assert attached.rates == {"drop/Retune": {"p": 0.2}}
    if kind.decided:
        dropped_by(kind, x, other(x), 0.6)
        dropped_by(kind, x, model(x), 0.2)
    of_other.remove()
    assert kind.rate(other.drop) == 0.4
    assert kind.rate(model.drop) in (0, 0.2)
    again = copied(model)
    attached.remove()
    assert kind.rate(model.drop) == 0.4
    assert kind.rate(again.drop) in (0, 0.2)
    assert detach_all(again) == 1
    assert kind.rate(again.drop) == 0.4


def test_a_copy_of_what_was_removed_is_bare(hook_count):
    model = made("Dropout")
    attached = attach(model, {"drop": Retune(p=0.2)})
    model(torch.ones(3))
    attached.remove()
    other = copy.deepcopy(model)
    assert attachments(other) == []
    assert other.drop.p == 0.4


@each_kind
def test_state_is_restored_into_the_attribute(name):
    kind, ramp = KINDS[name], LinearSchedule(0.1, 0.5, epochs=5)
    model, x = made(name), input_of(name)
    keys = list(model.state_dict())
    attached = attach(model, {"drop": Retune(p=ramp)})
    attached.step(1)
    assert list(model.state_dict()) == keys
    state = attached.state_dict()
    other = made(name)
    resumed = attach(other, {"drop": Retune(p=ramp)})
    resumed.load_state_dict(state)
    assert kind.rate(other.drop) == kind.rate(model.drop) == pytest.approx(0.2)
    other(x)
    resumed.load_state_dict(attached.state_dict())
    assert kind.rate(other.drop) == (0 if kind.ours else pytest.approx(0.2))
    assert resumed.rates == attached.rates


# What is told --------------------------------------------------------------------------------


@each_kind
def test_reports(name):
    model, x = made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=0.25)})
    model(x)
    assert attachments(model) == [attached]
    (row,) = attached.report()
    assert (row.site, row.calls) == ("drop/Retune", 1)
    told = attached.scalars()
    assert told["reg/drop/Retune/p"] == 0.25
    assert ("reg/drop/Retune/realized_rate" in told) is ("Patch" not in name)
    assert attached.verify() == []


class Fused(nn.Module):
    """Reads the rate, as fused attention does."""

    def __init__(self, p):
        super().__init__()
        self.attn_drop, self.proj = nn.Dropout(p), nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.dropout(self.proj(x), self.attn_drop.p, self.training)


def test_a_layer_that_is_read_keeps_the_rate():
    model = Fused(0.0)
    attached = attach(model, {"attn_drop": Retune(p=LinearSchedule(0.0, 0.4, epochs=5))})
    for epoch, p in enumerate((0.0, 0.1, 0.2, 0.3, 0.4)):
        attached.step(epoch)
        y = model(torch.ones(2000, 4))
        assert model.attn_drop.p == pytest.approx(p)
        zeros = (y == 0).sum().item()
        assert abs(zeros - y.numel() * p) <= 4 * math.sqrt(y.numel() * p * (1 - p))
    assert attached.sites[0].realized_rate is None
    assert attached.verify() == []
    assert "realized_rate" not in str(attached.scalars())
    attached.remove()
    assert model.attn_drop.p == 0.0


def test_a_plan_changes_nothing():
    model = nn.Sequential(
        nn.Linear(4, 4), Fused(0.5), nn.Dropout(0.5, inplace=True), Tripled(0.5, inplace=True)
    )
    spec = {
        "type:Dropout": Retune(p=LinearSchedule(0.1, 0.3, epochs=3)),
        "attr:1.attn_drop.p": Retune(p=0.0),
    }
    del spec["attr:1.attn_drop.p"]
    x = torch.ones(3, 4)
    drops = [model[1].attn_drop, model[2], model[3]]
    told = plan(model, spec, example_input=x)
    assert [(d.p, d.inplace) for d in drops] == [(0.5, False), (0.5, True), (0.5, True)]
    by_kind = {caution.kind: caution for caution in told.cautions}
    assert by_kind["read"].keys == ("1.attn_drop/Retune",)
    assert set(by_kind["recompiles"].keys) == {"1.attn_drop/Retune", "3/Retune"}
    assert "each of 3 values" in by_kind["recompiles"].text
    attached = attach(model, spec, example_input=x)
    assert [d.p for d in drops] == [0.1] * 3
    assert [site.calls for site in attached.sites] == [0] * 3
    attached.remove()
    assert [(d.p, d.inplace) for d in drops] == [(0.5, False), (0.5, True), (0.5, True)]


# By depth ------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, p, kind=DropPaths):
        super().__init__()
        self.fc, self.drop_path = nn.Linear(3, 3), kind(p) if p else nn.Identity()

    def forward(self, x):
        return x + self.drop_path(self.fc(x))


STANDINS = [DropPaths, Masks]
if layers and tvs:
    STANDINS += [layers.DropPath, functools.partial(tvs.StochasticDepth, mode="batch")]


@pytest.mark.parametrize("kind", STANDINS, ids="abcd"[: len(STANDINS)])
def test_identities_among_layers_drop_as_they_do(kind):
    model = nn.Sequential(*(Residual(p, kind) for p in (0.0, 0.1, 0.0)))
    attached = attach(model, {"*.drop_path": Retune(p=ByDepth(0.2, 0.6))})
    assert [site.rate for site in attached.sites] == pytest.approx([0.2, 0.4, 0.6])
    first = copy.deepcopy(model)
    torch.manual_seed(0)
    for each in (model, first):
        hits = [0, 0, 0]
        n = 400 if isinstance(kind, functools.partial) else 4
        for _ in range(n):
            for i, block in enumerate(each):
                x = torch.ones(400 if n == 4 else 1, 3)
                hits[i] += (block.drop_path(x) == 0).sum().item()
        for hit, p in zip(hits, (0.2, 0.4, 0.6), strict=True):
            units = 4800 if kind is Masks else 1600 if n == 4 else 400
            per = 1 if kind is Masks else 3
            assert abs(hit / per - units * p) <= 4 * math.sqrt(units * p * (1 - p))
    realized = [site.realized_rate for site in attached.sites]
    assert realized == pytest.approx([0.2, 0.4, 0.6], abs=0.1)
    attached.remove()
    assert isinstance(model[0].drop_path, nn.Identity)
    x = torch.ones(4, 3)
    assert model[0].drop_path(x) is x


def test_shared_layers_are_one_site():
    drop = nn.Dropout(0.5)
    model = nn.Sequential(drop, nn.Linear(3, 3), drop)
    attached = attach(model, {"type:Dropout": Retune(p=0.2)})
    assert len(attached) == 1
    model(torch.ones(9, 3))
    assert attached.sites[0].calls == 2
    attached.remove()
    assert drop.p == 0.5


# Compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", rest_slow(KINDS, [n for n in KINDS if n in ("Dropout-inplace", "DropPath", "Masks")])
)
@pytest.mark.parametrize("backend", rest_slow(["eager", "aot_eager"]))
def test_compiled(name, backend):
    """Values are right from the first call on, by the outputs and by the counts."""
    kind, model, x = KINDS[name], made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=StepSchedule({0: 0.3, 2: 0.6}))})
    fullgraph = attached.sites[0].regularizer.traceable
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    torch.manual_seed(6)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*holds the rate", category=HookWarning)
        for epoch, p in enumerate((0.3, 0.3, 0.6, 0.6)):
            attached.step(epoch)
            y = compiled(x)
            site = attached.sites[0]
            if kind.decided is not None and kind.decided > 0:
                units = dropped_by(kind, x, y.detach(), p)
                units = units.reshape(math.prod(x.shape[: kind.decided]), -1)[:, 0]
                n = len(units)
                assert abs(units.sum() - n * p) <= 4 * math.sqrt(n * p * (1 - p))
            if kind.decided and not (kind.alpha and not kind.ours):
                share = dropped_by(kind, x, y.detach(), p).float().mean().item()
                assert site.realized_rate == pytest.approx(share, abs=1e-6)
            model.eval()
            expected = Model(kind.make(0.4)).eval()(x)
            assert torch.equal(compiled(x), expected)
            model.train()
    attached.remove()
    assert kind.rate(model.drop) == 0.4


def test_fifty_rates_make_two_graphs():
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), Residual(0.1))
    spec = {
        "type:Dropout": Retune(p=LinearSchedule(0, 0.5, epochs=50)),
        "2.drop_path": Retune(p=0.5),
    }
    attached = attach(model, spec)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for epoch in range(50):
        attached.step(epoch)
        compiled(torch.ones(4, 3))
    assert len(graphs) <= 2


class ByKeyword(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.drop = drop

    def forward(self, x):
        return self.drop(input=x)


@pytest.mark.parametrize("compiled", [True, False])
def test_by_keyword(compiled):
    model = ByKeyword(nn.Dropout(0.1))
    attached = attach(model, {"drop": Retune(p=0.5)})
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    for _ in range(2):
        y = run(torch.ones(999))
        assert set(y.tolist()) == {0.0, 2.0}
        attached.step(0)
    assert attached.sites[0].total_realized_rate == pytest.approx(0.5, abs=0.1)


@each_kind
def test_what_is_exported_in_evaluation_is_the_bare_model(name):
    model, x = made(name).eval(), input_of(name)
    expected = model(x)
    attach(model, {"drop": Retune(p=0.6)})
    assert torch.equal(torch.jit.trace(model, (x,), check_trace=False)(x), expected)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)


# What compiled code holds --------------------------------------------------------------------


def warned_of(model, spec, epochs=4, call=None):
    attached = attach(model, spec)
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(3, 4))
    texts = []
    for epoch in range(1, epochs):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", HookWarning)
            attached.step(epoch)
        texts += [str(each.message) for each in caught if issubclass(each.category, HookWarning)]
        compiled(torch.ones(3, 4))
    return texts


def test_rates_that_compiled_code_holds_are_told_once():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), Masks(0.1), nn.Dropout(0.2), Masks(0.1))
    spec = {
        "1": Retune(p=LinearSchedule(0, 0.3, epochs=8)),
        "2": Retune(p=LinearSchedule(0, 0.3, epochs=8)),
    }
    spec["3"] = Retune(p=0.2)
    (text,) = warned_of(model, spec)
    assert text.startswith("1/Retune: if torch.compile runs this model")
    assert "6 values to come" in text
    assert f"recompile_limit ({torch._dynamo.config.recompile_limit})" in text
    assert "2/Retune" not in text
    assert "3/Retune" not in text


@pytest.mark.parametrize("p", [0.2, LinearSchedule(0.2, 0.2, epochs=4)])
def test_constant_rates_are_not_told(p):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), Masks(0.1))
    assert warned_of(model, {"1": Retune(p=p)}) == []


def test_without_compiled_code_nothing_is_told():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), Masks(0.1))
    attached = attach(model, {"1": Retune(p=LinearSchedule(0, 0.3, epochs=8))})
    for epoch in range(3):
        attached.step(epoch)
        model(torch.ones(3, 4))


# Layers that drop by themselves --------------------------------------------------------------


class WithIndices(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.drop = kind(0.5)

    def forward(self, x):
        y = self.drop(x)
        return y[0] if isinstance(y, tuple) else x * y


class Mask(nn.Module):
    """Gives which elements stay."""

    def __init__(self, prob):
        super().__init__()
        self.prob = prob

    def forward(self, x):
        return torch.rand_like(x) >= self.prob


@pytest.mark.parametrize("kind", [*([layers.PatchDropoutWithIndices] if layers else []), Mask])
@pytest.mark.parametrize("compiled", [True, False])
def test_what_gives_no_single_tensor_acts_by_itself(kind, compiled):
    model, x = WithIndices(kind), torch.ones(3, 41, 2)
    attached = attach(model, {"drop": Retune(p=0.25)}, example_input=x)
    y = (torch.compile(model, backend="eager") if compiled else model)(x)
    assert y.count_nonzero() == 3 * 31 * 2 if y.shape != x.shape else y.mean() < 1
    (site,) = attached.sites
    assert (site.calls, site.active_calls, site.realized_rate) == (1, 1, None)
    assert attached.verify() == []


class CountingDropPath(DropPaths):
    def __init__(self, drop_prob):
        super().__init__(drop_prob)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class BlockDropPath(DropPaths):
    def __init__(self, drop_prob):
        super().__init__(drop_prob)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return super().forward(self.norm(x))


@pytest.mark.parametrize("kind", [CountingDropPath, BlockDropPath])
def test_a_layer_with_a_state_is_not_tried(kind):
    model = Model(kind(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attach(model, {"drop": Retune(p=0.25)})
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    model(torch.ones(8, 3, 2))
    assert model.drop.drop_prob == 0.25


def test_a_forward_of_the_layer_s_own_acts_by_itself():
    model = Model(nn.Dropout(0.5))
    model.drop.forward = lambda x: x * 7
    attach(model, {"drop": Retune(p=0.25)})
    assert model(torch.ones(3)).tolist() == [7.0] * 3
    assert model.drop.p == 0.25


def test_attaching_draws_no_random_number():
    model = made("Transformers")
    state = torch.get_rng_state()
    attach(model, {"drop": Retune(p=0.25)})
    assert torch.equal(torch.get_rng_state(), state)


# Rates that modules hold themselves ----------------------------------------------------------


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.lstm = nn.Linear(4, 400), nn.LSTM(400, 4, 2, dropout=0.5)
        self.dropout, self.uses_lstm = 0, True

    def forward(self, x):
        if self.uses_lstm:
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
    with attached.paused():
        assert (model.dropout, model.lstm.dropout) == (0, 0.5)
    for other in (copy.deepcopy(model), pickled(model)):
        assert other.dropout == 0.4
        assert detach_all(other) == 1
        assert (other.dropout, type(other.dropout), other.lstm.dropout) == (0, int, 0.5)
        assert model.dropout == 0.4
    model.eval()
    assert torch.equal(model(x), model.fc(x))
    attached.remove()
    assert (model.dropout, type(model.dropout), model.lstm.dropout) == (0, int, 0.5)


def test_a_rate_of_a_module_that_is_never_called_is_told():
    model = Holding()
    model.uses_lstm = False
    attached = attach(model, {"attr:lstm.dropout": Retune(p=0.1)})
    with pytest.warns(HookWarning, match=r"lstm.dropout/Retune: never called"):
        model(torch.ones(5, 4))
    (finding,) = attached.verify()
    assert "never called" in str(finding)


def test_a_plan_of_what_modules_hold_changes_nothing():
    model = Holding()
    told = plan(
        model,
        {"attr:dropout": Retune(p=LinearSchedule(0.0, 0.4, 5))},
        example_input=torch.ones(2, 4),
    )
    assert (model.dropout, type(model.dropout)) == (0, int)
    (caution,) = [each for each in told.cautions if each.kind == "recompiles"]
    assert "each of 5 values: dropout" in caution.text
    assert told.rows[0].layout is None


# Wrapped -------------------------------------------------------------------------------------


def test_in_distributed_data_parallel():
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = made("Dropout-inplace")
        wrapped = nn.parallel.DistributedDataParallel(model)
        attached = attach(wrapped, {"drop": Retune(p=0.25)})
        y = wrapped(torch.ones(999))
        y.sum().backward()
        assert model.weight.grad == pytest.approx(y.sum().item())
        dropped_by(KINDS["Dropout"], torch.ones(999), y.detach(), 0.25)
        assert attached.verify(distributed=True) == []
        attached.remove()
        assert (model.drop.p, model.drop.inplace) == (0.4, True)
    finally:
        distributed.destroy_process_group()
