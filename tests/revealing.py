"""Attention whose output is the matrix of its weights: what is 0 there was dropped.

It is uniform (queries and keys are 0), and its values are the rows of the identity.
"""

import math

import torch

from dropblock_hooks import LinearSchedule, Retune, attach

TOKENS, BATCH = 48, 12
RATES = LinearSchedule(0.1, 0.3, epochs=2)


def z_score(dropped, p):
    return float((dropped.double().mean() - p) / math.sqrt(p * (1 - p) / dropped.numel()))


def tokens():
    """Each token is a row of the identity."""
    return torch.eye(TOKENS).expand(BATCH, -1, -1)


@torch.no_grad()
def reveal(query, key, value, out):
    """Let an attention of one head give its weights."""
    for layer in (query, key, value, out):
        if getattr(layer, "bias", None) is not None:
            layer.bias.zero_()
    query.weight.zero_()
    key.weight.zero_()
    value.weight.copy_(torch.eye(TOKENS))
    out.weight.copy_(torch.eye(TOKENS))


def check_attention(weights, p, among=None):
    """Weights of uniform attention that were dropped with chance p; `among` these."""
    expected = torch.full((TOKENS, TOKENS), 1.0) if among is None else among.float()
    kept = (expected / expected.sum(-1, keepdim=True) / (1 - p)).expand_as(weights)
    seen = expected.bool().expand_as(weights)
    dropped = (weights == 0)[seen]
    torch.testing.assert_close(weights[weights != 0], kept[weights != 0])
    assert abs(z_score(dropped, p)) <= 4


def check_both_epochs(model, selector, run, among=None):
    """In each of two epochs, and with the rate of its own again."""
    attached = attach(model, {selector: Retune(p=RATES)})
    model.train()
    for epoch, p in enumerate((0.1, 0.3)):
        attached.step(epoch)
        with torch.no_grad():
            check_attention(run(), p, among)
    attached.remove()
    with torch.no_grad():
        check_attention(run(), 0.5, among)
