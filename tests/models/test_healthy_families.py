"""Healthy trainings of 20 timm families for 3 epochs, about which nothing is reported."""

import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import Dropout, HookWarning, Kind, WatchdogError, attach, watch
from tests.families import MEMBERS

timm = pytest.importorskip("timm", reason="the models are timm's")

pytestmark = pytest.mark.slow

FAMILIES = (
    "byobnet",
    "convnext",
    "edgenext",
    "efficientnet",
    "efficientvit_mit",
    "ghostnet",
    "hgnet",
    "lcnetv2",
    "levit",
    "mambaout",
    "maxxvit",
    "mobilenetv3",
    "mobilevit",
    "nfnet",
    "pit",
    "pvt_v2",
    "resnet",
    "starnet",
    "swin_transformer",
    "vision_transformer",
)
CLASSES, BATCH, EPOCHS = 4, 4, 3
STEPS = 10  # a Watchdog judges statistics of at least so many calls


def batches(size, epoch):
    """Images of one pattern for each class, with noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=generator)
    generator.manual_seed(1 + epoch)
    for _ in range(STEPS):
        labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        noise = torch.randn(BATCH, 3, size, size, generator=generator)
        yield nn.functional.interpolate(patterns[labels], (size, size)) + 0.3 * noise, labels


def heads_of(model):
    """The names of the layers that give the scores of the classes."""
    layers = model.named_modules()
    return [name for name, layer in layers if getattr(layer, "out_features", 0) == CLASSES]


def train(member, factor=1.0):
    """Train a family; an error if anything is reported. `factor` multiplies the loss."""
    torch.manual_seed(0)
    model = member.build(num_classes=CLASSES)
    spec = {**member.spec(), heads_of(model)[0]: Dropout(0.1, at="input")}
    dog = watch(model, every=STEPS, action="raise")
    attached = attach(model, spec, epochs=EPOCHS)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    # the blocks are 3x3
    allowed = {Kind.CLIPPED} if member.family == "levit" else set()
    for epoch in range(EPOCHS):
        dog.step(epoch)
        attached.step(epoch)
        model.train()
        for images, labels in batches(member.size, epoch):
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, labels) * factor
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(images)
        findings = attached.verify()
        assert {finding.kind for finding in findings} <= allowed
        assert dog.verify() == []
        assert all(site.active_calls for site in attached)
    assert dog.alerts == []
    dog.remove()
    attached.remove()


@pytest.mark.every(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_reported(family):
    (member,) = [member for member in MEMBERS if member.family == family]
    with warnings.catch_warnings():
        warnings.simplefilter("error", HookWarning)
        if family == "levit":  # at this size of the images, its last map is 2x2
            too_large = r"stages\.2/DropBlock2d: the block is as large as the map \(2x2\)"
            warnings.filterwarnings("ignore", too_large)
        train(member)


def test_a_training_that_is_not_healthy_is_reported():
    (member,) = [member for member in MEMBERS if member.family == "resnet"]
    with pytest.raises(WatchdogError) as caught:
        train(member, factor=float("nan"))
    assert caught.value.findings[0].kind == Kind.NONFINITE
