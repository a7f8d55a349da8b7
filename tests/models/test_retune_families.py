"""What the models of timm and torchvision drop by themselves, retuned.

Measured by ``tests.retuned``: each layer is run on ones in the shape of what its model gave
it, until it has made 400 decisions; z is the distance of the share from the nominal one in standard
errors of independent decisions. Layers that act by themselves are compared with untouched ones.
"""

import pytest
import torch

from tests.cases import rest_slow
from tests.families import BATCH, MEMBERS
from tests.retuned import observe, with_rates

timm = pytest.importorskip("timm", reason="the models are timm's")
torchvision = pytest.importorskip("torchvision", reason="the models are torchvision's")

PLAIN = {
    "byobnet", "convnext", "mambaout", "maxxvit", "resnet", "vision_transformer",
    "vision_transformer_relpos",
}  # fmt: skip
CASES = rest_slow(MEMBERS, [member for member in MEMBERS if member.family in PLAIN])


def check(outcome, *kinds):
    assert outcome.gradients_finite
    assert outcome.evaluation_equal
    assert outcome.restored
    assert outcome.told_right, outcome.told
    assert [rate for rate in outcome.rates if not rate.right] == []
    assert {(rate.type, rate.kind) for rate in outcome.rates} >= set(kinds)


@pytest.mark.every(8, plain=2)
@pytest.mark.parametrize("member", CASES, ids=lambda member: member.family)
def test_a_family(member):
    check(observe(with_rates(member), torch.randn(BATCH, 3, member.size, member.size)))


def test_every_kind_of_site_is_among_them():
    member = next(member for member in MEMBERS if member.family == "vision_transformer")
    check(
        observe(with_rates(member), torch.randn(BATCH, 3, member.size, member.size)),
        ("Dropout", "ours"),
        ("DropPath", "ours"),
        ("Dropout", "read"),
        ("PatchDropout", "itself"),
    )


def swin():
    return torchvision.models.swin_transformer.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=12,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        dropout=0.2,
        attention_dropout=0.2,
        stochastic_depth_prob=0.2,
        num_classes=5,
    )


def test_swin_of_torchvision():
    check(
        observe(swin(), torch.randn(BATCH, 3, 32, 32)),
        ("Dropout", "ours"),
        ("StochasticDepth", "ours"),
        ("ShiftedWindowAttention", "attribute"),
    )
