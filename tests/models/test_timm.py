"""Fifty timm models of fifty families, random weights: attached, trained, evaluated, removed."""

import pytest
import torch
from torch import nn

from dropblock_hooks import ClipGradNorm, DropBlock2d, Dropout2d, attach, attachments
from tests.cases import rest_slow
from tests.quiet import calls_of

timm = pytest.importorskip("timm", reason="the models are timm's")

MODELS = [  # and the edge of the input, smaller than the default where the model takes it
    ("cpubone_nano", 96),
    ("cs3darknet_focus_s", 96),
    ("csatv2", 96),
    ("cspnext_tiny", 96),
    ("densenet121", 96),
    ("dla46x_c", 96),
    ("dpn48b", 96),
    ("edgenext_xx_small", 96),
    ("efficientformerv2_s0", 224),
    ("efficientvim_m1", 96),
    ("efficientvit_b0", 96),
    ("efficientvit_m0", 224),
    ("ese_vovnet19b_slim_dw", 96),
    ("fasternet_t0", 96),
    ("focalnet_tiny_srf", 96),
    ("ghostnet_050", 96),
    ("hardcorenas_b", 96),
    ("hgnetv2_b0", 96),
    ("hrnet_w18_small", 96),
    ("iformer_s", 96),
    ("inception_next_atto", 96),
    ("inception_v3", 96),
    ("lcnetv2_small", 96),
    ("legacy_seresnet18", 96),
    ("legacy_xception", 96),
    ("levit_128s", 224),
    ("lowformer_b0", 96),
    ("mobilenetv3_small_050", 96),
    ("mobilevit_xxs", 96),
    ("pit_xs_224", 224),
    ("poolformer_s12", 96),
    ("pvt_v2_b0", 96),
    ("regnetx_002", 96),
    ("repghostnet_050", 96),
    ("repvit_m1", 96),
    ("resnest14d", 96),
    ("resnetv2_18", 96),
    ("rexnet_100", 96),
    ("shvit_s1", 96),
    ("skresnet18", 96),
    ("starnet_s050", 96),
    ("swiftformer_xs", 224),
    ("test_byobnet", 96),
    ("test_coatnet", 160),
    ("test_convnext", 96),
    ("test_efficientnet", 96),
    ("test_mambaout", 96),
    ("test_nfnet", 96),
    ("test_resnet", 96),
    ("xception41p", 96),
]

QUICK = [model for model in MODELS if model[0].startswith(("test_resnet", "test_mamba", "test_nf"))]


def step(model, x):
    """Output and gradients of a training step, with the running statistics put back."""
    torch.manual_seed(1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.zero_grad()
    y = model.train()(x)
    y = y[0] if isinstance(y, tuple | list) else y
    y.square().mean().backward()
    model.load_state_dict(state)
    return y.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def test_fifty_families():
    families = {timm.models.model_entrypoint(name).__module__ for name, _ in MODELS}
    assert len(families) == len(MODELS) == 50


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "size"), rest_slow(MODELS, QUICK))
def test_a_family(name, size, hook_count):
    model = timm.create_model(name)
    x = torch.randn(2, 3, size, size)
    convolutions = list(calls_of(model, x, nn.Conv2d))
    n = len(convolutions)
    block, channel, clip = convolutions[n // 4], convolutions[n // 2], convolutions[-1]
    keys, hooks = list(model.state_dict()), hook_count(model)
    bare_training, bare_evaluation = step(model, x), model.eval()(x)

    spec = {block: DropBlock2d(0.3, 3), channel: Dropout2d(0.2), clip: ClipGradNorm(1e-4)}
    attached = attach(model, spec)
    assert list(model.state_dict()) == keys
    assert torch.equal(model.eval()(x), bare_evaluation)
    output, gradients = step(model, x)
    assert all(torch.isfinite(g).all() for g in gradients)
    # a branch whose last norm begins at zero hides the drop from the output, not from gradients
    assert not all(map(torch.equal, [output, *gradients], [bare_training[0], *bare_training[1]]))
    assert attached.verify() == []
    assert 0 < attached.sites[0].realized_rate < 1

    attached.remove()
    assert attachments(model) == []
    assert hook_count(model) == hooks
    assert list(model.state_dict()) == keys
    again = step(model, x)
    assert torch.equal(again[0], bare_training[0])
    assert all(map(torch.equal, again[1], bare_training[1]))
