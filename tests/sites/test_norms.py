"""The norms of gradients before a bound: against numpy on what a plain hook collected."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import ClipGradNorm, Rate, Regularizer, attach, register
from tests.cases import rest_slow

SHARES = [0.0, 0.1, 0.5, 0.9, 0.99, 1.0]


ERROR = 2 ** (1 / 4) - 1  # a bin is a quarter of an octave


def counted(*parts):
    """The norms of samples with these norms, in several backwards."""
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": ClipGradNorm(1e300, per="sample")})
    for part in parts:
        x = torch.zeros(len(part), 1, dtype=torch.float64, requires_grad=True)
        model(x).backward(torch.as_tensor(part, dtype=torch.float64)[:, None])
    return attached.sites[0].norms


def assert_as(norms, values):
    """Count, mean, largest and quantiles as of these values."""
    values = np.asarray(values, dtype=np.float64)
    assert norms.count == len(values)
    assert norms.mean == pytest.approx(values.mean(), rel=1e-5)
    assert norms.largest == pytest.approx(values.max(), rel=1e-5)
    for q in SHARES:
        wanted = np.quantile(values, q, method="inverted_cdf")
        assert norms.quantile(q) == pytest.approx(wanted, rel=ERROR + 1e-4)


class Net(nn.Module):
    """A convolution whose gradient is regularized, behind another; perhaps in a checkpoint."""

    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.body = nn.Conv2d(2, 6, 3), nn.Sequential(nn.Conv2d(6, 4, 3), nn.Tanh())
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.stem(x)
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


BATCHES = [torch.randn(n, 2, 9, 9, generator=torch.Generator().manual_seed(n)) for n in (5, 3, 2)]


def train(model, call=None, scale=1.0):
    for x in BATCHES:
        (((model if call is None else call)(x) ** 2).sum() * scale).backward()


def sizes(per):
    """The norms of the gradients that a plain hook sees at the first layer of the body."""
    model, grads = Net(), []

    def watch(module, args, output):
        output.register_hook(grads.append)

    model.body[0].register_forward_hook(watch)
    train(model)
    parts = {"tensor": lambda g: [g], "sample": lambda g: g, "channel": lambda g: g.unbind(1)}
    return [float(part.double().norm()) for grad in grads for part in parts[per](grad)]


@given(
    st.floats(-10, 10),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.floats(0.1, 3.0),
    st.integers(0, 2**31),
)
@settings(max_examples=15, deadline=None)
def test_quantiles_are_numpys_over_all_scales(exponent, batches, spread, seed):
    draw = np.random.default_rng(seed)
    parts = [10**exponent * np.exp(spread * draw.standard_normal(n)) for n in batches]
    assert_as(counted(*parts), np.concatenate(parts))


def test_what_is_not_finite_or_lies_outside_the_bins():
    norms = counted([0.0, 1e-30, 3.0, math.inf, math.nan], [1e30])
    assert norms.count == 4
    assert [norms.quantile(q) for q in (0.1, 0.5)] == [0.0, 0.0]
    assert norms.quantile(0.75) == pytest.approx(3.0, rel=ERROR)
    assert norms.largest == 1e30, "above the last bin, which ends at 2**64"
    assert counted([math.nan]) is None
    with pytest.raises(ValueError, match=r"q must be in \[0, 1\], got 1.5"):
        norms.quantile(1.5)


def test_no_quantile_of_one_norm_lies_below_its_mean():
    for norm in (0.3, 1.0, 1.19, 7.0, 1e30):
        norms = counted([norm])
        assert {norms.quantile(q) for q in (0.0, 0.5, 0.99, 1.0)} == {norms.largest}
        assert norms.largest == norms.mean == norm


def test_quantiles_are_interpolated_in_their_bin():
    values = 2 ** (torch.arange(0.5, 1000) / 4000)  # of the bin that begins at 1
    norms = counted(values)
    for q in (0.1, 0.5, 0.9):
        assert norms.quantile(q) == pytest.approx(2 ** (q / 4), rel=1e-3)


def test_the_largest_norm_is_that_of_the_window():
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": ClipGradNorm(1e300, per="sample")})
    largest = []
    for epoch, norm in enumerate([2.0, 7.1, 3.3]):
        x = torch.zeros(2, 1, requires_grad=True)
        model(x).backward(torch.tensor([[norm], [0.5]]))
        largest.append(attached.sites[0].norms.largest)
        attached.step(epoch + 1)
        largest.append(attached.sites[0].norms.largest)
    assert largest == pytest.approx([2.0, 2.0, 7.1, 7.1, 3.3, 3.3])
    attached.set("0/ClipGradNorm", max_norm=1e200)
    assert attached.sites[0].norms is None
    model(x).backward(torch.tensor([[1.5], [0.5]]))
    assert attached.sites[0].norms.largest == 1.5
    assert attached.sites[0]._live.counter.life().norms.largest == pytest.approx(7.1)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("mode", "per", "scale"),
    rest_slow(
        itertools.product(
            ("eager", "checkpointed", "compiled", "both"),
            ("tensor", "sample", "channel"),
            (1.0, 2.0**16),
        ),
        plain=[*itertools.product(("eager",), ("tensor", "sample", "channel"), (2.0**16,))],
    ),
)
def test_norms_of_a_training(mode, per, scale):
    """In any mode, and with a GradScaler those of the unscaled loss."""
    torch._dynamo.reset()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
    model = Net(mode in ("checkpointed", "both"))
    attached = attach(model, {"body.0": ClipGradNorm(0.5, per=per)}, grad_scaler=scaler)
    if scale > 1:
        scaler.scale(torch.zeros(()))  # its scale is made then
    compiled = mode in ("compiled", "both")
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    train(model, call, scale)
    assert_as(attached.sites[0].norms, sizes(per))


@register
class Contrast(Regularizer):
    """Rewards large activations: the values of the penalty are negative."""

    weight: Rate = 0.1
    acts_on = "gradient"
    needs_activation = True
    penalizes = True
    random = False
    traced = True

    def apply(self, x, now):
        activation = now.activation
        now.norms = -activation.square().mean()
        return x - now.weight * activation, x.numel()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_penalty_may_be_negative(compiled):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": Contrast()})
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for value in (1.0, 2.0, math.inf):  # the penalty -Inf is left out
        call(torch.full((2, 3), value, requires_grad=True)).sum().backward()
    norms = attached.sites[0].norms
    assert norms.count == 2
    assert norms.mean == pytest.approx(-2.5)
    assert norms.largest == norms.quantile(0.5) == 0.0
    assert attached.report()[0].penalty == pytest.approx(-2.5)
