"""Watchdog: the layer that made NaN or Inf is named, forward and backward."""

import math

import pytest
import torch
from torch import nn

from dropblock_hooks import watch

BAD = [math.nan, math.inf, -math.inf]


class Attention(nn.Module):
    """Several uses of one tensor, and code of its own between its layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return self.out(weights @ v)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width)
        )
        self.same = nn.Identity()

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return self.same(x + self.mlp(x))


class Tokens(nn.Module):
    """Residual blocks; `trouble` is applied in the code of its own, in front of the last block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.blocks = nn.Sequential(Block(width), Block(width), Block(width))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)).mean(1))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.layers = nn.ModuleList([Residual(6), Residual(6)])
        self.flat = nn.Flatten()
        self.fc = nn.Linear(6 * 36, 3)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.fc(self.flat(x))


MODELS = {"tokens": (Tokens, (4, 6, 5)), "maps": (Maps, (4, 3, 8, 8))}


def named(model):
    """The layers in which something can be made to go wrong."""
    return [name for name, m in model.named_modules() if not isinstance(m, nn.ModuleList)]


class Spoil(torch.autograd.Function):
    """The identity, which puts a bad number into the gradient."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, ctx.value), None


def spoiled(x, value):
    return x + torch.full_like(x, value)


def in_place(x, value):
    x.data[(0,) * x.ndim] = value


def wrapped(module, before=None, after=None):
    """Change the code of one layer: what it is given, or gives, passes through a function."""
    forward = module.forward

    def changed(x, *rest):
        y = forward(x if before is None else before(x), *rest)
        return y if after is None else after(y)

    module.forward = changed


FORWARD = {
    "output hook": lambda m, v: m.register_forward_hook(lambda _m, _a, y: spoiled(y, v)),
    "in place": lambda m, v: m.register_forward_hook(lambda _m, _a, y: in_place(y, v)),
    "input hook": lambda m, v: m.register_forward_pre_hook(lambda _m, a: (spoiled(a[0], v),)),
    "code": lambda m, v: wrapped(m, after=lambda y: spoiled(y, v)),
    "code in front": lambda m, v: wrapped(m, before=lambda x: spoiled(x, v)),
}


def trained(model, x, optimizer=None, n=1):
    for _ in range(n):
        model.zero_grad()
        model(x).square().mean().backward()
        if optimizer:
            optimizer.step()


def alerted(model, trouble, value, name, x, n=1):
    """What is found, where trouble is put into a layer."""
    found = []
    trouble(model.get_submodule(name), value)
    attached = watch(model, "nonfinite", action=found.append, every=1)
    trained(model, x, torch.optim.SGD(model.parameters(), 0.01), n)
    attached.step()
    return found


def ways_into(layer, name):
    """What can go wrong in the forward of a layer, so that it is a trouble of this layer."""
    for how, trouble in FORWARD.items():
        same = isinstance(layer, nn.ReLU | nn.Identity | nn.Flatten)  # its output is its input
        if same and how in ("code in front", "input hook", "in place"):
            continue
        if how == "in place" and layer._modules:
            continue
        if how == "input hook" and not name:
            continue  # nothing is around the model
        yield how, trouble


def named_for(model, name, how):
    """The layer that is named: pre-hooks run in the block around their layer."""
    if how != "input hook":
        return name
    around = name.rpartition(".")[0]
    return "" if isinstance(model.get_submodule(around), nn.ModuleList) else around


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize(
    ("offset", "stride"), [(1, 16), pytest.param(0, 1, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_the_layer_that_made_it_is_named_wherever_that_is(which, offset, stride):
    make, size = MODELS[which]
    wrong = []
    for at, name in list(enumerate(named(make())))[offset::stride]:
        layer = make().get_submodule(name)
        for turn, (how, trouble) in enumerate(ways_into(layer, name)):
            torch.manual_seed(at)
            value, expected = BAD[(at + turn) % 3], [named_for(make(), name, how)]
            found = alerted(make(), trouble, value, name, torch.randn(size), n=2)
            if [each.layer for each in found] != expected:
                wrong.append((name, how, value, [each.layer for each in found], expected))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("behind", [0, 3])
def test_in_the_backward_the_first_layer_that_it_reaches_is_named(behind, value):
    """A layer whose input gets a bad gradient passes it on to the layer in front."""
    model, found = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))), []
    attached = watch(model, "nonfinite", action=found.append)
    model[behind + 1].register_forward_pre_hook(lambda _m, a: (Spoil.apply(a[0], value),))
    model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()
    attached.step()
    assert [each.layer for each in found] == [str(behind)]


def test_a_mask_of_minus_infinity_is_no_bad_input():
    class Masked(nn.Module):
        def forward(self, x, mask):
            return (x @ x.transpose(-2, -1) + mask).softmax(-1) / (x.sum() - x.sum())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Masked()

        def forward(self, x):
            return self.attention(x, mask=torch.full((3, 3), -math.inf).triu(1))

    found = []
    attached = watch(Model(), action=found.append)
    attached._base(torch.ones(2, 3, 4))
    attached.step()
    assert [each.layer for each in found] == ["attention"]


@pytest.mark.parametrize("value", BAD)
def test_what_comes_with_the_batch_or_the_loss_is_told_as_such(value):
    model, found = Tokens(), []
    attached = watch(model, action=found.append)
    x = torch.randn(4, 6, 5)
    (model(x).square().mean() * value).backward()
    attached.step()
    (from_loss,) = found
    assert from_loss.layer == "head"
    assert "loss" in from_loss.text
    model.zero_grad()
    model(x)
    attached.step()
    x[0, 0, 0] = value
    model(x)
    attached.step()
    assert "the batch" in found[-1].text
    assert len(found) == 2
