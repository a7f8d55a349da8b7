"""Watchdog: the layer that made NaN or Inf is named, forward and backward."""

import math

import pytest
import torch
from torch import nn

from dropblock_hooks import watch
from tests.observers.faulty import Code, cnn, vit

BAD = [math.nan, math.inf, -math.inf]
MODELS = {"tokens": vit, "maps": cnn}


def images():
    return torch.randn(4, 3, 8, 8)


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
    "in place": lambda m, v: m.register_forward_hook(lambda _m, _a, y: in_place(y, v)),
    "input hook": lambda m, v: m.register_forward_pre_hook(lambda _m, a: (spoiled(a[0], v),)),
    "code": lambda m, v: wrapped(m, after=lambda y: spoiled(y, v)),
    "code in front": lambda m, v: wrapped(m, before=lambda x: spoiled(x, v)),
}


def alerted(model, trouble, value, name):
    """What is found, where trouble is put into a layer."""
    found = []
    trouble(model.get_submodule(name), value)
    attached = watch(model, "nonfinite", action=found.append, every=1)
    optimizer, x = torch.optim.SGD(model.parameters(), 0.01), images()
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    attached.step()
    return found


def ways_into(layer, name):
    """What can go wrong in the forward of a layer, so that it is a trouble of this layer."""
    for how, trouble in FORWARD.items():
        same = isinstance(layer, nn.ReLU | nn.Flatten | Code)  # its output is its input
        if same and how in ("code in front", "input hook", "in place"):
            continue
        if how == "in place" and layer._modules:
            continue
        if how == "input hook" and not name:
            continue  # nothing is around the model
        yield how, trouble


def named_for(name, how):
    """The layer that is named: pre-hooks run in the block around their layer."""
    return name.rpartition(".")[0] if how == "input hook" else name


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize(
    ("offset", "stride"), [(1, 16), pytest.param(0, 1, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_the_layer_that_made_it_is_named_wherever_that_is(which, offset, stride):
    make, wrong = MODELS[which], []
    for at, (name, _) in list(enumerate(make().named_modules()))[offset::stride]:
        layer = make().get_submodule(name)
        for turn, (how, trouble) in enumerate(ways_into(layer, name)):
            torch.manual_seed(at)
            value, expected = BAD[(at + turn) % 3], [named_for(name, how)]
            found = alerted(make(), trouble, value, name)
            if value == -math.inf and not found:
                continue  # a later layer, such as a ReLU, has made it finite again
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


@pytest.mark.parametrize("masked", [-math.inf, 1e300], ids=["-inf", "1e300"])
def test_a_mask_is_no_bad_input(masked):
    class Masked(nn.Module):
        def forward(self, x, mask):
            return (x @ x.transpose(-2, -1) + mask).softmax(-1) / (x.sum() - x.sum())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Masked()

        def forward(self, x):
            return self.attention(x, mask=torch.full((3, 3), masked, dtype=x.dtype).triu(1))

    found = []
    attached = watch(Model(), action=found.append)
    attached._base(torch.ones(2, 3, 4, dtype=torch.float64))
    attached.step()
    assert [each.layer for each in found] == ["attention"]


@pytest.mark.parametrize("value", BAD)
def test_what_comes_with_the_batch_or_the_loss_is_told_as_such(value):
    model, found = vit(), []
    attached = watch(model, action=found.append)
    x = images()
    (model(x).square().mean() * value).backward()
    attached.step()
    (from_loss,) = found
    assert from_loss.layer == "head"
    assert "loss" in from_loss.text
    model.zero_grad()
    model(x)
    attached.step()
    x[0, 0, 0, 0] = value
    model(x)
    attached.step()
    assert "the batch" in found[-1].text
    assert len(found) == 2
