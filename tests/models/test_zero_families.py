"""ZeroGrad at the modules of timm's models, one at a time: behind it, zero where the graph says so.

Each model runs forward once, with an Attachment for each module; they are enabled in turn while the
graph is kept. What is to be zero is read from the graph of another copy, where a plain function of
the test stands in the place of each regularizer: leaves that the loss reaches on no way around it.
Where the graph is too coarse (one of three biases that were joined, what cancels behind a norm),
the gradients of that copy decide, in whose plain function a zero is written.
"""

import copy
import warnings

import pytest
import torch
from torch import Tensor

from dropblock_hooks import ZeroGrad, attach
from tests.cases import rest_slow
from tests.families import MEMBERS

timm = pytest.importorskip("timm", reason="the models are timm's")

MODULES = 30
PLAIN = {"mambaout", "resnet", "vision_transformer"}
CASES = rest_slow(MEMBERS, [member for member in MEMBERS if member.family in PLAIN])


class Mark(torch.autograd.Function):
    """The identity, as a node of the graph; no gradient passes the one that is closed."""

    @staticmethod
    def forward(ctx, x, marks, name):
        ctx.marks, ctx.name = marks, name
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad) if ctx.marks.closed == ctx.name else grad, None, None


def is_handed_out(output):
    return isinstance(output, Tensor) and output.is_floating_point() and output.requires_grad


class Marks:
    """Forward hooks: a node behind every layer, all that one layer has made by its name."""

    def __init__(self, model):
        self.nodes, self.closed = {}, None
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(self.hook(name))

    def hook(self, name):
        def mark(module, args, output):
            if not is_handed_out(output):
                return None
            y = Mark.apply(output, self, name)
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


class Expected:
    """What the gradients of the leaves are where a layer hands out what gets none."""

    def __init__(self, model, x, modules):
        model, x = copy.deepcopy(model), x.clone().requires_grad_()
        self.marks = Marks(model)
        self.loss = total(model, x)
        self.names = list(self.marks.nodes)[:: max(1, -(-len(self.marks.nodes) // modules))]
        self.leaves = small_leaves(model, x)

    def cut_off(self, name):
        """The leaves that the loss reaches through this layer alone, if at all."""
        alive = reached(self.loss, self.marks.nodes[name])
        return {key for key, leaf in self.leaves.items() if leaf not in alive}

    def gradients(self, name):
        self.marks.closed = name
        return gradients(self.loss, self.leaves)


def gradients(loss, leaves):
    found = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def nothing(grad):
    return grad is None or not grad.any()


def close(grad, reference, plain):
    """Equal but for rounding, measured by the gradient that comes when nothing is closed."""
    largest = 0.0 if plain is None else plain.abs().max().item()
    grad, reference = (torch.zeros(()) if g is None else g for g in (grad, reference))
    return (grad - reference).abs().max().item() <= 1e-5 * largest


def differences(model, x, modules=MODULES, names=None):
    """Layers and leaves where the gradient is zero and should not be, or the other way round."""
    wanted = Expected(model, x, modules)
    names = names or wanted.names
    x = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nested sites: one of them is on
        attached = {name: attach(model, {name: ZeroGrad()}) for name in names}
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
        cut_off = wanted.cut_off(name)
        doubtful = [
            key
            for key, grad in found.items()
            if nothing(grad) != (key in cut_off or nothing(plain[key]))
        ]
        reference = wanted.gradients(name) if doubtful else {}
        wrong += [
            (name, key) for key in doubtful if not close(found[key], reference[key], plain[key])
        ]
    for each in attached.values():
        each.remove()
    return wrong, len(names)


@pytest.mark.every(11)
@pytest.mark.parametrize("member", CASES, ids=lambda member: member.family)
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
