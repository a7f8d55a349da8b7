"""No false alarm: ten timm families in training as users write it, 20 steps each."""

import pytest
import torch

from tests.quiet import USES, train_quietly

timm = pytest.importorskip("timm", reason="the models are timm's")

MODELS = [
    ("test_resnet", 64),
    ("test_vit", 160),
    ("test_convnext", 64),
    ("test_efficientnet", 64),
    ("test_byobnet", 64),
    ("test_mambaout", 64),
    ("test_nfnet", 64),
    ("mobilenetv3_small_050", 64),
    ("ghostnet_050", 64),
    ("regnetx_002", 64),
]


def check(name, size, uses):
    for use in uses:
        train_quietly(timm.create_model(name), torch.randn(2, 3, size, size), use)


@pytest.mark.parametrize(("name", "size"), MODELS[:2])
def test_two_families(name, size):
    check(name, size, ["start", "middle"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), MODELS)
def test_ten_families(name, size):
    check(name, size, [use for use in USES if use != "checkpointed" or can_checkpoint(name)])


def can_checkpoint(name):
    """Some families have no checkpointing."""
    try:
        timm.create_model(name).set_grad_checkpointing(True)
    except (AssertionError, AttributeError):
        return False
    return True
