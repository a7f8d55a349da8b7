"""What is said of layers that were replaced, scripted, copied or compiled: true, or nothing."""

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ClampGrad,
    ClipGradNorm,
    Dropout2d,
    HookWarning,
    SpecError,
    attach,
)
from tests.told import ids, told


class Block(nn.Module):
    """Reads the weight of its norm outside of its forward, as torchvision's and timm's do."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.reset()

    def reset(self):
        nn.init.zeros_(self.norm.weight)

    def forward(self, x):
        return x + self.norm(self.conv(x))


def frozen(model):
    ops = pytest.importorskip("torchvision.ops", reason="the layer is torchvision's")

    def convert(module):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                new = ops.FrozenBatchNorm2d(child.num_features)
                new.load_state_dict(child.state_dict())
                setattr(module, name, new)
            convert(child)

    convert(model)
    return model


@pytest.mark.parametrize("convert", [nn.SyncBatchNorm.convert_sync_batchnorm, frozen])
@pytest.mark.parametrize("selector", ["0.norm", "type:BatchNorm2d"])
def test_a_converted_norm_was_replaced(convert, selector):
    model = nn.Sequential(Block(), nn.ReLU())
    attached = attach(model, {selector: Dropout2d(0.1)})
    convert(model).eval()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.eval()  # which trains on a GPU only
    with pytest.warns(HookWarning) as caught:
        model(torch.randn(2, 4, 5, 5)).sum().backward()
    assert told(caught) == ids(attached.verify()) == [("0.norm/Dropout2d", "replaced")]


def test_a_hook_that_was_lost_is_all_that_is_said(net):
    attached = attach(net, {"layer1.0": Dropout2d(0.1), "layer1.1": Dropout2d(0.1)})
    net.layer1[0]._forward_hooks.clear()
    with pytest.warns(HookWarning) as caught:
        net(torch.ones(2, 3, 16, 16))
    assert told(caught) == ids(attached.verify()) == [("layer1.0/Dropout2d", "replaced")]


@pytest.mark.parametrize("trains", [False, True])
def test_parameters_of_a_head_that_was_reset(trains):
    """What works is no fault; what does not is told."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    attached = attach(model, {"param:1.*": ClampGrad(-1e-4, 1e-4), "param:0.*": ClipGradNorm(1.0)})
    if trains:
        model(torch.randn(2, 4)).sum().backward()
    model[1] = nn.Linear(4, 5)
    model(torch.randn(2, 4)).sum().backward()
    works = bool(model[1].weight.grad.abs().max() <= 1e-4)
    faults = attached.verify()
    assert works == (faults == [])
    assert works != trains
    assert {site for site, _ in ids(faults)} <= {"1.weight/ClampGrad", "1.bias/ClampGrad"}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_is_said_of_a_script_module_works():
    source = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    x = torch.randn(2, 3, 6, 6)
    scripted = torch.jit.script(source)
    with pytest.raises(SpecError, match=r"made from, and script that after remove\(\); or.*around"):
        attach(scripted, {"0": Dropout2d(0.5)})
    attached = attach(source, {"0": Dropout2d(0.5)})
    source(x).sum().backward()
    attached.remove()
    assert torch.equal(torch.jit.script(source)(x), source(x))

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(scripted)

        def forward(self, x):
            return self.inner(x)

    model = Around()
    around = attach(model, {"inner": Dropout2d(1.0)})
    assert (model(x) == 0).all()
    assert around.sites[0].active_calls == 1


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_calls_of_a_parameter_are_those_of_its_owner(backend):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    attached = attach(model, {"param:1.weight": ClampGrad(-1e-4, 1e-4)})
    call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(6):
        call(torch.randn(2, 4)).sum().backward()
    torch._dynamo.reset()
    site = attached.sites[0]
    assert (site.calls, site.active_calls) == (6, 6)
    assert attached.verify() == []
