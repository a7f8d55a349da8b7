"""Copies, saved models, removal at odd moments, memory."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout2d,
    GaussianNoise,
    LinearSchedule,
    ScaleGrad,
    ZeroGrad,
    attach,
    attachments,
)

SPEC = {
    "layer1.*": DropBlock2d(p=LinearSchedule(0.0, 0.4, epochs=5), block_size=3),
    "layer2.*": [Dropout2d(p=0.2), ClipGradNorm(1e-3)],
    "param:fc.bias": ClampGrad(-1e-4, 1e-4),
}


def images():
    return torch.randn(4, 3, 16, 16)


def test_load_state_dict_with_assign_keeps_parameter_hooks(net):
    attach(net, {"param:fc.bias": ClampGrad(-1e-4, 1e-4)})
    old = net.fc.bias
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    for p in net.parameters():
        p.requires_grad_(True)
    assert net.fc.bias is not old
    net(images()).square().sum().backward()
    assert net.fc.bias.grad.abs().max() <= 1e-4


@pytest.mark.parametrize("regularizer", [Dropout2d(0.5), ZeroGrad(), ClampGrad(-1e-6, 1e-6)])
def test_remove_between_forward_and_backward(net, hook_count, regularizer):
    reference = copy.deepcopy(net)
    attached = attach(net, {"layer1.*": regularizer})
    x = images()
    loss = net(x).square().sum()
    attached.remove()
    loss.backward()
    assert hook_count(net) == 0
    assert torch.isfinite(net.stem.weight.grad).all()
    if regularizer.acts_on == "gradient":
        reference(x).square().sum().backward()
        assert torch.equal(net.stem.weight.grad, reference.stem.weight.grad)


def test_paused_between_forward_and_backward(net):
    attached = attach(net, {"layer1.*": ZeroGrad()})
    loss = net(images()).square().sum()
    with attached.paused():
        loss.backward()
    assert net.stem.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_attachments_removed_in_either_order(net, hook_count, order):
    both = attach(net, {"layer1.*": Dropout2d(0.5)}), attach(net, {"layer1.*": GaussianNoise(0.1)})
    both[order[0]].remove()
    (left,) = attachments(net)
    assert left == both[order[1]]
    net(images()).sum().backward()
    left.remove()
    assert hook_count(net) == 0


def test_an_exception_inside_the_context(net, hook_count):
    with pytest.raises(ZeroDivisionError), attach(net, SPEC):
        raise ZeroDivisionError
    assert hook_count(net) == 0


def test_hooks_of_others_stay(net, hook_count):
    class Watch:
        def note(self, module, args, output):
            seen.append(2)

    seen = []
    net.layer1.register_forward_hook(lambda module, args, output: seen.append(1))
    net.layer1.register_forward_hook(Watch().note)
    attach(net, {"layer1": [Dropout2d(0.5), ClampGrad(-1)]}).remove()
    net(images())
    assert seen == [1, 2]
    assert hook_count(net) == 2


def test_the_model_is_freed():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    attached = attach(net, {"1": [Dropout2d(0.1), ClipGradNorm(1)], "param:0.bias": ClampGrad(-1)})
    net(images()).sum().backward()
    hooks = [*net[1]._forward_hooks.values(), *net[0]._forward_pre_hooks.values()]
    died = weakref.ref(net)
    del net, attached
    gc.collect()
    assert died() is None, "a hook holds the model"
    assert hooks


def test_no_tensor_of_a_graph_is_kept(net):
    attached = attach(net, {"layer1.*": [DropBlock2d(0.3), ClipGradNorm(0.1), ScaleGrad(0.5)]})
    kept = []
    net.layer1.register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        net(images()).sum().backward()
        assert kept[0]() is None, "freed without the garbage collector"
    finally:
        gc.enable()
    assert len(attached) == 6


@pytest.mark.slow
def test_two_thousand_steps_in_constant_memory():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True))
    spec = {
        "0": [DropBlock2d(LinearSchedule(0.0, 0.5, epochs=20), 3), ClipGradNorm(0.1)],
        "1": [GaussianNoise(0.1, at="input"), ScaleGrad(0.5, at="input")],
        "param:0.bias": ClampGrad(-1, 1),
    }
    attached = attach(model, spec)
    x = torch.randn(2, 1, 6, 6)
    counts = []
    for i in range(2000):
        attached.step(i / 100)
        model(x).sum().backward()
        if i in (200, 1999):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] < 900  # half an object a step; other tests leave some to die
    hooks = model[0].bias._backward_hooks
    assert len(hooks) == 1
    assert attached["0/DropBlock2d"].calls == 2000
