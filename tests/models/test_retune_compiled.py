"""A schedule of 50 rates for what models drop by themselves, under torch.compile.

Where a hook of ours drops in place of a layer, one graph for training serves all rates.
"""

import pytest
import torch
from torch._dynamo.utils import counters

from dropblock_hooks import LinearSchedule, Retune, attach
from tests.cases import rest_slow

EPOCHS = 50


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


@pytest.mark.every(3)
@pytest.mark.parametrize("backend", rest_slow(["eager", "aot_eager"], 0))
@pytest.mark.parametrize("build", rest_slow([timm_vit, efficientnet]))
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
