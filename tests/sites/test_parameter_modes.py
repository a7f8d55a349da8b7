"""Which gradients a ``param:`` site acts on, where forwards of both modes precede a backward."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import ScaleGrad, attach

TRAIN, EVAL, QUIET = "train", "eval", "eval without gradients"
FORWARDS = [
    forwards
    for n in (1, 2, 3)
    for forwards in itertools.product([TRAIN, EVAL, QUIET], repeat=n)
    if forwards[0] != QUIET
]


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_the_mode_at_the_backward_decides(checkpointing):
    layer = nn.Linear(1, 1, bias=False)
    attach(layer, {"param:weight": ScaleGrad(10.0)})
    for forwards, backward in itertools.product(FORWARDS, [TRAIN, EVAL]):
        x = torch.ones(1, 1, requires_grad=True)
        for forward in forwards:
            layer.train(forward == TRAIN)
            with torch.set_grad_enabled(forward != QUIET):
                reentrant = checkpointing == "reentrant"
                y = checkpoint(layer, x, use_reentrant=reentrant) if checkpointing else layer(x)
            if forward != QUIET:
                loss = y.sum()
        layer.train(backward == TRAIN)
        layer.zero_grad()
        loss.backward()
        wanted = 10.0 if backward == TRAIN else 1.0
        assert layer.weight.grad.item() == wanted, (forwards, backward)
