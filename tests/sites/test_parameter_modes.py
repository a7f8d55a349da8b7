"""Which gradients a ``param:`` site acts on, where forwards of both modes precede a backward."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import ScaleGrad, attach

TRAIN, EVAL, QUIET = "train", "eval", "eval without gradients"


def model_with(active="train", checkpointing=None):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)

        def forward(self, x):
            if checkpointing is None:
                return self.layer(x)
            return checkpoint(self.layer, x, use_reentrant=checkpointing == "reentrant")

    model = Model()
    attach(model, {"param:layer.weight": ScaleGrad(10.0, active=active)})
    return model


def gradient(model, call, forwards, backward):
    """The gradient of the last forward with gradients, and the mode of the model at the backward.

    It is 1 unless the site acts.
    """
    x = torch.ones(1, 1, requires_grad=True)
    losses = []
    for forward in forwards:
        model.train(forward == TRAIN)
        with torch.no_grad() if forward == QUIET else contextlib.nullcontext():
            y = call(x)
        if forward != QUIET:
            losses.append(y.sum())
    model.train(backward == TRAIN)
    model.zero_grad()
    losses[-1].backward()
    return model.layer.weight.grad.item()


FORWARDS = [
    forwards
    for n in (1, 2, 3)
    for forwards in itertools.product([TRAIN, EVAL, QUIET], repeat=n)
    if forwards[0] != QUIET
]


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_the_mode_at_the_backward_decides(checkpointing):
    model = model_with(checkpointing=checkpointing)
    for forwards, backward in itertools.product(FORWARDS, [TRAIN, EVAL]):
        found = gradient(model, model, forwards, backward)
        assert found == (10.0 if backward == TRAIN else 1.0), (forwards, backward)
