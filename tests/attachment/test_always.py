"""`Attachment.always`: what is random acts in evaluation too."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    L2SP,
    AdaGC,
    AdaptiveClipGrad,
    CentralizeGrad,
    ClampGrad,
    Dropout,
    Foreign,
    Retune,
    SkipUpdate,
    StochasticDepth,
    ZClip,
    ZeroGrad,
    attach,
)
from tests.classes import make, own_regularizers
from tests.stacks import OF_SOME_LAYERS

OWN = [cls for name, cls in own_regularizers().items() if name not in OF_SOME_LAYERS]
ON_ACTIVATIONS = [cls for cls in OWN if cls.random and cls.acts_on == "activation"]
OF_PARAMETERS = (AdaptiveClipGrad, CentralizeGrad, L2SP, AdaGC, ZClip, SkipUpdate)
OTHERS = [cls for cls in OWN if cls.acts_on == "gradient" and cls not in OF_PARAMETERS]
SHAPES = {None: (8, 6, 7, 7), 1: (8, 6, 7), 2: (8, 6, 7, 7), 3: (8, 6, 5, 5, 5)}


def made(cls, **options):
    """One of a class, at a rate at which it shows."""
    return make(cls, 0.5, **options) if cls is not ZeroGrad else cls()


class Block(nn.Module):
    """One convolution's worth of a host, which any regularizer for activations fits."""

    def forward(self, x):
        return x * 2.0


def host(*regularizers):
    model = nn.Sequential(Block(), Block())
    attached = attach(model, {"0": list(regularizers)})
    return model.eval(), attached


def varies(model, x):
    outputs = [model(x) for _ in range(4)]
    return any(not torch.equal(outputs[0], other) for other in outputs[1:])


def images():
    return torch.rand(8, 6, 7, 7, generator=torch.Generator().manual_seed(0)) + 0.5


@pytest.mark.parametrize(
    ("cls", "at"),
    [
        (cls, at)
        for cls in ON_ACTIVATIONS
        for at in ("output", "input")
        if (cls, at) != (StochasticDepth, "input")  # it needs a block's output beside its input
        and cls is not Retune  # it needs a layer that drops, see below
    ],
)
def test_every_random_class_acts(cls, at):
    torch.manual_seed(0)
    model, attached = host(made(cls, at=at))
    x = torch.rand(SHAPES[cls.spatial]) + 0.5
    plain = model(x)
    with attached.always():
        assert varies(model, x)
    assert torch.equal(model(x), plain)
    assert attached.sites[0].active_calls == 0  # it is no training
    assert attached.sites[0].calls == 6


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.__name__)
def test_gradients_are_left_alone(cls):
    model, attached = host(cls(0.0, 0.5) if cls is ClampGrad else made(cls))
    gradients = []
    for block in (attached.always, attached.paused):
        x = images().requires_grad_()
        with block():
            y = model(x)
            y.square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert attached.sites[0].active_calls == 0


def test_nested_blocks_pauses_and_an_exception():
    model, attached = host(Dropout(0.5), Foreign(nn.Dropout2d, p=0.5))
    x = images()
    with attached.always():
        with attached.always():
            assert varies(model, x)
        with attached.paused():
            assert not varies(model, x)
        assert varies(model, x)
        with pytest.raises(KeyError), attached.always():
            raise KeyError
        assert varies(model, x)
    with attached.paused(), attached.always():
        assert not varies(model, x)
    assert not varies(model, x)
    assert attached.enabled


def test_a_copy_made_inside_is_not_on_for_good():
    model, attached = host(Dropout(0.5))
    with attached.always():
        other = copy.deepcopy(model)
        assert varies(model, images())
    assert not varies(other, images())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_what_its_forward_did(reentrant):
    model, attached = host(Dropout(0.5))
    x = images().requires_grad_()

    def gradient():
        x.grad = None
        y = checkpoint(model, x, use_reentrant=reentrant)
        y.square().sum().backward()  # 2 y dy: where the recomputation differs, so does this
        return y.detach(), x.grad

    for block in (nullcontext, attached.always, nullcontext):
        torch.manual_seed(0)
        with block():
            y, grad = gradient()
        torch.testing.assert_close(grad, 2 * y * (y / x.detach()))
        assert bool((y == 0).any()) == (block is not nullcontext)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_calls_within_always_are_not_counted_as_active(rate):
    model = nn.Sequential(nn.ReLU())
    attached = attach(model, {"0": Dropout(p=rate)})
    model.eval()
    with attached.always():
        model(torch.ones(2, 4))
    assert attached.sites[0].active_calls == 0
    assert [finding.kind for finding in attached.verify()] == ["never_active"]
