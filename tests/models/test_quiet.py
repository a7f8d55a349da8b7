"""No false alarm: ten timm families in training as users write it, 20 steps each."""

import pytest
import torch

from tests.cases import rest_slow
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


CASES = [(name, size, use) for name, size in MODELS for use in USES]


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("name", "size", "use"),
    rest_slow(CASES, [("test_resnet", 64, "start"), ("test_vit", 160, "middle")]),
)
def test_ten_families(name, size, use):
    if use == "checkpointed" and not can_checkpoint(name):
        pytest.skip("the family has no checkpointing")
    train_quietly(timm.create_model(name), torch.randn(2, 3, size, size), use)


def can_checkpoint(name):
    """Some families have no checkpointing."""
    try:
        timm.create_model(name).set_grad_checkpointing(True)
    except (AssertionError, AttributeError):
        return False
    return True
