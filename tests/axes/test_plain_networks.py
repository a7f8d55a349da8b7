"""Networks of convolutions are read, with and without an autograd graph, compiled or not."""

import copy

import pytest
import torch
from torch import nn

from dropblock_hooks import DropBlock2d, attach
from tests.axes.plain_networks import NETWORKS
from tests.cases import rest_slow

ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.SiLU),
    *(nn.Hardswish, nn.Hardsigmoid),
)
SIZES = {
    "alexnet": 96,
    "vgg11": 64,
    "squeezenet1_1": 64,
    "googlenet": 64,
    "mobilenet_v2": 64,
    "mobilenet_v3_small": 64,
    "DenseNet": 64,
}
OPTIONS = {
    "googlenet": {"weights": None, "aux_logits": False, "init_weights": False},
    "DenseNet": {"block_config": (3, 3, 3, 3)},  # more layers of a block are read alike
}


def maps_of(model, x):
    """The activations that give maps only; of a network without modules for them, its norms."""
    kinds = ACTIVATIONS
    if not any(isinstance(module, kinds) for module in model.modules()):
        kinds = nn.BatchNorm2d
    ranks, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, kinds):

            def note(module, args, output, name=name):
                shape = output.shape
                ranks.setdefault(name, set()).add(len(shape) == 4 and shape[-1] > 1)

            handles.append(module.register_forward_hook(note))
    model(x)
    for handle in handles:
        handle.remove()
    return [name for name, ranks in ranks.items() if ranks == {True}]


def check(model, x, mode):
    model.train()
    names = maps_of(copy.deepcopy(model), x)
    assert names
    attached = attach(model, dict.fromkeys(names, DropBlock2d(0.3, 3)))
    if mode == "eager":
        model(x)
    elif mode == "no_grad":
        with torch.no_grad():
            model(x)
    else:
        torch._dynamo.reset()
        torch.compile(model, backend="eager", fullgraph=True)(x)
    for site in attached.sites:
        assert site.active_calls
        assert site.map_size[0] == site.map_size[1]
        assert site.layout in ("NCHW", None)  # None before any eager forward


MODES = ["eager", "no_grad", "compiled"]


@pytest.mark.parametrize("mode", rest_slow(MODES, 2))
@pytest.mark.parametrize("name", rest_slow(NETWORKS, 5))
def test_networks_of_tutorials(name, mode):
    check(NETWORKS[name](), torch.randn(4, 3, 32, 32), mode)


@pytest.mark.every(2)
@pytest.mark.parametrize("mode", rest_slow(MODES, 2))
@pytest.mark.parametrize("name", rest_slow(SIZES, ["squeezenet1_1"]))
def test_networks_of_torchvision(name, mode):
    models = pytest.importorskip("torchvision", reason="the networks are torchvision's").models
    options = OPTIONS.get(name, {"weights": None})
    size = SIZES[name]
    check(getattr(models, name)(**options), torch.randn(4, 3, size, size), mode)
