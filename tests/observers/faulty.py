"""Small models, and faults of training that are made in them.

Each row of `FAULTS` has a model, its fault, and the expected first alert of ``watch``: the rule,
the layer, and a part of its text or its cure.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 4
cross_entropy = nn.functional.cross_entropy


def named(**layers):
    return nn.Sequential(OrderedDict(layers))


class Code(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Residual(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        self.branch = named(**layers)

    def forward(self, x):
        return x + self.branch(x)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.weigh = lambda scores: scores.softmax(-1)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / x.shape[-1] ** 0.5
        return self.out(self.weigh(scores) @ self.v(x))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.rnn = kind(16, 16, batch_first=True, **options)
        self.head = nn.Linear(16, CLASSES)
        self.between = lambda y: y

    def forward(self, tokens):
        y, _ = self.rnn(self.embed(tokens))
        return self.head(self.between(y[:, -1]))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = named(fc1=nn.Linear(16, 16), act1=nn.ReLU())
        self.head, self.aux = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.body(x)
        return self.head(x), self.aux(x)


def mlp(act=nn.ReLU, width=16):
    return named(
        fc1=nn.Linear(16, width), act1=act(), fc2=nn.Linear(width, width), act2=act(),
        fc3=nn.Linear(width, width), act3=act(), head=nn.Linear(width, CLASSES),
    )  # fmt: skip


def deep(act, gain=None, depth=12):
    """A net without shortcuts; its weights are `gain` times those that keep lengths."""
    layers = {}
    for i in range(1, depth + 1):
        layers[f"fc{i}"], layers[f"act{i}"] = nn.Linear(16, 16), act()
        if gain is not None:
            nn.init.normal_(layers[f"fc{i}"].weight, std=gain / 4)
    return named(**layers, head=nn.Linear(16, CLASSES))


def cnn(width=8):
    def block():
        return Residual(
            conv1=nn.Conv2d(width, width, 3, padding=1), bn1=nn.BatchNorm2d(width), act=nn.ReLU(),
            conv2=nn.Conv2d(width, width, 3, padding=1), bn2=nn.BatchNorm2d(width),
        )  # fmt: skip

    return named(
        stem=nn.Conv2d(3, width, 3, padding=1, bias=False), block1=block(), block2=block(),
        pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(width, CLASSES),
    )  # fmt: skip


def vit(width=16):
    def block():
        return named(
            attention=Residual(norm=nn.LayerNorm(width), attn=Attention(width)),
            mlp=Residual(
                norm=nn.LayerNorm(width), fc1=nn.Linear(width, 2 * width), act=nn.GELU(),
                fc2=nn.Linear(2 * width, width),
            ),
        )  # fmt: skip

    return named(
        patch=nn.Conv2d(3, width, 4, 4), tokens=Code(lambda x: x.flatten(2).mT), block1=block(),
        block2=block(), norm=nn.LayerNorm(width), mean=Code(lambda x: x.mean(1)),
        head=nn.Linear(width, CLASSES),
    )  # fmt: skip


def residual_mlp(depth=12, scale=1.0):
    blocks = {
        f"block{i}": Residual(fc=nn.Linear(16, 16), scale=Code(lambda x: scale * x))
        for i in range(1, depth + 1)
    }
    return named(stem=nn.Linear(16, 16), **blocks, head=nn.Linear(16, CLASSES))


def batch_for(model, n=16):
    """Inputs and labels that depend on them."""
    if isinstance(model, Recurrent):
        x = torch.randint(20, (n, 12))
        return x, x[:, -1] % CLASSES
    first = next(m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))
    x = torch.randn(n, 3, 8, 8) if isinstance(first, nn.Conv2d) else torch.randn(n, 16)
    return x, x.flatten(1)[:, :CLASSES].argmax(1)


@dataclass(frozen=True)
class Fault:
    """A fault and the expected first alert.

    Attributes:
        name: the name of the fault.
        model: makes the healthy model.
        kind: the rule that must find it.
        layers: names of layers, separated by spaces; each is a right answer.
        says: the text or the cure must contain it.
        spoil: makes the fault in the model.
        loss: of the output and the labels.
        batch: makes the fault in the inputs of a step.
        lr: the learning rate of SGD.
    """

    name: str
    model: Callable[[], nn.Module]
    kind: str
    layers: str
    says: str = ""
    spoil: Callable[[Any], Any] = lambda model: None
    loss: Callable[[Any, Tensor], Tensor] = cross_entropy
    batch: Callable[[Tensor, int], Tensor] = lambda x, step: x
    lr: float = 0.05


def code(name, function):
    """Put a function in the place of a layer."""
    return lambda model: model.set_submodule(name, Code(function))


def insert(name, function):
    """Put a function behind a layer: in its own code, where no layer has it."""

    def spoil(model):
        owner, _, last = name.rpartition(".")
        parent = model.get_submodule(owner)
        layers = dict(parent.named_children())
        places = list(layers)
        places.insert(places.index(last) + 1, "inserted")
        layers["inserted"] = Code(function)
        parent._modules = OrderedDict((place, layers[place]) for place in places)

    return spoil


def inside(name, function):
    """Change the code of a block: its output passes through a function."""

    def spoil(model):
        block = model.get_submodule(name)
        forward = block.forward
        block.forward = lambda x: function(forward(x))

    return spoil


def fill(name, value):
    """Fill a parameter."""

    def spoil(model):
        nn.init.constant_(model.get_parameter(name), value)

    return spoil


def both(*spoils):
    return lambda model: [spoil(model) for spoil in spoils]


def without_gradient(model):
    model.block1.forward = torch.no_grad()(model.block1.forward)


def frozen_far_off(model):
    norm = model.block2.branch.bn1
    norm.running_mean.fill_(100.0)
    norm.eval().train = lambda mode=True: norm


def some_rows_masked(scores):
    mask = torch.zeros(scores.shape[-2:])
    mask[1] = -math.inf
    return (scores + mask).softmax(-1)


def gradient_times_zero(x):
    if x.requires_grad:
        x.register_hook(lambda grad: 0 * grad)
    return x.clone()


def blank_first(x, step):
    return x.index_fill(0, torch.tensor([0]), 0.0)


def equal_samples(x, step):
    return x[:1].expand_as(x)


def nan_in_batch_15(x, step):
    return x.index_fill(0, torch.tensor([3]), math.nan) if step == 15 else x


def written_out(y, target):
    """The cross entropy of logits that are far apart, without its log-softmax."""
    return -(1000 * y).softmax(1).log().gather(1, target[:, None]).mean()


def squares(y, target):
    return (y - 10 * nn.functional.one_hot(target, CLASSES)).square().mean()


ATTENTION = "block1.attention.branch.attn"
FAULTS = (
    # NaN and Inf that a layer makes
    Fault("logarithm of 0", mlp, "nonfinite", "act2", "logarithm",
          code("act2", lambda x: x.relu().log())),
    Fault("root of negative values in the code of a block", cnn, "nonfinite", "block2", "root",
          inside("block2", torch.sqrt)),
    Fault("a blank sample divided by its norm", lambda: named(unit=Code(nn.functional.relu), **dict(
          mlp().named_children())), "nonfinite", "unit", "division",
          code("unit", lambda x: x / x.norm(dim=1, keepdim=True)), batch=blank_first),
    Fault("overflow in half precision", cnn, "nonfinite", "block1.branch.act", "half precision",
          code("block1.branch.act", lambda x: (1e3 * x.half()).square().float())),
    Fault("softmax without its maximum", vit, "nonfinite", ATTENTION, "exponential", both(
          lambda model: setattr(model.get_submodule(ATTENTION), "weigh",
                                lambda s: s.exp() / s.exp().sum(-1, keepdim=True)),
          fill(f"{ATTENTION}.q.bias", 100.0), fill(f"{ATTENTION}.k.bias", 100.0))),
    Fault("attention mask of -inf alone in a row", vit, "nonfinite", ATTENTION, "mask",
          lambda model: setattr(model.get_submodule(ATTENTION), "weigh", some_rows_masked)),
    Fault("recurrent weights above 1", lambda: Recurrent(nn.RNN, nonlinearity="relu"),
          "nonfinite", "rnn", "overflow", fill("rnn.weight_hh_l0", 1e4)),
    Fault("NaN in a loaded weight", Recurrent, "nonfinite", "embed", "parameter 'weight'",
          lambda model: nn.init.constant_(model.embed.weight[3:5], math.nan)),
    # NaN and Inf from outside
    Fault("NaN in one batch", mlp, "nonfinite", "fc1", "batch", batch=nan_in_batch_15),
    Fault("learning rate that diverges", mlp, "nonfinite", "fc1 fc2 fc3 head", "learning rate",
          loss=squares, lr=10.0),
    Fault("loss of a written-out logarithm", mlp, "nonfinite", "head", "loss", loss=written_out),
    Fault("loss times a large number", cnn, "nonfinite", "head", "loss",
          loss=lambda y, target: cross_entropy(y, target) * 1e38 * 1e5),
    # NaN and Inf that a backward makes, where the forward is finite
    Fault("root of 0", mlp, "nonfinite", "fc2", "root",
          code("act2", lambda x: (x * (x > 0)).sqrt())),
    Fault("norm of a blank sample", cnn, "nonfinite", "stem", "norm",
          insert("stem", lambda x: x / (x.square().sum(1, keepdim=True).sqrt() + 1e-6)),
          batch=blank_first),
    Fault("root behind where", vit, "nonfinite", "block2.mlp.branch.fc1", "root",
          code("block2.mlp.branch.act", lambda x: torch.where(x > 0, x.sqrt(), 0))),
    # units that are dead or saturated
    Fault("bias far below 0", mlp, "dead", "act2", "bias", fill("fc2.bias", -100.0)),
    Fault("norm that kills the block in the middle", cnn, "dead", "block1.branch.act", "",
          fill("block1.branch.bn1.bias", -10.0)),
    Fault("weights of 0", mlp, "dead", "act2", "",
          both(fill("fc2.weight", 0.0), fill("fc2.bias", 0.0))),
    Fault("BatchNorm of equal samples", lambda: named(fc1=nn.Linear(16, 16),
          bn1=nn.BatchNorm1d(16), act1=nn.ReLU(), head=nn.Linear(16, CLASSES)), "equal_inputs",
          "fc1", "data set", batch=equal_samples),
    Fault("frozen BatchNorm with far running statistics", cnn, "dead", "block2.branch.act", "",
          frozen_far_off),
    Fault("units that a learning rate killed", mlp, "dead", "act1 act2 act3", "learning rate",
          loss=squares, lr=2.0),
    Fault("large weights in front of a sigmoid", lambda: mlp(nn.Sigmoid), "saturated", "act2",
          "weights", lambda model: model.fc2.weight.data.mul_(1000)),
    Fault("inputs of a wrong scale", lambda: mlp(nn.Tanh), "saturated", "act1", "",
          batch=lambda x, step: 1e3 * x),
    # batches whose samples are all equal
    Fault("one image in the whole batch", cnn, "equal_inputs", "stem", "", batch=equal_samples),
    Fault("one text in the whole batch", Recurrent, "equal_inputs", "embed", "",
          batch=equal_samples),
    Fault("images of zeros", vit, "equal_inputs", "patch", "zeros",
          batch=lambda x, step: torch.zeros_like(x)),
    # gradients along the depth
    Fault("small weights", lambda: deep(nn.Tanh, 0.05), "vanishing", "fc1", "larger weights"),
    Fault("twelve sigmoids", lambda: deep(nn.Sigmoid), "vanishing", "fc1", "normalization"),
    Fault("large weights", lambda: deep(nn.ReLU, 8.0), "exploding", "fc1", "smaller weights",
          lr=1e-15),
    Fault("residual branches that grow", lambda: residual_mlp(scale=10.0), "exploding",
          "stem", "weights", lr=1e-15),
    # layers without gradient
    Fault("detach between two blocks", vit, "no_gradient", "block1.mlp.branch.fc2", "detach",
          insert("block1", torch.detach)),
    Fault("output of a recurrent layer detached", Recurrent, "no_gradient", "rnn", "detach",
          lambda model: setattr(model, "between", torch.detach)),
    Fault("no_grad around a block", cnn, "no_gradient", "block1.branch.bn2", "no_grad",
          without_gradient),
    Fault("mask of zeros", vit, "no_gradient", f"{ATTENTION}.out", "mask",
          insert(ATTENTION, torch.zeros_like)),
    Fault("gradient times 0", mlp, "no_gradient", "fc2", "",
          insert("fc2", gradient_times_zero)),
    Fault("rounding", mlp, "no_gradient", "fc3", "", insert("fc3", torch.round)),
    Fault("softmax over an axis of one", lambda: named(**{**dict(mlp().named_children()),
          "head": nn.Linear(16, 1), "softmax": nn.Softmax(1)}), "no_gradient", "head", "",
          loss=lambda y, target: nn.functional.binary_cross_entropy(y[:, 0], (target > 1).float())),
    Fault("branch that nothing calls", mlp, "no_gradient", "extra", "never calls",
          lambda model: setattr(model, "extra", nn.Linear(16, 16)) or setattr(
              model, "forward", model[:-1].forward)),
    Fault("weight 0 of a loss", TwoHeads, "no_gradient", "aux", "without loss",
          loss=lambda y, target: cross_entropy(y[0], target) + 0 * cross_entropy(y[1], target)),
)  # fmt: skip
