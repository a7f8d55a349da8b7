"""Hooks are found where they are now: other tools move them, or put modules around layers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from dropblock_hooks import (
    L2SP,
    AdaptiveClipGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    GradNoise,
    SiteError,
    WeightStats,
    attach,
)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )


def spec():
    return {
        "0": GradNoise(0.1),
        "2": Dropout(0.3),
        "3": [DropBlock2d(0.2, 3), Dropout(0.1, at="input")],
        "param:3.weight": ClipGradNorm(1e-3),
    }


class Wrapper(nn.Module):
    """As PEFT puts around a layer."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x)


def prepare_qat(model):
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(model, inplace=True)


def fuse(model):
    torch.ao.quantization.fuse_modules_qat(model, [["0", "1", "2"]], inplace=True)


def prune_weight(model):
    prune.l1_unstructured(model[3], "weight", 0.5)


def wrap(model):
    model[3] = Wrapper(model[3])


def swap(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.half().float()
        model.load_state_dict(model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def hooks_of_ours(model):
    tables = (
        table
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks)
    )
    owners = (getattr(hook, "__self__", hook) for table in tables for hook in table.values())
    return [owner for owner in owners if type(owner).__module__.startswith("dropblock_hooks")]


@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is deprecated
@pytest.mark.parametrize("move", [prepare_qat, fuse, prune_weight, wrap, swap])
def test_moved_hooks_act_are_reported_and_removed(move):
    model, x = net().train(), torch.randn(4, 3, 16, 16)
    attached = attach(model, spec())
    move(model)
    for calls in (1, 2):
        model.zero_grad()
        model(x).sum().backward()
        assert [site.calls for site in attached.sites] == [calls] * 5
    assert attached.verify() == []
    weight = next(p for name, p in model.named_parameters() if p.shape == (8, 8, 3, 3))
    assert weight.grad.norm() == pytest.approx(1e-3, rel=1e-3)
    attached.remove()
    assert not hooks_of_ours(model)
    model.zero_grad()
    model(x).sum().backward()
    assert weight.grad.norm() > 1e-2


def pruned():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


@pytest.mark.parametrize("regularizer", [L2SP(0.1), AdaptiveClipGrad(0.1), ClipGradNorm(1e-3)])
def test_a_parameter_with_another_name_is_regularized_and_reported(regularizer):
    """After prune.remove, the tensor of ``weight_orig`` is the parameter ``weight``."""
    model, x = pruned(), torch.randn(3, 4)
    attached = attach(model, {"param:0.weight_orig": regularizer})
    prune.remove(model[0], "weight")
    model(x).sum().backward()
    with_hook = model[0].weight.grad
    (finding,) = attached.verify()
    assert finding.kind == "lost"
    assert finding.text == "the layer no longer has the parameter 'weight_orig'"
    attached.remove()

    model.zero_grad()
    model(x).sum().backward()
    assert not torch.equal(with_hook, model[0].weight.grad)


@pytest.mark.parametrize("regularizer", [L2SP(0.1), AdaptiveClipGrad(0.1), ClipGradNorm(1.0)])
def test_a_parameter_that_left_its_module_is_an_error(regularizer):
    model, x = pruned(), torch.randn(3, 4)
    attach(model, {"param:0.weight_orig": regularizer})
    weight = model[0].weight_orig
    del model[0].weight_orig
    loss = nn.functional.linear(x, weight).sum()
    with pytest.raises(SiteError, match="no longer has the parameter 'weight_orig'. Call attach"):
        loss.backward()


def test_a_parameter_that_is_gone_after_an_epoch_is_told():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    attached = attach(model, {"param:weight": ClipGradNorm(1.0)})
    model(x).sum().backward()
    attached.step(1)
    weight = model.weight.detach()
    del model.weight
    model.weight = weight
    model(x).sum().backward()
    with pytest.warns(UserWarning, match="no longer has the parameter 'weight'. Call attach"):
        attached.step(2)


def test_statistics_of_a_parameter_that_is_gone_are_empty():
    model = pruned()
    attached = attach(model, {"param:0.weight_orig": WeightStats()})
    prune.remove(model[0], "weight")
    model(torch.randn(3, 4)).sum().backward()
    (finding,) = attached.verify()
    assert finding.kind == "lost"
    attached.step(1)
    (row,) = attached.report()
    assert row.observed is None


@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["dynamic", "static", "fused"])
def test_quantized_layers_are_those_of_the_bare_model(kind):
    """They are made in training mode, inside a model in evaluation mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    bare = copy.deepcopy(model)
    attach(model, {"1" if kind == "fused" else "0": Dropout(0.5)})
    x = torch.randn(8, 3)
    outputs = []
    for net in (bare, model):
        net.eval()
        if kind == "dynamic":
            quantized = torch.ao.quantization.quantize_dynamic(net, {nn.Linear})
        else:
            if kind == "fused":
                net = torch.ao.quantization.fuse_modules(net, [["0", "1"]])
            stubs = torch.ao.quantization.QuantWrapper(net).eval()
            stubs.qconfig = torch.ao.quantization.default_qconfig
            prepared = torch.ao.quantization.prepare(stubs)
            prepared(x)
            quantized = torch.ao.quantization.convert(prepared)
        outputs.append(quantized(x))
    assert torch.equal(*outputs)
