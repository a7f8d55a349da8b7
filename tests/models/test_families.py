"""The smallest member of each of timm's families, random weights, at its last two stages.

Measured by ``tests.families``: one training step, one evaluation, and the layer's own hook
run 40 times more on what the layer took and gave; z is the distance of the mean share from the
nominal one in standard errors of these 40 calls.
"""

import warnings
from typing import ClassVar

import pytest
import torch

from dropblock_hooks import DropBlock2d, Regularizer, SiteError, SpecError, attach, register
from tests.cases import rest_slow
from tests.families import MEMBERS, P, has_checkpointing, observe

timm = pytest.importorskip("timm", reason="the models are timm's")

PLAIN = {
    "convnext", "levit", "mambaout", "resnet", "vision_transformer",
}  # fmt: skip
CASES = rest_slow(MEMBERS, [member for member in MEMBERS if member.family in PLAIN])
by_family = pytest.mark.parametrize("member", CASES, ids=lambda member: member.family)
BY_FAMILY = {member.family: member for member in MEMBERS}


def check(outcome):
    assert outcome.gradients_finite
    assert outcome.evaluation_equal
    assert outcome.removed_clean
    for stage in outcome.stages:
        assert stage.calls == 1
        assert stage.channels_right
        assert abs(stage.z) <= 4
        assert abs(stage.realized - P) < 0.02


@pytest.mark.every(4)
@by_family
def test_a_family(member):
    check(observe(member))


@pytest.mark.every(11)
@pytest.mark.slow
@by_family
def test_a_family_with_checkpointing(member):
    if not has_checkpointing(member):
        pytest.skip("the family has no checkpointing")
    with warnings.catch_warnings():  # of the checkpoint's own, for inputs without gradient
        warnings.simplefilter("ignore", UserWarning)
        check(observe(member, checkpointing=True))


@register
class KeepMap(Regularizer):
    """Keeps each map that it is given, as (N, C, height, width), and changes nothing."""

    spatial: ClassVar[int] = 2
    random: ClassVar[bool] = False
    kept: ClassVar[list] = []

    def apply(self, x, now):
        self.kept.append(x.clone())
        return x, None


def maps(member, images, model):
    """What is regularized at each stage, as (N, C, height, width), for each batch."""
    found = []
    spec = {
        selector: [KeepMap(active="always", **options(each)) for each in listed(blocks)]
        for selector, blocks in member.spec().items()
    }
    with attach(model, spec), torch.no_grad():
        for x in images:
            KeepMap.kept.clear()
            model.eval()(x)
            found.append([*KeepMap.kept])
    return found


def listed(blocks):
    return blocks if isinstance(blocks, list) else [blocks]


def options(block):
    return {name: getattr(block, name) for name in ("index", "layout", "grid", "prefix_tokens")}


@pytest.mark.parametrize(
    "family",
    [
        "cait", "convit", "crossvit", "deit", "eva", "gemma4_vit", "mambaout", "mvitv2",
        "naflexvit", "swin_transformer", "tnt", "twins", "vision_transformer", "vitamin", "volo",
        "xcit", "resnet",
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_corner_of_the_image_is_that_corner_of_the_map(family):
    member = BY_FAMILY[family]
    model = member.build()
    x, edge = torch.randn(2, 3, member.size, member.size), member.size // 4
    right, bottom = x.clone(), x.clone()
    right[:, :, :edge, -edge:] += 3 * torch.randn(2, 3, edge, edge)
    bottom[:, :, -edge:, :edge] += 3 * torch.randn(2, 3, edge, edge)
    plain, of_right, of_bottom = maps(member, [x, right, bottom], model)
    for a, b, c in zip(plain, of_right, of_bottom, strict=True):
        h, w = a.shape[2:]
        row, column = divmod(int((a - b).square().sum((0, 1)).argmax()), w)
        assert row <= (h - 1) / 2
        assert column >= (w - 1) / 2
        row, column = divmod(int((a - c).square().sum((0, 1)).argmax()), w)
        assert row >= (h - 1) / 2
        assert column <= (w - 1) / 2


@pytest.mark.parametrize(
    ("family", "message"),
    rest_slow(
        [
            ("crossvit", "is a list of 2 elements: say which element with index="),
            ("hrnet", "is a list of 4 elements: say which element with index="),
            ("pit", "is a tuple of 2 elements: say which element with index="),
            ("coat", "is a tuple of 4 elements: say which element with index="),
            ("hiera", "no known grid"),
            ("levit", "one of the maps of this forward"),
            ("gemma4_vit", "one of the maps of this forward"),
        ],
        plain=4,
    ),
)
def test_what_a_family_needs_to_be_told(family, message):
    member = BY_FAMILY[family]
    model = member.build()
    attach(model, {"stage:-1": DropBlock2d(P, 3)})
    with pytest.raises(SiteError, match=message):
        model.train()(torch.randn(2, 3, member.size, member.size))


def test_before_the_last_stage_of_hiera_drop_block_is_refused():
    member = BY_FAMILY["hiera"]
    model = member.build()
    attach(model, {"stage:-2": DropBlock2d(P, 3)})
    with pytest.raises(SiteError, match="no known grid"):
        model.train()(torch.randn(2, 3, member.size, member.size))


def test_the_last_stages_of_coat_are_outputs_of_the_same_layer():
    model = BY_FAMILY["coat"].build()
    with pytest.raises(SpecError, match="can't both be on"):
        attach(
            model, {"stage:-2": DropBlock2d(P, 3, index=2), "stage:-1": DropBlock2d(P, 3, index=3)}
        )


def test_blocks_of_a_cut_map_are_no_map():
    member = BY_FAMILY["nest"]
    model = member.build()
    attach(model, {"levels.0.transformer_encoder.0": DropBlock2d(P, 3)})
    with pytest.raises(SiteError, match="16x36 may be no map: the model's maps are 24x24"):
        model.train()(torch.randn(2, 3, member.size, member.size))
