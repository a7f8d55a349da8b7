"""`capture`: one call, the values and gradients of layers, and nothing left behind."""

import copy

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    Capture,
    ClampGrad,
    Dropout,
    Select,
    SpecError,
    attach,
    attachments,
    capture,
)
from tests.plain_hooks import PlainHooks, same, tensors_of


class Net(nn.Module):
    """A convolution whose output is worked on in place, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.act(self.norm(self.conv(x)))
        x = self.act(self.drop(x) - 0.1)
        return self.head(x.mean((2, 3)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 3, 6, 6)


def state(model):
    """All that a call could leave behind."""
    return {
        "hooks": [
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
            for m in model.modules()
        ],
        "modes": [m.training for m in model.modules()],
        "grads": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "wanted": [p.requires_grad for p in model.parameters()],
        "buffers": [b.tolist() for b in model.buffers()],
        "random": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_values_and_gradients_as_plain_hooks_see_them(net, x, training, frozen):
    names = ["conv", "norm", "act", "head"]
    twin = copy.deepcopy(net).train(training)
    net.train(training).requires_grad_(not frozen)
    plain = PlainHooks(twin, names)
    torch.manual_seed(3)
    twin(x).sum().backward()
    torch.manual_seed(3)
    values, grads = capture(net, x, names, gradients=True)
    assert list(values) == list(grads) == names
    assert isinstance(values["act"], list)
    for name in names:
        calls = [values[name], grads[name]] if name == "act" else [[values[name]], [grads[name]]]
        same(calls[0], [value for (value,) in plain.values[name]])
        same(calls[1], [grad for (grad,) in plain.grads[name]])
    assert not any(v.requires_grad for v in tensors_of([values, grads]))


def test_nothing_is_left_behind_also_after_an_error(net, x):
    net.eval()
    net.norm.train()
    net.norm.momentum = 0.0
    net.norm.num_batches_tracked = None
    net.conv.requires_grad_(False)
    net(x).sum().backward()
    before = state(net)
    capture(net, x, ["conv", "act"], gradients=True)
    assert state(net) == before
    with pytest.raises(RuntimeError):
        capture(net, torch.ones(1, 7, 6, 6), "conv", gradients=True)
    assert state(net) == before
    with pytest.raises(ZeroDivisionError):
        capture(net, x, "conv", gradients=True, target=lambda y: 1 / 0)
    assert state(net) == before
    assert attachments(net) == []


def test_beside_what_is_attached(net, x):
    attached = attach(
        net,
        {"conv": [Dropout(0.5), ClampGrad(-1e-3, 1e-3), Capture(gradients=True)]},
    )
    values, grads = capture(net, x, "conv", gradients=True)
    before, as_it_came = capture(net, x, "conv", gradients=True, when="before")
    assert 0.3 < values["conv"].eq(0).float().mean() < 0.7
    assert not before["conv"].eq(0).any()
    assert grads["conv"].abs().max() <= 1e-3 < as_it_came["conv"].abs().max()
    assert attachments(net) == [attached]
    assert attached.captured()["conv"][0].value.shape == values["conv"].shape


def same_shape(values, shapes):
    assert {name: tuple(value.shape) for name, value in values.items()} == shapes


def test_selectors_and_options(net, x):
    net.eval()
    same_shape(capture(net, x, "type:Conv2d"), {"conv": (2, 8, 4, 4)})
    same_shape(capture(net, x, "."), {".": (2, 4)})
    same_shape(capture(net, x, Select(types="Linear", exclude="unused")), {"head": (2, 4)})
    same_shape(capture(net, x, "head", at="input", index=0), {"head": (2, 8)})
    same_shape(capture(net, (x,), ["conv"], reduce="channels"), {"conv": (2, 8)})
    same_shape(capture(net, {"x": x}, ["conv"], reduce=torch.mean), {"conv": ()})
    assert capture(net, x, "conv", dtype="float64")["conv"].dtype is torch.float64


def test_the_loss_of_the_output(net, x):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return {"scores": self.net(x), "other": 3}

    model = Wrapped().eval()
    with pytest.raises(TypeError, match="no tensor but dict with .*'scores'.*as in target="):
        capture(model, x, "net.head", gradients=True)
    values, grads = capture(
        model, x, ["net.head", "."], gradients=True, target=lambda y: y["scores"][:, 1].sum()
    )
    assert grads["net.head"].tolist() == [[0, 1, 0, 0]] * 2
    assert grads["."]["other"] is None
    assert values["."]["other"] is None
    with pytest.raises(TypeError, match="no tensor but int"):
        capture(model, x, "net.head", gradients=True, target=lambda y: 1)
    with pytest.raises(ValueError, match="target needs gradients=True"):
        capture(model, x, "net.head", target=lambda y: y)


def test_no_gradient_tells_why(net, x):
    with torch.no_grad(), pytest.raises(RuntimeError, match="no gradient came .*no_grad"):
        capture(net, x, "conv", gradients=True)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        capture(net, x, "conv", gradients=True)
    with pytest.raises(RuntimeError, match="no gradient came to conv.*does the loss depend"):
        capture(net, x, "conv", gradients=True, target=lambda y: net.head.weight.sum())


@pytest.mark.parametrize("layers", [[], None, nn.ReLU], ids=repr)
def test_layers_that_are_no_selector(net, x, layers):
    with pytest.raises(ValueError, match="needs names|write 'type:ReLU'|a selector is text"):
        capture(net, x, layers)


def test_layers_that_are_never_called_or_not_there(net, x):
    with pytest.raises(RuntimeError, match=r"never called in this forward: unused\..*exclude"):
        capture(net, x, ["conv", "unused"])
    with pytest.raises(SpecError, match="'cov' matches nothing.*conv"):
        capture(net, x, "cov")
    with pytest.raises(SpecError, match="takes only regularizers of gradients"):
        capture(net, x, "param:conv.weight")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        capture(None, x, "conv")
    assert sum(state(net)["hooks"]) == 0


def test_a_compiled_model_runs_as_it_was_written(net, x):
    torch._dynamo.reset()
    net.eval()
    expected = capture(net, x, ["conv", "act"], gradients=True)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(net, backend=backend, fullgraph=True)
    compiled(x)
    for model in (compiled, net):
        values, grads = capture(model, x, ["conv", "act"], gradients=True)
        same(tensors_of([values, grads]), tensors_of(list(expected)))
    compiled(x)
    assert len(graphs) == 1
