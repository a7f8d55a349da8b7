"""Retune on every kind of layer that drops: what is dropped, and that all is restored."""

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
from tests.cases import not_in_dynamo_of_2_9, rest_slow


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
        ours: whether a hook of ours drops in its place.
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
    "Dropout2d-3d": Kind(nn.Dropout2d, (30, 40, 3), 2),
    "Dropout3d": Kind(nn.Dropout3d, (30, 40, 2, 1, 3), 2),
    "Dropout3d-unbatched": Kind(nn.Dropout3d, (900, 2, 1, 3), 1),
    "AlphaDropout": Kind(nn.AlphaDropout, (40, 50), ours=False, alpha=True),
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


@pytest.mark.parametrize("name", OURS)
def test_a_rate_of_1_leaves_nothing(name):
    model, x = made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=1)})
    assert torch.equal(model(x), torch.zeros_like(x))
    assert attached.sites[0].realized_rate == 1


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
def test_inplace_stays_as_it_is(name):
    """A layer that drops by itself works in place; a hook in its place returns another tensor."""
    model, x = made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=0.3)})
    assert model.drop.inplace is True
    given = x.clone()
    y = model.drop(given)
    assert not torch.equal(y, x)
    assert torch.equal(given, x) is KINDS[name].ours
    attached.remove()
    assert model.drop.inplace is True


# Who acts ------------------------------------------------------------------------------------


@each_kind
def test_where_the_rate_is(name):
    """In the attribute, or 0 there where a hook of ours drops: from the start, and at each step."""
    kind, model, x = KINDS[name], made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=LinearSchedule(0.1, 0.5, epochs=5))})
    for epoch, p in enumerate((0.1, 0.2, 0.3)):
        attached.step(epoch)
        assert kind.rate(model.drop) == (0 if kind.ours else pytest.approx(p))
        assert attached.rates["drop/Retune"]["p"] == pytest.approx(p)
        model(x)


@pytest.mark.parametrize("name", [n for n in KINDS if not KINDS[n].alpha])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(name, reentrant):
    """The gradient of a weight w in front is the sum of what is kept, over w."""
    model, x = made(name), input_of(name).requires_grad_()
    attached = attach(model, {"drop": Retune(p=0.5)})
    torch.manual_seed(4)
    for _ in range(2):
        model.weight.grad = x.grad = None
        y = checkpoint(model, x, use_reentrant=reentrant)
        y.sum().backward()
        torch.testing.assert_close(model.weight.grad, y.sum().detach(), rtol=1e-4, atol=1e-3)
    assert attached.sites[0].calls == 2
    assert attached.verify() == []


@not_in_dynamo_of_2_9("a hook that is a local function")
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
@pytest.mark.parametrize("leaving", LEAVING, ids=lambda function: function.__name__)
def test_all_is_restored(name, leaving, hook_count):
    model, x = made(name), input_of(name)
    before, hooks = attributes(model), hook_count(model)
    attached = attach(model, {"drop": Retune(p=LinearSchedule(0.1, 0.5, epochs=5))})
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
def test_paused_the_layer_has_its_own_rate(name):
    kind, model, x = KINDS[name], made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=0.2)})
    with attached.paused():
        assert kind.rate(model.drop) == 0.4
        attached.step()
        attached.set("drop/Retune", p=0.3)
        with attached.paused():
            assert kind.rate(model.drop) == 0.4
        assert kind.rate(model.drop) == 0.4
        if kind.decided:
            dropped_by(kind, x, model(x), 0.4)
    assert kind.rate(model.drop) == (0 if kind.ours else 0.3)
    attached.enabled = False
    assert kind.rate(model.drop) == 0.4
    attached.enabled = True
    attached.set(Retune, p=0.25)
    assert kind.rate(model.drop) == (0 if kind.ours else 0.25)
    if kind.decided:
        dropped_by(kind, x, model(x), 0.25)


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
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved, ema, averaged])
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


@each_kind
def test_state_is_restored_into_the_attribute(name):
    kind, ramp = KINDS[name], LinearSchedule(0.1, 0.5, epochs=5)
    model = made(name)
    keys = list(model.state_dict())
    attached = attach(model, {"drop": Retune(p=ramp)})
    attached.step(1)
    assert list(model.state_dict()) == keys
    state = attached.state_dict()
    other = made(name)
    resumed = attach(other, {"drop": Retune(p=ramp)})
    resumed.load_state_dict(state)
    assert kind.rate(other.drop) == kind.rate(model.drop)
    assert kind.rate(other.drop) == (0 if kind.ours else pytest.approx(0.2))
    assert resumed.rates == attached.rates == {"drop/Retune": {"p": pytest.approx(0.2)}}


# What is told --------------------------------------------------------------------------------


@each_kind
def test_reports(name):
    model, x = made(name), input_of(name)
    attached = attach(model, {"drop": Retune(p=0.25)})
    model(x)
    assert attachments(model) == [attached]
    (row,) = attached.report()
    assert (row.site, row.rate, row.calls) == ("drop/Retune", 0.25, 1)
    assert (row.realized_rate is not None) is KINDS[name].ours
    told = attached.scalars()
    assert told["reg/drop/Retune/p"] == 0.25
    assert ("reg/drop/Retune/realized_rate" in told) is KINDS[name].ours
    assert attached.verify() == []


# Rates that the module around a layer reads ---------------------------------------------------


class Fused(nn.Module):
    """Reads the rate, or calls the layer, as attention in timm does."""

    def __init__(self, p=0.1):
        super().__init__()
        self.attn_drop, self.proj, self.fused = nn.Dropout(p), nn.Linear(4, 4), True

    def forward(self, x):
        x = self.proj(x)
        if self.fused:
            return nn.functional.dropout(x, self.attn_drop.p if self.training else 0.0)
        return self.attn_drop(x)


class ReadsInAMethod(Fused):
    def forward(self, x):
        return self.attend(x)

    def attend(self, x):
        return nn.functional.dropout(self.proj(x), self.attn_drop.p, self.training)


class Around(nn.Module):
    """Reads the rate of a layer inside its child."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"attn_drop": nn.Dropout(0.1)})

    def forward(self, x):
        p = self.inner.attn_drop.p if self.training else 0.0
        return nn.functional.dropout(x, p)


namespace = {}
exec(  # a class without a source
    "from torch import nn\n"
    "class Lost(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.attn_drop = nn.Dropout(0.1)\n"
    "    def forward(self, x):\n"
    "        return nn.functional.dropout(x, self.attn_drop.p, self.training)\n",
    namespace,
)
READS = {
    "in the forward": (Fused, "attn_drop"),
    "in a method": (ReadsInAMethod, "attn_drop"),
    "above its parent": (Around, "inner.attn_drop"),
    "without a source": (namespace["Lost"], "attn_drop"),
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


def test_a_layer_that_is_read_and_called_drops_once_either_way():
    model, x = Fused(), torch.rand(4000, 4) + 1
    attached = attach(model, {"attn_drop": Retune(p=0.3)})
    for fused in (True, False, True):
        model.fused = fused
        share = (model(x) == 0).float().mean()
        assert share == pytest.approx(0.3, abs=4 * (0.21 / 16000) ** 0.5)
        model.eval()(x)
        model.train()
    assert attached.verify() == []


class Indirect(nn.Module):
    """Reads it by a way that its source does not show."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"attn_drop": nn.Dropout(0.1)})

    def forward(self, x):
        drop = self.inner["attn_drop"]
        return nn.functional.dropout(x, drop.p, self.training)


def test_a_rate_that_is_read_unseen_is_a_finding():
    model = nn.Sequential(Indirect())
    attached = attach(model, {"0.inner.attn_drop": Retune(p=0.3)})
    with pytest.warns(HookWarning, match="never called"):
        model(torch.ones(2, 4))
    (finding,) = attached.verify()
    assert "never called" in str(finding)


class Refuses(nn.Module):
    """It takes no rate above one half."""

    def __init__(self):
        super().__init__()
        self.rate = 0.1

    p = property(lambda self: self.rate)

    @p.setter
    def p(self, value):
        if value > 0.5:
            raise ValueError("too much")
        self.rate = value

    def forward(self, x):
        return nn.functional.dropout(x, self.rate, self.training)


def test_a_step_that_a_layer_refuses_moves_nothing():
    model = nn.Sequential(Refuses(), Refuses(), nn.Dropout(0.2))
    ramp = LinearSchedule(0.0, 0.6, epochs=3)
    attached = attach(model, {"2": Retune(p=ramp), "1": Retune(p=0.2), "0": Retune(p=ramp)})
    attached.step(1)
    before = attached.rates, [layer.p for layer in model], attached.epoch
    with pytest.raises(ValueError, match="too much"):
        attached.step(2)
    assert (attached.rates, [layer.p for layer in model], attached.epoch) == before
    attached.remove()
    assert [layer.p for layer in model] == [0.1, 0.1, 0.2]


def test_a_plan_changes_nothing():
    model = nn.Sequential(
        nn.Linear(4, 4), Fused(0.5), nn.Dropout(0.5, inplace=True), Tripled(0.5, inplace=True)
    )
    spec = {"type:Dropout": Retune(p=LinearSchedule(0.1, 0.3, epochs=3))}
    x = torch.ones(3, 4)
    drops = [model[1].attn_drop, model[2], model[3]]
    plan(model, spec, example_input=x)
    assert [(d.p, d.inplace) for d in drops] == [(0.5, False), (0.5, True), (0.5, True)]
    attached = attach(model, spec, example_input=x)
    assert [d.p for d in drops] == [0.1, 0.0, 0.1]
    assert [site.calls for site in attached.sites] == [0] * 3
    attached.remove()
    assert [(d.p, d.inplace) for d in drops] == [(0.5, False), (0.5, True), (0.5, True)]


# Several layers ------------------------------------------------------------------------------


def test_by_depth():
    torch.manual_seed(0)
    model = nn.Sequential(*(DropPaths(0.1) for _ in range(3)))
    attached = attach(model, {"*": Retune(p=ByDepth(0.2, 0.6))})
    for _ in range(400):
        model(torch.ones(30, 3))
    for site, p in zip(attached, (0.2, 0.4, 0.6), strict=True):
        assert site.rate == pytest.approx(p)
        assert abs(site.realized_rate - p) <= 4 * math.sqrt(p * (1 - p) / 12_000)


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
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.manual_seed(6)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*as constants", category=HookWarning)
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
    assert text.startswith("1/Retune: torch.compile reads these rates as constants")
    assert f"recompile_limit ({torch._dynamo.config.recompile_limit})" in text
    assert "2/Retune" not in text
    assert "3/Retune" not in text


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


class BlockWithDropPath(DropPaths):
    """It has a layer of its own: its name does not tell what is dropped."""

    def __init__(self, drop_prob):
        super().__init__(drop_prob)
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        return x + super().forward(self.fc(x))


@pytest.mark.parametrize(("kind", "p"), [(CountingDropPath, 0), (BlockWithDropPath, 0.25)])
def test_a_drop_path_that_does_more(kind, p):
    model, x = Model(kind(0.5)), torch.ones(400, 3, 2)
    attached = attach(model, {"drop": Retune(p=0.25)})
    assert model.drop.drop_prob == p
    y = model(x)
    dropped = (y == (x if kind is BlockWithDropPath else 0)).flatten(1).all(1)
    assert dropped.float().mean() == pytest.approx(0.25, abs=4 * (0.1875 / 400) ** 0.5)
    assert getattr(model.drop, "calls", 1) == 1
    attached.remove()
    assert model.drop.drop_prob == 0.5


def test_a_forward_of_the_layer_s_own_acts_by_itself():
    model = Model(nn.Dropout(0.5))
    model.drop.forward = lambda x: x * 7
    attach(model, {"drop": Retune(p=0.25)})
    assert model(torch.ones(3)).tolist() == [7.0] * 3
    assert model.drop.p == 0.25


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
    with pytest.warns(HookWarning, match="never called"):
        model(torch.ones(5, 4))
    (finding,) = attached.verify()
    assert "never called" in str(finding)
