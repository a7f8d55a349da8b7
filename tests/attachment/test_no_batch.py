"""Regularizers of whole samples on tensors whose axis 0 is not the batch."""

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ClipGradNorm,
    Dropout1d,
    DropPath,
    HookWarning,
    StochasticDepth,
    attach,
    plan,
    presets,
)
from tests.cases import rest_slow

X = torch.randn(3, 8, 16)
SAMPLES = [DropPath(0.5), StochasticDepth(0.5), ClipGradNorm(1.0, per="sample")]
each_class = pytest.mark.parametrize("regularizer", SAMPLES, ids=lambda each: each.label)


class Branch(nn.Module):
    """A residual branch, whose layer gets the tensor in another arrangement."""

    def __init__(self, there, back):
        super().__init__()
        self.stem, self.layer = nn.Linear(16, 16), nn.Linear(16, 16)
        self.there, self.back = there, back

    def forward(self, x, mask=None):
        x = self.stem(x)
        return x + self.back(self.layer(self.there(x)))


OTHER = {
    "windows": (lambda x: x.unflatten(1, (4, 2)).flatten(0, 1), lambda y: y.reshape(3, 8, 16)),
    "tokens first": (lambda x: x.transpose(0, 1), lambda y: y.transpose(0, 1)),
    "one row for each token": (lambda x: x.flatten(0, 1), lambda y: y.reshape(3, 8, 16)),
}
BATCH = {
    "as it is": (lambda x: x, lambda y: y),
    "reversed": (lambda x: x.flip(1), lambda y: y.flip(1)),
}


def branch(kinds, name):
    return Branch(*kinds[name])


@each_class
@pytest.mark.parametrize("name", OTHER)
def test_another_axis_is_told(name, regularizer):
    model = branch(OTHER, name)
    planned = plan(model, {"layer": regularizer}, X)
    assert [each.kind for each in planned.findings] == ["no_batch"]
    attached = attach(model, {"layer": regularizer})
    with pytest.warns(HookWarning, match="and the batch has 3, so it does not act on whole"):
        model(X).sum().backward()
    assert [each.kind for each in attached.verify()] == ["no_batch"]
    model(X).sum().backward()  # it is told once


@each_class
@pytest.mark.parametrize("name", BATCH)
def test_the_batch_is_silent(name, regularizer):
    model = branch(BATCH, name)
    assert plan(model, {"layer": regularizer}, X).findings == ()
    attached = attach(model, {"layer": regularizer})
    for x in (X, X[:2]):  # the last batch of an epoch is smaller
        model(x).sum().backward()
    assert attached.verify() == []


def test_classes_that_do_not_act_on_samples_are_silent():
    model = branch(OTHER, "windows")
    attached = attach(model, {"layer": Dropout1d(0.5)})
    model(X).sum().backward()
    assert attached.verify() == []


def test_a_layout_says_that_the_elements_are_samples():
    model = branch(OTHER, "windows")
    attached = attach(model, {"layer": DropPath(0.5, layout="NLC")})
    model(X).sum().backward()
    assert attached.verify() == []


class Calls(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layer, self.call = nn.Linear(16, 16), call

    def forward(self, *args, **kwargs):
        return self.call(self.layer, *args, **kwargs)


CALLS = {
    "keywords": (lambda layer, *, x: layer(x), (), {"x": X}),
    "a list of images": (lambda layer, images: layer(torch.stack(images)), (list(X),), {}),
    "several crops": (
        lambda layer, crops: layer(torch.cat([c.mean(1) for c in crops])),
        ([X, X[:, :4], X[:, :2]],),
        {},
    ),
    "crops of one size together": (
        lambda layer, crops: layer(torch.cat([c.mean(1) for c in crops[2:5]])),
        ([X, X, X[:, :4], X[:, :4], X[:, :4], X[:, :2]],),
        {},
    ),
    "two views": (lambda layer, a, b: layer(torch.cat([a, b])), (X, X), {}),
    "numbers only": (lambda layer, n: layer(torch.ones(n, 16)), (5,), {}),
}


@each_class
@pytest.mark.parametrize("name", CALLS)
def test_batches_that_come_in_other_ways_are_silent(name, regularizer):
    call, args, kwargs = CALLS[name]
    model = Calls(call)
    attached = attach(model, {"layer": regularizer})
    model(*args, **kwargs).sum().backward()
    assert attached.verify() == []


@pytest.mark.parametrize("axes", [3, 4])
def test_the_length_of_a_batch_in_a_list(axes):
    """A list of images is a batch, and a list of batches has several."""
    images = [torch.randn(5, 6, 16)] * 2 if axes == 3 else [torch.randn(2, 5, 6, 16)] * 4
    model = Calls(lambda layer, images: layer(images[0].flatten(0, -2)))
    attach(model, {"layer": DropPath(0.5)})
    with pytest.warns(HookWarning, match="and the batch has 2, so it does not act on whole"):
        model(images).sum().backward()


FAMILIES = ["vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224", "coat_tiny"]
MORE = ["maxvit_tiny_tf_224", "davit_tiny", "hiera_tiny_224", "mvitv2_tiny", "cait_xxs24_224"]


FEW_LAYERS = {
    "vit_tiny_patch16_224": {"depth": 3},
    "convnext_atto": {"depths": (1, 1, 2, 1)},
    "swin_tiny_patch4_window7_224": {"depths": (2, 2, 1, 1)},
    "coat_tiny": {"serial_depths": (1, 1, 1, 1), "parallel_depth": 1},
}


@pytest.mark.parametrize("name", rest_slow([*FAMILIES, *MORE], 2))
def test_drop_paths_of_timm_are_silent(name):
    timm = pytest.importorskip("timm", reason="the models are timm's")
    model = timm.create_model(name, num_classes=2, **FEW_LAYERS.get(name, {}))
    spec = presets.drop_path(model, 0.1)
    kinds = {each.kind for each in plan(model, spec, torch.randn(3, 3, 224, 224)).findings}
    assert "no_batch" not in kinds
