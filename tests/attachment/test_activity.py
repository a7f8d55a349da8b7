"""Proof that it is on: what is told after the first training forward, and by the report."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from dropblock_hooks import (
    ClipGradNorm,
    Dropout,
    Dropout2d,
    HookWarning,
    attach,
    attachments,
)
from tests.told import ids, told

IMAGE = torch.ones(2, 3, 16, 16)


class Attention(nn.Module):
    """Attention as timm writes it: fused, with a dropout that is then left out."""

    def __init__(self, fused=True):
        super().__init__()
        self.fused_attn = fused
        self.qkv, self.proj = nn.Linear(4, 12), nn.Linear(4, 4)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.fused_attn:
            return self.proj(scaled_dot_product_attention(q, k, v))
        return self.proj(self.attn_drop((q @ k.mT).softmax(-1)) @ v)


class CallsForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner.forward(x)


class Loops(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.never = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))

    def forward(self, x):
        return self.always(x)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize(
    ("model", "layer", "cause"),
    [
        (Attention, "attn_drop", "fused attention"),
        (Heads, "attention.out_proj", "fused attention"),
        (CallsForward, "inner", r"without calling it .*forward\(\) directly"),
        (Loops, "blocks", "a container that the model loops over.*Name the layers"),
        (Branch, "never.0", r"forward\(\) does not call it, or took another branch"),
    ],
    ids=["fused", "multihead", "forward", "container", "branch"],
)
def test_the_likely_cause(model, layer, cause):
    model = model()
    attached = attach(model, {layer: Dropout(0.1)})
    x = torch.ones(2, 3, 4)
    model.eval()(x)  # no warning
    model.train()
    with pytest.warns(HookWarning, match=cause) as caught:
        model(x)
    assert told(caught) == [(f"{layer}/Dropout", "never_called")]
    model(x)  # once
    with torch.no_grad():
        model(x)
    attached.remove()


def test_frozen_layers_are_told():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    attach(model, {"1": Dropout2d(0.1), "2": [Dropout2d(0.1, active="always"), ClipGradNorm(1.0)]})
    model[1].eval()
    model[2].eval()
    with pytest.warns(HookWarning, match="evaluation mode inside a training model") as caught:
        model(IMAGE)
    assert told(caught) == [("1/Dropout2d", "never_active")]


def test_a_replaced_layer_is_told(net):
    attach(net, {"layer1.0": Dropout2d(0.1), "layer1.1": Dropout2d(0.1)})
    net.layer1[0] = copy.deepcopy(net.layer2[0])
    with pytest.warns(HookWarning) as caught:
        net(IMAGE)
    assert told(caught) == [("layer1.0/Dropout2d", "replaced")]
    (again,) = attachments(net)  # made anew from the hooks that are left
    assert ("layer1.0/Dropout2d", "replaced") in ids(again.verify())


def test_nothing_is_told_of_parts_pauses_and_evaluation(net):
    attached = attach(net, {"layer1.0": Dropout2d(0.1), "fc": Dropout(0.1)})
    net.layer1(torch.ones(1, 8, 4, 4))  # the model itself is not called
    net.eval()(IMAGE)
    with attached.paused():
        net.train()(IMAGE)
    assert attached.report()[1].calls_per_forward == 1.0


def test_a_root_is_proved_when_it_is_called():
    model = nn.Sequential(nn.Sequential(Branch()), nn.Identity())
    attach(model, {"always": Dropout(0.1), "never.0": Dropout(0.1)}, root="0.0")
    with pytest.warns(HookWarning) as caught:
        model(torch.ones(2, 4))
    assert told(caught) == [("never.0/Dropout", "never_called")]


def test_forwards_and_calls(net):
    net.layer1[1].act = net.layer1[0].act
    attached = attach(net, {"layer1.*": Dropout2d(0.1), "layer1.0.act": Dropout(0.1)})
    for _ in range(3):
        net(IMAGE).sum().backward()
    rows = {row.site: row for row in attached.report()}
    assert rows["layer1.0/Dropout2d"].calls_per_forward == 1
    shared = rows["layer1.0.act/Dropout"]
    assert (shared.calls, shared.calls_per_forward) == (6, 2)
    state = attached.state_dict()
    attached.remove()
    resumed = attach(net, {"layer1.*": Dropout2d(0.1), "layer1.0.act": Dropout(0.1)})
    assert resumed.report()[0].calls_per_forward is None
    resumed.load_state_dict(state)
    assert resumed.report()[2].calls_per_forward == 2


def test_compiled_training_without_any_site_is_told_after_an_epoch():
    model = nn.Sequential(Branch())
    attached = attach(model, {"0.never.0": Dropout(0.1)})
    compiled = torch.compile(model, backend="eager")
    attached.step(0)
    compiled(torch.ones(2, 4))
    with pytest.warns(HookWarning, match="compiled") as caught:
        attached.step(1)
    assert told(caught) == [(".", "not_trained")]


def test_a_converted_norm_was_replaced():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    attached = attach(model, {"type:BatchNorm2d": Dropout2d(0.1)})
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model[1].eval()  # which trains on a GPU only
    with pytest.warns(HookWarning) as caught:
        model(IMAGE).sum().backward()
    assert told(caught) == ids(attached.verify()) == [("1/Dropout2d", "replaced")]


class Skips(nn.Module):
    """Blocks of which each forward leaves out others, as LayerDrop does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.left_out = [1]

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if i not in self.left_out:
                x = x + block(x)
        return x


def test_a_block_that_a_forward_leaves_out_is_told_after_the_epoch_only():
    model = Skips()
    attached = attach(model, {"blocks.*": Dropout(0.1)})
    x = torch.ones(2, 4)
    for model.left_out in ([1], [0, 2]):
        model(x).sum().backward()
    attached.step(1)  # no warning
    assert attached.verify() == []

    for model.left_out in ([2], [1, 2]):
        model(x).sum().backward()
    with pytest.warns(HookWarning, match="the layer was never called") as caught:
        attached.step(2)
    assert told(caught) == [("blocks.2/Dropout", "never_called")]


def test_blocks_of_which_no_forward_calls_one_are_told_at_once():
    model = Skips()
    model.left_out = [0, 1, 2]
    attach(model, {"blocks.*": Dropout(0.1)})
    with pytest.warns(HookWarning, match="the layer was never called"):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
