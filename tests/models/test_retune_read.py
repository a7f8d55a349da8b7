"""Rates that are only read, retuned: the share that is dropped, told by outputs of known values.

z is the distance of a share from the nominal one in standard errors of independent decisions.
"""

import pytest
import torch
from torch import nn

from dropblock_hooks import Retune, attach
from tests.revealing import BATCH, RATES, TOKENS, check_both_epochs, tokens, z_score


def test_fused_attention_of_timm():
    attention = pytest.importorskip("timm.layers", reason="the attention is timm's").Attention
    model = nn.Sequential(attention(TOKENS, num_heads=1, attn_drop=0.5))
    assert model[0].fused_attn
    with torch.no_grad():
        model[0].qkv.weight.zero_()
        model[0].qkv.weight[2 * TOKENS :] = torch.eye(TOKENS)
        model[0].proj.weight.copy_(torch.eye(TOKENS))
        model[0].proj.bias.zero_()
    check_both_epochs(model, "0.attn_drop", lambda: model(tokens()))


@pytest.mark.parametrize("weights", [False, True], ids=["fused", "with weights"])
def test_multihead_attention(weights):
    model = nn.ModuleDict({"mha": nn.MultiheadAttention(TOKENS, 1, dropout=0.5, batch_first=True)})
    mha = model["mha"]
    with torch.no_grad():
        mha.in_proj_weight.zero_()
        mha.in_proj_weight[2 * TOKENS :] = torch.eye(TOKENS)
        mha.out_proj.weight.copy_(torch.eye(TOKENS))
    x = tokens()
    check_both_epochs(model, "attr:mha.dropout", lambda: mha(x, x, x, need_weights=weights)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_between_the_layers_of_a_recurrent_network(kind):
    """Each layer gives a number that tells whether it was given one or 0."""
    width = 24
    model = nn.ModuleDict({"rnn": kind(width, width, 2, dropout=0.5, batch_first=True)})
    rnn = model["rnn"]
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.zero_()
        for layer in (0, 1):
            own = getattr(rnn, f"weight_ih_l{layer}").view(-1, width, width)
            bias = getattr(rnn, f"bias_ih_l{layer}").view(-1, width)
            if kind is nn.LSTM:  # input, forget, cell, output
                bias[0], bias[1], bias[3] = 200.0, -200.0, 200.0
                own[2] = torch.eye(width)
            elif kind is nn.GRU:  # reset, update, new
                bias[1] = -200.0
                own[2] = torch.eye(width)
            else:
                own[0] = torch.eye(width)
    attached = attach(model, {"attr:rnn.dropout": Retune(p=RATES)})
    model.train()
    for epoch, p in enumerate((0.1, 0.3)):
        attached.step(epoch)
        with torch.no_grad():
            y = rnn(torch.ones(BATCH, 40, width))[0]
        assert abs(z_score(y == 0, p)) <= 4
    attached.remove()
    assert abs(z_score(rnn(torch.ones(BATCH, 40, width))[0] == 0, 0.5)) <= 4
