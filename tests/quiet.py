"""A check for false alarms: healthy training in many shapes, of which nothing may be told.

``train_quietly(model, x)`` attaches regularizers of every kind to layers that the model is seen to
call, and trains it as users do; any warning of this package is an error.
"""

import contextlib
import warnings
from collections import Counter

import torch
from torch import nn

from dropblock_hooks import (
    ClipGradNorm,
    Dropout,
    Dropout2d,
    HookWarning,
    LinearSchedule,
    attach,
)

USES = ("start", "end", "fractions", "middle", "resumed", "paused", "part", "checkpointed")


def spec_of(model, x):
    """A scheduled dropout, a clip and a bound of a parameter, on layers that are called once."""
    kinds = {nn.Conv2d: Dropout2d, nn.Linear: Dropout}
    names = [
        name
        for name, calls in calls_of(model, x, tuple(kinds)).items()
        if calls == 1
        and type(model.get_submodule(name)) in kinds
        and not name.startswith(("head", "fc", "classifier"))  # not called by forward_features
    ]
    early, late = names[len(names) // 4], names[-2]
    first, second = (kinds[type(model.get_submodule(name))] for name in (early, late))
    return {
        early: first(LinearSchedule(0.0, 0.1, epochs=4)),
        late: [second(0.1), ClipGradNorm(1e6)],
        f"param:{early}.weight": ClipGradNorm(1e6),
    }


@torch.no_grad()
def calls_of(model, x, kinds):
    """How often a forward calls each layer of some classes that it does call, in model order."""
    calls = Counter()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
    handles = [
        layer.register_forward_hook(lambda module, args, output: calls.update([module]))
        for layer in layers.values()
    ]
    model.eval()(x)
    for handle in handles:
        handle.remove()
    return {name: calls[layer] for name, layer in layers.items() if calls[layer]}


def train_quietly(model, x, use, epochs=4, steps=5):
    """Train for some epochs; an error where anything is told, or a site did nothing.

    Args:
        model: one of timm's.
        x: what it takes.
        use: one of `USES`: where `step` is called, and what is done besides.
        epochs: at least 3.
        steps: of each epoch.
    """
    spec = spec_of(model, x)
    if use == "checkpointed":
        model.set_grad_checkpointing(True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HookWarning)
        attached = attach(model, spec)
        for epoch in range(epochs):
            if use == "resumed" and epoch == 2:
                state = attached.state_dict()
                attached.remove()
                attached = attach(model, spec)
                attached.load_state_dict(state)
            if use not in ("end", "middle"):
                attached.step(epoch)
            for i in range(steps):
                if use == "fractions":
                    attached.step(epoch + i / steps)
                if use == "middle" and i == steps // 2:
                    _evaluate(model, x)
                _step(model, x, optimizer, use == "part")
            unstepped = epoch == 0 and use in ("end", "middle")  # the first step is yet to come
            wanted = ["not_stepped"] if unstepped else []
            assert [each.kind for each in attached.verify()] == wanted, epoch
            with attached.paused() if use == "paused" else contextlib.nullcontext():
                _evaluate(model, x)
            assert [each.kind for each in attached.verify()] == wanted, epoch
            assert attached.report()[0].realized_rate is not None
            if use in ("end", "middle"):
                attached.step()
            attached.scalars()
        assert [site.active_calls for site in attached] == [epochs * steps] * len(attached)
        attached.remove()


def _step(model, x, optimizer, part):
    optimizer.zero_grad()
    y = model.train().forward_features(x) if part else model.train()(x)
    y = y[0] if isinstance(y, tuple | list) else y
    y.square().mean().backward()
    optimizer.step()


@torch.no_grad()
def _evaluate(model, x):
    model.eval()(x)
