"""`sample`: Monte-Carlo dropout."""

import operator
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ClampGrad,
    Dropout,
    Dropout2d,
    Foreign,
    HookWarning,
    attach,
    capture,
    sample,
)


class Small(nn.Module):
    """A convolution, a norm with running statistics, a dropout of its own, a head."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.own = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)
        self.branch = nn.Linear(8, 4)  # which nobody calls

    def forward(self, x, scale=1.0):
        return self.head(self.own(self.norm(self.conv(x)).relu().mean((2, 3)))) * scale


def images():
    return torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def prepared(spec=None):
    torch.manual_seed(0)
    model = Small()
    model(images())  # running statistics that are not the initial ones
    return model, attach(model, spec or {"conv": Dropout2d(0.3)})


def test_mean_and_std_are_those_of_the_outputs():
    model, attached = prepared()
    seen = []
    model.register_forward_hook(lambda module, args, y: seen.append(y.numpy().copy()))
    with attached.always():
        mean, std, samples = sample(model, images(), n=7)
    assert np.array_equal(samples.numpy(), np.stack(seen))
    assert samples.shape == (7, 5, 4)
    assert not any(tensor.requires_grad for tensor in (mean, std, samples))
    wide = samples.double().numpy()
    np.testing.assert_allclose(mean.numpy(), wide.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(std.numpy(), wide.std(0, ddof=1), rtol=1e-4, atol=1e-6)
    assert std.min() > 0


def test_moments_of_dropout_before_a_linear_layer():
    """y = sum w x m / (1 - p): its mean is w x, its variance sum (w x)^2 p / (1 - p).

    The means of n samples are within 4.5 standard errors, for 64 of which the largest of normal
    ones is above that with a chance of 4e-4; so are the variances, with the fourth moment of y.
    """
    torch.manual_seed(0)
    n, p, units = 4000, 0.3, 50
    model = nn.Sequential(nn.Linear(units, 4, bias=False)).double().eval()
    x = torch.rand(16, units).double()
    attach(model, {"0": Dropout(p, at="input", active="always")})
    mean, std, _ = sample(model, x, n=n)
    terms = model[0].weight.detach() * x[:, None]  # (16, 4, units)
    variance = terms.square().sum(-1) * p / (1 - p)
    z = (mean - terms.sum(-1)) / (variance / n).sqrt()
    assert z.abs().max() < 4.5
    # m / (1 - p) has the excess kurtosis (1 - 6 p (1 - p)) / (p (1 - p)); those of terms add up
    excess = (1 - 6 * p * (1 - p)) / (p * (1 - p))
    kurtosis = excess * terms.pow(4).sum(-1) / terms.square().sum(-1).square()
    spread = variance * ((kurtosis + 2 * n / (n - 1)) / n).sqrt()
    z = (std.square() - variance) / spread
    assert z.abs().max() < 4.5


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_as_before(training):
    model, attached = prepared()
    model.train(training)
    model.norm.train(not training)  # frozen, or forgotten
    before = modes(model)
    seen = []
    model.register_forward_hook(lambda module, args, y: seen.append(modes(module)))
    with attached.always():
        sample(model, images(), n=2)
        assert modes(model) == before
        with pytest.raises(ZeroDivisionError):
            sample(model, images(), n=2, target=lambda y: 1 / 0)
    assert modes(model) == before
    assert not any(map(any, seen))
    assert seen


def test_a_short_summary_is_printed():
    model, attached = prepared()
    with attached.always():
        sampled = sample(model, images(), n=3)
        votes = sample(model, images(), n=3, target=lambda y: y.argmax(-1) == 0)
    low, high = sampled.mean.min(), sampled.mean.max()
    assert repr(sampled).startswith(f"Sampled(mean=(5, 4) from {low:.3g} to {high:.3g}, std=(5, 4)")
    assert repr(votes).endswith("samples=(3, 5))")


def test_the_models_own_dropout_is_in_evaluation():
    model, attached = prepared()
    model.eval()
    plain = model(images())
    model.own.train()
    attached.set("conv/Dropout2d", p=1e-12)
    with attached.always():
        _, std, samples = sample(model, images(), n=3)
    assert torch.equal(samples[0], plain)
    assert not std.any()
    assert model.own.training


@dataclass
class Output:
    logits: torch.Tensor


class Returns(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.inner, self.wrap = nn.Linear(3, 3), wrap

    def forward(self, x):
        return self.wrap(self.inner(x))


def wrapped(wrap):
    model = Returns(wrap)
    attach(model, {"inner": Dropout(0.5, active="always")})
    return model


@pytest.mark.parametrize(
    ("wrap", "key", "said"),
    [
        (lambda y: (y, 1), 0, "tuple"),
        (lambda y: {"scores": y}, "scores", r"dict with \['scores'\]"),
    ],
)
def test_an_output_that_is_no_tensor(wrap, key, said):
    model, x, pick = wrapped(wrap), torch.ones(2, 3), operator.itemgetter(key)
    cure = re.escape(f"lambda output: output[{key!r}]")
    with pytest.raises(TypeError, match=f"no tensor but {said}: pick one .*{cure}"):
        sample(model, x)
    assert sample(model, x, n=2, target=pick).samples.shape == (2, 2, 3)
    assert model.training


@pytest.mark.parametrize(
    "wrap",
    [Output, lambda y: {"logits": y, "loss": 0}, lambda y: {"aux": y.sum(), "out": y}],
    ids=["attribute", "logits", "out"],
)
def test_the_logits_of_an_output_are_found(wrap):
    model, x = wrapped(wrap), torch.ones(2, 3)
    assert sample(model, x, n=2).samples.shape == (2, 2, 3)
    _, grads = capture(model, x, "inner", gradients=True)
    assert torch.equal(grads["inner"], torch.ones(2, 3))


NOTHING_RANDOM = {
    "train": Dropout2d(0.3),
    "foreign": Foreign(nn.Dropout),
    "zero": Dropout2d(0.0, active="always"),
}


@pytest.mark.parametrize("case", NOTHING_RANDOM)
def test_nothing_random(case):
    model = Small()
    attach(model, {"conv": NOTHING_RANDOM[case]})
    called = []
    model.register_forward_hook(lambda *given: called.append(given))
    with pytest.raises(RuntimeError, match=r"all samples would be equal: .*attached.always\(\)"):
        sample(model, images())
    assert not called
    assert all(modes(model))


def test_a_model_without_anything_random_says_what_is_missing():
    with pytest.raises(RuntimeError, match="the model has no attachment"):
        sample(Small(), images())
    model, _ = prepared({"conv": ClampGrad(-1.0, active="always")})
    with pytest.raises(RuntimeError, match=r"no site draws random numbers \(conv/ClampGrad\)"):
        sample(model, images())


def test_nothing_random_while_paused():
    model, attached = prepared()
    with attached.always(), attached.paused(), pytest.raises(RuntimeError, match="paused"):
        sample(model, images())


def test_a_layer_that_nobody_calls():
    model, attached = prepared({"branch": Dropout(0.5)})
    with (
        attached.always(),
        pytest.warns(HookWarning, match=r"the 3 forwards called no layer of branch/Dropout"),
    ):
        _, std, _ = sample(model, images(), n=3)
    assert not std.any()


def test_a_compiled_model():
    torch._dynamo.reset()
    model, attached = prepared()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = modes(call)
    with attached.always():
        _, std, _ = sample(call, images(), n=4)
    assert modes(call) == before == [True] * len(before)
    assert std.min() > 0
    assert attached.sites[0].active_calls == 0
