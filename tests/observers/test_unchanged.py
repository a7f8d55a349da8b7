"""Whatever is watched, and however: the training computes what it does without, to the bit."""

import copy
from contextlib import nullcontext

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    ActivationStats,
    Capture,
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    DropPath,
    GaussianNoise,
    GradientStats,
    Observer,
    OnGradients,
    Regularizer,
    ScaleGrad,
    Watchdog,
    WeightStats,
    ZeroGrad,
    attach,
    register,
)
from tests.observers.faulty import Code


@register
class RandomGrad(OnGradients, Regularizer):
    """Draws random numbers in the backward."""

    def apply(self, x, now):
        return x * torch.rand_like(x), None


class Block(nn.Module):
    """A residual block that works in place wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)  # called twice

    def forward(self, x):
        out = self.act(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.act(out)


def halves(x):
    """Views of one tensor, in a tuple."""
    x = x * 1.5
    return x[:, :2], x[:, 2:]


class Net(nn.Module):
    """Residual blocks, one of them called twice, one checkpointed; views, and tuples of them."""

    def __init__(self, reentrant: bool | None, frozen: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.first, self.shared, self.last = Block(), Block(), Block()
        self.shared.twin = self.first.bn2  # one module in two places
        self.halves = Code(halves)
        self.turned = Code(lambda x: x.transpose(2, 3))  # a view, in another order in memory
        self.same = nn.Identity()
        self.drop = nn.Dropout(0.1)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4, 2)
        self.reentrant = reentrant
        self.stem.requires_grad_(not frozen)
        self.first.conv1.requires_grad_(not frozen)

    def forward(self, x):
        x = self.first(self.stem(x))
        x = self.shared(self.turned(self.shared(x)))
        a, b = self.halves(x)
        x = self.shared.twin(self.same(torch.cat([b.relu_(), a], dim=1)))
        if self.reentrant is None:
            x = self.last(x)
        else:
            x = checkpoint(self.last, x, use_reentrant=self.reentrant)
        return self.head(self.drop(self.pool(x)))


MAPS = ("stem", "first", "first.conv1", "shared", "shared.act", "last", "last.bn2", "last.act")
OTHERS = ("turned", "same", "pool", "head")
PARAMETERS = ("param:head.weight", "param:first.conv2.weight", "param:last.conv1.weight")
ACTING = [
    Dropout(0.2),
    DropBlock2d(0.2, block_size=2),
    DropPath(0.2),
    GaussianNoise(0.1),
    DropBlock2d(0.2, block_size=2, at="input"),
    Dropout(0.2, at="input"),
    ClampGrad(-1e-2, 1e-2),
    ClipGradNorm(0.1),
    ScaleGrad(0.5, at="input"),
    RandomGrad(),
    ZeroGrad(),
]
ON_PARAMETERS = [
    ClampGrad(-1e-2, 1e-2),
    ClampGrad(-1e-2, 1e-2, when="accumulated"),
    ClipGradNorm(0.1),
    ClipGradNorm(0.1, group=True),
    ScaleGrad(0.5),
    RandomGrad(),
    RandomGrad(when="accumulated"),
]


def both(cls, **options):
    return [cls(at=at, when=when, **options) for at in ("output", "input") for when in WHEN]


WHEN = ("after", "before")
WATCHING = [
    *both(ActivationStats, every=2),
    *both(ActivationStats, every=1, active="always"),
    *both(Capture, keep=2),
    *(GradientStats(every=2, when=when) for when in WHEN),
    *(Capture(gradients=True, keep=2, when=when) for when in WHEN),
    Capture(activations=False, gradients=True, reduce="mean"),
    *(Watchdog(every=2, min_calls=1, action=lambda alert: None, when=when) for when in WHEN),
    WeightStats(),
]
ON_TUPLES = [
    *both(Capture),
    *(ActivationStats(index=i) for i in (0, 1)),
    *(GradientStats(index=i, when=when) for i in (0, 1) for when in WHEN),
    Watchdog(every=1, min_calls=1, action=lambda alert: None),
]
OF_PARAMETERS = [
    *(GradientStats(every=1, when=when) for when in WHEN),
    WeightStats(),
]


def lists(acting, watching):
    """Some of both, in any order; each class once at one place."""
    chosen = st.lists(st.sampled_from([*acting, *watching]), min_size=1, max_size=5)
    return chosen.map(lambda each: list({(type(one), one.at): one for one in each}.values()))


entries = st.one_of(
    st.tuples(st.sampled_from(MAPS), lists(ACTING, WATCHING)),
    st.tuples(st.sampled_from(OTHERS), lists([Dropout(0.2), ScaleGrad(0.5)], WATCHING)),
    st.tuples(st.just("halves"), lists([Dropout(0.2, index=1)], ON_TUPLES)),
    st.tuples(st.sampled_from(PARAMETERS), lists(ON_PARAMETERS, OF_PARAMETERS)),
)
specs = st.lists(entries, min_size=1, max_size=6, unique_by=lambda entry: entry[0])


def trained(model, spec, batches, accumulate):
    """Weights, buffers, gradients, losses and random states after a few updates."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    losses, states = [], []
    attached = attach(model, spec, optimizer=optimizer) if spec else nullcontext()
    with attached:
        for epoch, epochs in enumerate(batches):
            if spec:
                attached.step(epoch)
            model.train()
            for i, x in enumerate(epochs):
                x = x.clone().requires_grad_(epoch == 1)
                loss = model(x).square().mean()
                loss.backward()
                losses.append((loss.detach(), x.grad))
                if (i + 1) % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                states.append(torch.get_rng_state())
            model.eval()
            with torch.no_grad():
                losses.append((model(epochs[0]), None))
    grads = [p.grad for p in model.parameters()]
    return (model.state_dict(), grads, losses, states)


def only(spec, wanted):
    kept = [(where, [one for one in each if wanted(one)]) for where, each in spec]
    return [(where, each) for where, each in kept if each]


@pytest.mark.filterwarnings("ignore::dropblock_hooks.HookWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # no_grad
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    spec=specs,
    reentrant=st.sampled_from([None, False, True]),
    frozen=st.booleans(),
    accumulate=st.sampled_from([1, 2]),
)
def test_a_training_that_is_watched_is_the_training(spec, reentrant, frozen, accumulate):
    torch.manual_seed(0)
    if reentrant:  # which refuses gradients of `Capture`
        spec = only(spec, lambda one: not (isinstance(one, Capture) and one.gradients))
    model = Net(reentrant, frozen)
    batches = torch.randn(2, 4, 3, 3, 8, 8)
    watched = trained(model, spec, batches, accumulate)
    without = only(spec, lambda one: not isinstance(one, Observer))
    plain = trained(model, without, batches, accumulate)
    torch.testing.assert_close(watched, plain, rtol=0, atol=0)
