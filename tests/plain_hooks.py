"""What a plain forward hook sees, which clones, and a tensor hook that is set inside it."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


def tensors_of(value):
    """The floating-point tensors of a nested value."""
    return [x for x in tree_flatten(value)[0] if isinstance(x, Tensor) and x.is_floating_point()]


class PlainHooks:
    """Values and gradients by layer: one list of tensors for each call."""

    def __init__(self, model, names):
        self.values = {name: [] for name in names}
        self.grads = {name: [] for name in names}
        modules = dict(model.named_modules(remove_duplicate=False))
        self.handles = [
            modules[name].register_forward_hook(lambda m, given, y, name=name: self.see(name, y))
            for name in names
        ]

    def see(self, name, output):
        if torch._C._current_graph_task_id() != -1:
            return  # a repetition
        found = tensors_of(output)
        grads = [None] * len(found)
        self.values[name].append([x.detach().clone() for x in found])
        self.grads[name].append(grads)
        for at, x in enumerate(found):
            if x.requires_grad:
                x.register_hook(lambda g, grads=grads, at=at: grads.__setitem__(at, g.clone()))

    def remove(self):
        for handle in self.handles:
            handle.remove()


def same(a, b, rtol=0.0, atol=0.0):
    """Whether two lists of tensors, or of None, are equal, by default to the bit."""
    assert len(a) == len(b), (len(a), len(b))
    for one, other in zip(a, b, strict=True):
        if one is None or other is None:
            assert one is other, (one, other)
        else:
            assert one.dtype is other.dtype
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
