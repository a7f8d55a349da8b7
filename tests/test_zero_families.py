"""ZeroGrad at the modules of timm's models, one at a time: behind it, zero where the graph says so.

Each model runs forward once, with an Attachment for each module; they are enabled in turn while the
graph is kept. What is to be zero is read from the graph of another copy, where a plain function of
the test stands in the place of each regularizer: leaves that the loss reaches on no way around it.
"""

import copy
import warnings

import pytest
import torch
from torch import Tensor

from dropblock_hooks import ZeroGrad, attach
from experiments.families import MEMBERS

timm = pytest.importorskip("timm", reason="the models are timm's")

MODULES = 30
PLAIN = {"efficientnet", "ghostnet", "mambaout", "resnet", "vision_transformer"}
CASES = [
    pytest.param(member, id=member.family, marks=() if member.family in PLAIN else pytest.mark.slow)
    for member in MEMBERS
]


class Mark(torch.autograd.Function):
    """The identity, as a node of the graph."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def is_handed_out(output):
    return isinstance(output, Tensor) and output.is_floating_point() and output.requires_grad


class Marks:
    """Forward hooks: a node behind every layer, all that one layer has made by its name."""

    def __init__(self, model):
        self.nodes = {}
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(self.hook(name))

    def hook(self, name):
        def mark(module, args, output):
            if not is_handed_out(output):
                return None
            y = Mark.apply(output)
            self.nodes.setdefault(name, set()).add(y.grad_fn)
            return y

        return mark


def total(model, x):
    """The sum of what the model returns, with weights; the same masks at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        outputs = of(model(x))
    return sum((t * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in outputs)


def of(out):
    if isinstance(out, Tensor):
        return [out]
    return [t for item in (out.values() if isinstance(out, dict) else out) for t in of(item)]


def reached(loss, closed):
    """The leaves that a loss reaches on a way around some nodes."""
    found, seen, waiting = set(), set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in closed:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        waiting += [below for below, _ in node.next_functions]
    return found


def prepared(model):
    """In training, no factor zero at the start: then a gradient that can come does come."""
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.5)
    return model.train()


def small_leaves(model, x):
    """The input and parameters of one axis: what they cost is little."""
    return {"input": x, **{name: p for name, p in model.named_parameters() if p.ndim == 1}}


def expected(model, x, modules):
    """By name of a layer, which leaves get no gradient if what it hands out gets none."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    marks = Marks(model)
    loss = total(model, x)
    spread = list(marks.nodes)[:: max(1, -(-len(marks.nodes) // modules))]
    leaves = small_leaves(model, x)
    zero = {}
    for name in spread:
        alive = reached(loss, marks.nodes[name])
        zero[name] = {key for key, leaf in leaves.items() if leaf not in alive}
    return zero


def gradients(loss, leaves):
    found = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def nothing(grad):
    return grad is None or not grad.any()


def differences(model, x, modules=MODULES, names=None):
    """Layers and leaves where the gradient is zero and should not be, or the other way round."""
    wanted = expected(model, x, modules)
    if names is not None:
        wanted = {name: wanted[name] for name in names}
    x = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nested sites: one of them is on
        attached = {name: attach(model, {name: ZeroGrad()}) for name in wanted}
    leaves = small_leaves(model, x)
    loss = total(model, x)
    for each in attached.values():
        each.enabled = False
    plain = gradients(loss, leaves)
    wrong = []
    for name, each in attached.items():
        each.enabled = True
        found = gradients(loss, leaves)
        each.enabled = False
        for key, grad in found.items():
            if nothing(grad) != (key in wanted[name] or nothing(plain[key])):
                wrong.append((name, key))
    for each in attached.values():
        each.remove()
    return wrong, len(wanted)


@pytest.mark.parametrize("member", CASES)
def test_a_family(member):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = prepared(member.build()), torch.randn(2, 3, member.size, member.size)
    wrong, n = differences(model, x)
    assert not wrong
    assert n >= 8


def test_all_modules_of_ghostnet_that_hand_out_a_slice():
    """In-place operations follow them: the next ghost module, a sum, an activation."""
    model = prepared(timm.create_model("ghostnet_100", num_classes=5))
    names = [name for name, _ in model.named_modules() if name.endswith("ghost2")]
    assert len(names) == 16
    wrong, n = differences(model, torch.randn(2, 3, 32, 32), modules=10_000, names=names)
    assert (wrong, n) == ([], 16)
