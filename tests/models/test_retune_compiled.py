"""A schedule of 50 rates for what models drop by themselves, under torch.compile.

Where a hook of ours drops in place of a layer, one graph for training serves all rates. A rate that
a module reads is a constant in compiled code: one warning says so.
"""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dropblock_hooks import LinearSchedule, Retune, attach
from tests.cases import rest_slow

EPOCHS = 50
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def timm_vit(**rates):
    timm = pytest.importorskip("timm", reason="the model is timm's")
    model = timm.models.VisionTransformer(
        img_size=32,
        patch_size=16,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=5,
        drop_path_rate=0.2,
        proj_drop_rate=0.1,
        pos_drop_rate=0.1,
        **rates,
    )
    selectors = (
        "blocks.[!0].drop_path1", "blocks.[!0].drop_path2", "blocks.*.attn.proj_drop",
        "blocks.*.mlp.drop1", "pos_drop",
    )  # fmt: skip
    return model, torch.randn(2, 3, 32, 32), selectors


def bert():
    transformers = pytest.importorskip("transformers", reason="the model is Hugging Face's")
    config = transformers.BertConfig(
        **SMALL, vocab_size=50, max_position_embeddings=16, attention_probs_dropout_prob=0.0
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    return model, torch.randint(3, 50, (2, 7)), ("embeddings.dropout", "**.output.dropout")


def efficientnet():
    torchvision = pytest.importorskip("torchvision", reason="the model is torchvision's")
    block = torchvision.models.efficientnet.MBConvConfig
    model = torchvision.models.EfficientNet(
        [block(1, 3, 1, 32, 16, 1, 1.0, 1.0), block(2, 3, 2, 16, 16, 3, 1.0, 1.0)],
        dropout=0.2,
        num_classes=5,
    )
    called = ("features.2.1.stochastic_depth", "features.2.2.stochastic_depth", "type:Dropout")
    return model, torch.randn(2, 3, 32, 32), called


def loss_of(output):
    return getattr(output, "last_hidden_state", output).square().mean()


@pytest.mark.parametrize("backend", rest_slow(["eager", "aot_eager"], 0))
@pytest.mark.parametrize("build", rest_slow([timm_vit, bert, efficientnet]))
def test_fifty_rates_make_at_most_two_graphs(build, backend):
    torch._dynamo.reset()
    counters.clear()
    model, x, selectors = build()
    schedule = LinearSchedule(0.01, 0.5, epochs=EPOCHS)
    attached = attach(model, {selector: Retune(p=schedule) for selector in selectors})
    run = torch.compile(model.train(), backend=backend, fullgraph=True)
    graphs = []
    for epoch in range(EPOCHS):
        attached.step(epoch)
        loss_of(run(x)).backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == 1
    assert graphs[1] == graphs[-1] <= 2
    assert all(site.calls == EPOCHS for site in attached.sites)
    for site in attached.sites:  # the mean of the rates is 0.255; a DropPath has made 100 decisions
        assert abs(site.total_realized_rate - 0.255) < 0.2
    torch._dynamo.reset()


class Reads(nn.Module):
    """Reads the rate of its dropout, as fused attention does."""

    def __init__(self):
        super().__init__()
        self.line, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        return nn.functional.dropout(self.line(x), self.drop.p, self.training)


def timm_attention():
    model, x, selectors = timm_vit(attn_drop_rate=0.1)
    return model, x, ("blocks.*.attn.attn_drop", *selectors)


def bert_attention():
    model, x, selectors = bert()
    return model, x, ("encoder.layer.*.attention.self.dropout", *selectors)


def llama():
    transformers = pytest.importorskip("transformers", reason="the model is Hugging Face's")
    config = transformers.LlamaConfig(**SMALL, vocab_size=50, attention_dropout=0.1)
    config.use_cache = False
    model = transformers.LlamaModel(config)
    return model, torch.randint(3, 50, (2, 7)), ("attr:layers.*.self_attn.attention_dropout",)


READ = {
    "alone": lambda: (Reads(), torch.randn(2, 4), ("drop",)),
    "timm": timm_attention,
    "bert": bert_attention,
    "llama": llama,
}


@pytest.mark.parametrize("name", rest_slow(READ))
def test_rates_that_are_read_are_no_fault(name):
    torch._dynamo.reset()
    model, x, selectors = READ[name]()
    attached = attach(
        model, {selector: Retune(p=LinearSchedule(0.1, 0.3, epochs=5)) for selector in selectors}
    )
    run = torch.compile(model.train(), backend="eager")
    for epoch in range(4):
        attached.step(epoch)
        run(x)
    assert attached.verify() == []
    torch._dynamo.reset()
