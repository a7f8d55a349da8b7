"""`sample` with functional dropout, whose rate an ``attr:`` selector names."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from dropblock_hooks import (
    ActivationStats,
    Capture,
    Dropout,
    GaussianDropout,
    GaussianNoise,
    HookWarning,
    LinearSchedule,
    Retune,
    attach,
    sample,
)


class Block(nn.Module):
    """Drops by a function, behind a norm with statistics and a dropout of its own."""

    def __init__(self, p=0.1):
        super().__init__()
        self.p = p
        self.norm = nn.BatchNorm1d(20)
        self.own = nn.Dropout(0.5)

    def forward(self, x):
        return functional.dropout(self.own(self.norm(x)), self.p, self.training)


class ForgetsTheFlag(Block):
    def forward(self, x):
        return functional.dropout(self.own(self.norm(x)), self.p, False)


class ForgetsTheRate(Block):
    def forward(self, x):
        return functional.dropout(self.own(self.norm(x)), 0.0, self.training)


class Fails(Block):
    def forward(self, x):
        raise ZeroDivisionError


SPEC = {"attr:0.p": Retune(p=0.4)}


def batch():
    return torch.ones(50, 20)


def made(spec=None, block=Block):
    model = nn.Sequential(block(), nn.Identity())
    return model, attach(model, SPEC if spec is None else spec)


def modes(model):
    return [module.training for module in model.modules()]


def counts(attached):
    """Everything that the report shows or that a later report may show."""
    live = [site._live for site in attached]
    rows = [
        (
            site.key,
            site.counter.trained,
            site.counter.evaluated,
            site.counter.active,
            site.counter.off,
            site.counter.total,
            site.counter.affected,
        )
        for site in live
    ]
    run = live[0].run
    return rows, (run.counter.trained, run.counter.evaluated), run.checked


@pytest.mark.parametrize("training", [True, False], ids=["from training", "from evaluation"])
def test_the_function_drops_at_the_rate_and_nothing_else_does(training):
    model, attached = made()
    model.train(training)
    statistics = model[0].norm.state_dict()
    before = modes(model)
    inside = []
    model[0].norm.register_forward_hook(lambda module, *_: inside.append(module.training))
    with attached.always():
        samples = sample(model, batch(), n=40).samples
    dropped = (samples == 0).double().mean().item()
    spread = (0.4 * 0.6 / samples.numel()) ** 0.5
    assert abs(dropped - 0.4) < 4 * spread  # with the dropout of its own it would be 0.7
    kept = samples.max().item()
    assert kept == pytest.approx(1 / 0.6, rel=1e-4)
    assert not torch.equal(samples[0], samples[1])

    assert modes(model) == before
    assert inside == [False] * 40
    for name, value in model[0].norm.state_dict().items():
        assert torch.equal(value, statistics[name]), name
    assert model[0].p == 0.4
    attached.remove()
    assert model[0].p == 0.1


class TwoRates(nn.Module):
    """Drops twice, with a rate for each."""

    def __init__(self):
        super().__init__()
        self.drop_first = 0.1
        self.drop_second = 0.2

    def forward(self, x):
        self.rates = self.drop_first, self.drop_second
        x = functional.dropout(x, self.drop_first, self.training)
        return functional.dropout(x, self.drop_second, self.training)


def test_a_rate_of_0_is_0_beside_another_rate_of_the_module():
    model = nn.Sequential(TwoRates())
    spec = {"attr:0.drop_first": Retune(p=0.4), "attr:0.drop_second": Retune(p=0.0)}
    attached = attach(model, spec)
    with attached.always():
        sample(model, batch(), n=2)
    assert model[0].rates == (0.4, 0.0)


def test_the_other_rate_may_be_of_another_attachment():
    model = nn.Sequential(TwoRates())
    attached = attach(model, {"attr:0.drop_first": Retune(p=0.4)})
    other = attach(model, {"attr:0.drop_second": Retune(p=0.3)})
    with attached.always():
        sample(model, batch(), n=2)
    assert model[0].rates == (0.4, 0.3)
    with attached.always(), other.paused():
        sample(model, batch(), n=2)
    assert model[0].rates == (0.4, 0.2)


class CallsItself(Block):
    def forward(self, x, depth=2):
        if depth:
            x = self(x, depth - 1)
        return functional.dropout(x, self.p, self.training)


def test_a_module_that_calls_itself_drops_each_time():
    model, attached = made(block=CallsItself)
    before = modes(model)
    with attached.always():
        samples = sample(model, batch(), n=40).samples
    kept = (samples != 0).double().mean().item()
    assert abs(kept - 0.6**3) < 4 * (0.6**3 / samples.numel()) ** 0.5
    assert modes(model) == before


def test_calls_are_counted_as_those_of_a_dropout_layer_within_always():
    model, attached = made({"attr:0.p": Retune(p=0.4), "1": Dropout(0.3)})
    attached.step(0)
    before = counts(attached)
    with attached.always():
        sample(model, batch(), n=7)
    rows, forwards, checked = counts(attached)
    of_function, of_layer = rows
    assert of_function[1:] == of_layer[1:] == (0, 7, 0, 0, 0, 0)
    assert forwards == (0, 7)
    assert checked is before[2] is False  # no check of a training forward ran
    model(batch())
    assert [row[1:4] for row in counts(attached)[0]] == [(1, 7, 1)] * 2


def test_all_other_hooks_of_the_module_see_evaluation():
    """Also hooks of the model, if the model itself holds the rate."""
    items = [GaussianDropout(0.3), GaussianNoise(0.2, at="input"), ActivationStats(), Capture()]
    found = []
    for spec in ({".": items}, {".": items, "attr:p": Retune(p=0.4)}):
        model = Block()
        attached = attach(model, spec)
        seen = []
        model.register_forward_pre_hook(lambda module, args, into=seen: into.append(modes(module)))
        model.register_forward_hook(lambda module, args, y, into=seen: into.append(modes(module)))
        attached.step(0)
        with attached.always():
            samples = sample(model, batch(), n=5).samples
        assert seen == [[False] * 3] * 10
        before_training = counts(attached)
        assert before_training[1:] == ((0, 5), False)
        model(batch())
        found.append((before_training[0], counts(attached)[0][:4], counts(attached)[1:]))
    without, with_function = found
    assert with_function[0][:4] == without[0]
    assert with_function[1:] == without[1:]
    assert 0.3 < (samples == 0).double().mean() < 0.5


def test_the_rate_is_that_of_the_epoch():
    model, attached = made({"attr:0.p": Retune(p=LinearSchedule(0.2, 0.6, epochs=5))})
    for epoch, rate in ((0, 0.2), (4, 0.6)):
        attached.step(epoch)
        with attached.always():
            samples = sample(model, batch(), n=40).samples
        dropped = (samples == 0).double().mean().item()
        assert abs(dropped - rate) < 4 * (rate * (1 - rate) / samples.numel()) ** 0.5


def test_no_hook_and_no_mode_is_left_after_an_error():
    model, attached = made(block=Fails)
    before = modes(model)
    hooks = len(model[0]._forward_hooks), len(model[0]._forward_pre_hooks)
    with attached.always(), pytest.raises(ZeroDivisionError):
        sample(model, batch())
    assert modes(model) == before
    assert (len(model[0]._forward_hooks), len(model[0]._forward_pre_hooks)) == hooks
    assert model[0].p == 0.4
    model.eval()
    with attached.always(), pytest.raises(ZeroDivisionError):
        sample(model, batch())
    assert not any(modes(model))


@pytest.mark.parametrize("block", [ForgetsTheFlag, ForgetsTheRate])
def test_a_module_that_never_drops_is_told(block):
    model, attached = made(block=block)
    with (
        attached.always(),
        pytest.warns(
            HookWarning, match=r"all 6 samples are equal, although 'attr:0.p' should drop"
        ),
    ):
        std = sample(model, batch(), n=6).std
    assert not std.any()


def test_a_module_that_nobody_calls_is_told():
    model = nn.Sequential(nn.Linear(20, 20))
    model[0].branch = Block()
    attached = attach(model, {"attr:0.branch.p": Retune(p=0.4)})
    with (
        attached.always(),
        pytest.warns(HookWarning, match=r"the 3 forwards called no layer of 0.branch.p/Retune"),
    ):
        sample(model, batch(), n=3)


NOTHING_RANDOM = {
    "outside of always": (Retune(p=0.4), []),
    "a rate of 0": (Retune(p=0.0), ["always"]),
    "paused": (Retune(p=0.4), ["always", "paused"]),
}


@pytest.mark.parametrize("case", NOTHING_RANDOM)
def test_nothing_random(case):
    regularizer, blocks = NOTHING_RANDOM[case]
    model, attached = made({"attr:0.p": regularizer})
    for block in blocks:
        getattr(attached, block)().__enter__()
    message = r"all samples would be equal: 0\.p/Retune draws no random numbers"
    with pytest.raises(RuntimeError, match=message):
        sample(model, batch())
    assert all(modes(model))


def test_one_batch_is_refused():
    model, attached = made()
    message = r"^'attr:0\.p': a function of the model drops.*leave batched=True out"
    with attached.always(), pytest.raises(RuntimeError, match=message):
        sample(model, batch(), batched=True)


def test_a_norm_with_statistics_is_refused():
    class Norm(nn.BatchNorm1d):
        p = 0.1

        def __init__(self):
            super().__init__(20)
            self.p = 0.1

        def forward(self, x):
            return functional.dropout(super().forward(x), self.p, self.training)

    model, attached = made(block=Norm)
    statistics = model[0].running_mean.clone()
    with attached.always(), pytest.raises(RuntimeError, match="'attr:0.p': the module has running"):
        sample(model, batch())
    assert torch.equal(model[0].running_mean, statistics)
    assert all(modes(model))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(8, 8, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.inner(x)


LAYERS_OF_TORCH = {
    "attention": (Attention, "attr:inner.dropout"),
    "lstm": (Recurrent, "attr:inner.dropout"),
    "encoder": (Encoder, "attr:inner.self_attn.dropout"),
}


@pytest.mark.parametrize("name", LAYERS_OF_TORCH)
def test_layers_of_torch(name):
    make, selector = LAYERS_OF_TORCH[name]
    torch.manual_seed(0)
    model = make()
    x = torch.randn(3, 5, 8)
    plain = model.eval()(x)
    model.train()
    attached = attach(model, {selector: Retune(p=0.3)})
    with attached.always():
        std = sample(model, x, n=5).std
    assert std.max() > 0
    assert all(modes(model))
    assert torch.allclose(model.eval()(x), plain, atol=1e-6)


def test_a_compiled_model_runs_in_eager_mode_and_keeps_its_code():
    torch._dynamo.reset()
    counters.clear()
    model, attached = made()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    call(batch())
    graphs = counters["stats"]["unique_graphs"]
    with attached.always():
        std = sample(call, batch(), n=4).std
        assert std.max() > 0
    call(batch())
    assert counters["stats"]["unique_graphs"] == graphs
    assert attached.sites[0].active_calls == 2
    torch._dynamo.reset()
