"""Layers that hand out a tensor in every way, and the gradients there by plain formulas.

`KINDS` are the layers, `FORMULAS` what regularizers do to a gradient, written with torch alone.
`by_hand` is a layer whose gradient is changed without this package: the reference of the tests of
gradient sites.
"""

from collections import namedtuple
from dataclasses import replace

import torch
from torch import nn
from torch.nn.functional import relu_

from dropblock_hooks import (
    ClampGrad,
    ClipGradNorm,
    Dropout,
    GaussianNoise,
    Regularizer,
    ScaleGrad,
    ZeroGrad,
)

BATCH, CHANNELS, LENGTH = 3, 4, 6


# Regularizers, and the same by hand ---------------------------------------------------------------


class Double(Regularizer):
    """Acts on the activation, so that what leaves it is not what the layer has given."""

    def apply(self, x, now):
        return x * 2, None


def clamped(low, high):
    def formula(g):
        g = g if low is None else torch.where(g < low, torch.full_like(g, low), g)
        return g if high is None else torch.where(g > high, torch.full_like(g, high), g)

    return formula


def clipped(limit, per_sample=False, power=2.0):
    def formula(g):
        axes = tuple(range(1 if per_sample else 0, g.ndim))
        powers = g.abs().pow(power)
        norm = (powers.sum(axes, keepdim=True) if axes else powers).pow(1 / power)
        return torch.where(norm > limit, g * (limit / norm), g)

    return formula


SINGLE = {
    "clamp": (ClampGrad(-0.1, 0.2), clamped(-0.1, 0.2)),
    "above": (ClampGrad(max=0.05), clamped(None, 0.05)),
    "clip": (ClipGradNorm(0.3), clipped(0.3)),
    "clip 1": (ClipGradNorm(0.5, norm_type=1), clipped(0.5, power=1.0)),
    "by sample": (ClipGradNorm(0.2, per="sample"), clipped(0.2, per_sample=True)),
    "scale": (ScaleGrad(-10.0), lambda g: -10.0 * g),
    "zero": (ZeroGrad(), torch.zeros_like),
}
ACTIVATION = {
    "double": (Double(), None),
    "dropout 0": (Dropout(0.0), None),
    "noise 0": (GaussianNoise(0.0), None),
}
WRITTEN = {**SINGLE, **ACTIVATION}

PAIRS = [(a, b) for a in SINGLE for b in SINGLE]
MIXED = [
    ("clamp", "double"),
    ("double", "clamp"),
    ("scale", "dropout 0", "clamp"),
    ("clip", "double", "scale", "noise 0", "clamp"),
]
SOME = [("scale", "clamp"), ("clamp", "scale"), ("clip", "double", "scale"), ("zero",)]


def spec_of(names, **options):
    """The regularizers of these names, in this order."""
    return [replace(WRITTEN[name][0], **options) for name in names]


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, formulas):
        ctx.formulas = formulas
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if g is not None:
            for formula in ctx.formulas:
                g = formula(g)
        return g, None


def by_hand(x, names):
    """What leaves the last regularizer of activations, its gradient changed in written order."""
    x = 2 * x if "double" in names else x
    formulas = [SINGLE[name][1] for name in names if name in SINGLE]
    return _Identity.apply(x, formulas) if x.requires_grad else x.clone()


# Layers -------------------------------------------------------------------------------------------


class Kind(nn.Module):
    """A layer of the zoo.

    Args:
        run: its forward: ``run(layer, h)``, h of (batch, channels, length).
        index: where in its output the tensor is.
        parts: its submodules, parameters and buffers, by name.
        takes: what it is called with, made of h: a tensor first, as a rule.
    """

    def __init__(self, run, index=None, takes=None, at_input=True, **parts):
        super().__init__()
        self.run, self.index, self.takes, self.at_input = run, index, takes, at_input
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, h, **others):
        return self.run(self, h, **others)


class Owner(nn.Module):
    """Runs a layer, works in place on what it hands out, and uses all else that it sees."""

    def __init__(self, kind, after="in place", reference=None):
        super().__init__()
        self.stem = nn.Linear(LENGTH, LENGTH).double()
        self.layer = kind
        self.after = after
        self.reference = reference  # (names, at): by hand
        self.copies = False  # what is not handed out as a copy may not be worked on in place

    def forward(self, x):
        h = self.stem(x).tanh()
        given = h if self.layer.takes is None else self.layer.takes(h)
        names, at = self.reference or ((), None)
        out = self.layer(by_hand(given, names) if at == "input" else given)
        y = element(out, self.layer.index)
        if at == "output":
            y = by_hand(y, names)
            out = with_element(out, self.layer.index, y)
        others = [t for t in tensors(out) if t is not y]
        used = [AFTER[self.after](y.clone() if self.copies else y), *others, h, *tensors(given)]
        used += [t for t in vars(self.layer).values() if isinstance(t, torch.Tensor)]
        return sum(weighted(t, i) for i, t in enumerate(used) if t is not None)


def weighted(t, i):
    """A number that depends on all elements, with different and varying derivatives."""
    weight = torch.linspace(-1.0, 2.0 + i, t.numel(), dtype=t.dtype).view(t.shape)
    return (weight * t).sum() + 0.1 * (t * t).sum()


class Nothing(torch.autograd.Function):
    """Has no gradient for what it takes."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return None


AFTER = {
    "in place": lambda y: y.mul_(3.0) if y.grad_fn is not None else y * 3.0,
    "relu": lambda y: relu_(y) if y.grad_fn is not None else y,
    "twice": lambda y: y.sin() + y * 2,
    "nothing": Nothing.apply,
    "unused": lambda y: None,
    "part": lambda y: y.flatten()[1:],
}


def element(out, index):
    if index is None:
        return out
    return out[index]


def with_element(out, index, y):
    """The same structure, with another element, in the plainest way."""
    if index is None:
        return y
    if isinstance(out, tuple):
        items = [y if i == index % len(out) else item for i, item in enumerate(out)]
        return type(out)(*items) if hasattr(out, "_fields") else type(out)(items)
    if isinstance(out, list):
        return [y if i == index % len(out) else item for i, item in enumerate(out)]
    if isinstance(out, dict):
        return type(out)((k, y if k == index else item) for k, item in out.items())
    raise TypeError(type(out))


def tensors(value):
    """The floating-point tensors of a structure."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    return []


Point = namedtuple("Point", ["x", "y"])


def _multihead(layer, h):
    return layer.inner(h, h, h, need_weights=True)


def _attention(layer, h):
    q, k, v = layer.inner(h).chunk(3, 2)
    q, k, v = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def _remembers(layer, h):
    layer.__dict__["cache"] = h.cos()
    return layer.cache


def _remembers_a_view(layer, h):
    layer.__dict__["cache"] = h * 2
    return layer.cache[:, 1:]


def _works_in_place(layer, h):
    y = layer.inner(h)
    y.mul_(2.0)
    return relu_(y)


def _changes_its_input(layer, h):
    return h.add_(1.0)


def _both(layer, h):
    y = layer.inner(h)
    return y, y * 2, layer.inner(y)


def _same_twice(layer, h):
    y = h * 2
    return y, y


def _all_views(layer, h):
    y = h * 2
    return y, y.flatten(), y[0]


def linear():
    return nn.Linear(LENGTH, LENGTH)


def tensor(*size):
    return torch.linspace(0.2, 1.1, torch.Size(size).numel(), dtype=torch.float64).view(size)


def of_pair(h):
    return [h, h * 2]


KINDS = {
    "linear": lambda: Kind(lambda s, h: s.inner(h), inner=linear()),
    "InstanceNorm1d": lambda: Kind(lambda s, h: s.inner(h), inner=nn.InstanceNorm1d(CHANNELS)),
    "MultiheadAttention": lambda: Kind(
        _multihead, 0, inner=nn.MultiheadAttention(LENGTH, 2, batch_first=True)
    ),
    "attention": lambda: Kind(_attention, inner=nn.Linear(LENGTH, 3 * LENGTH)),
    "LSTM": lambda: Kind(lambda s, h: s.inner(h), 0, inner=nn.LSTM(LENGTH, 5, batch_first=True)),
    "MaxPool1d": lambda: Kind(lambda s, h: s.inner(h), inner=nn.MaxPool1d(2)),
    "AdaptiveMaxPool1d": lambda: Kind(
        lambda s, h: s.inner(h), inner=nn.AdaptiveMaxPool1d(3, return_indices=True), index=0
    ),
    "Flatten": lambda: Kind(lambda s, h: s.inner(h), inner=nn.Flatten()),
    "permute": lambda: Kind(lambda s, h: s.inner(h).permute(2, 0, 1), inner=linear()),
    "slice": lambda: Kind(lambda s, h: s.inner(h)[:, 1:3], inner=linear()),
    "slice of its input": lambda: Kind(lambda s, h: h[:, :, ::2]),
    "expand": lambda: Kind(lambda s, h: h.mean(2, keepdim=True).expand(-1, -1, LENGTH)),
    "chunk": lambda: Kind(lambda s, h: s.inner(h).chunk(2, 1), 1, inner=linear()),
    "unbind": lambda: Kind(lambda s, h: list(h.unbind(0)), -1),
    "used in the layer too": lambda: Kind(_both, 0, inner=linear()),
    "in place in the layer": lambda: Kind(_works_in_place, inner=linear()),
    "ReLU in place": lambda: Kind(
        lambda s, h: s.inner(h), inner=nn.ReLU(inplace=True), takes=torch.sin
    ),
    "changes its input": lambda: Kind(_changes_its_input, takes=torch.sin),
    "attribute": lambda: Kind(_remembers),
    "view of an attribute": lambda: Kind(_remembers_a_view),
    "same twice": lambda: Kind(_same_twice, -1),
    "views of one": lambda: Kind(_all_views, 0),
    "list": lambda: Kind(lambda s, h: [h * 2, h.cos()], 1),
    "dict": lambda: Kind(lambda s, h: {"a": h * 2, "b": h[0]}, "b"),
    "namedtuple": lambda: Kind(lambda s, h: Point(h, h.exp()), 0),
    "nested": lambda: Kind(lambda s, h: ((h, h * 2), h[1:], {"c": h}), 1),
    "its input": lambda: Kind(lambda s, h: h),
    "of its list": lambda: Kind(lambda s, h: h[1], takes=of_pair, at_input=False),
    "of its dict": lambda: Kind(lambda s, h: h["k"], takes=lambda h: {"k": h}, at_input=False),
    "its list": lambda: Kind(lambda s, h: h, 0, takes=of_pair, at_input=False),
    "parameter": lambda: Kind(lambda s, h: s.w, w=nn.Parameter(tensor(3, 5))),
    "residual": lambda: Kind(lambda s, h: h + s.inner(h), inner=linear()),
    "no gradient inside": lambda: Kind(lambda s, h: Nothing.apply(h) + s.inner(h), inner=linear()),
    "detached": lambda: Kind(lambda s, h: (h.detach(), h * 2), 0),
    "one number": lambda: Kind(lambda s, h: h.square().mean()),
}
