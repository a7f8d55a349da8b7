"""Dropped twice: where the model drops what a site drops again."""

import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    Dropout2d,
    DropPath,
    Foreign,
    GaussianDropout,
    GaussianNoise,
    HookWarning,
    LinearSchedule,
    Probability,
    Regularizer,
    Retune,
    StochasticDepth,
    attach,
    plan,
    register,
)

RAMP = LinearSchedule(0.0, 0.2, epochs=5)


class Branch(nn.Module):
    """A residual block: a branch that ends in a layer that may drop paths."""

    def __init__(self, drop_path, last=None):
        super().__init__()
        self.conv, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True)
        self.norm, self.drop_path = nn.BatchNorm2d(4), drop_path
        self.last = last or nn.Identity()

    def forward(self, x):
        y = self.drop_path(self.norm(self.act(self.conv(x))))
        y += x
        return self.last(y)


class DropPaths(nn.Module):
    """Has the name and the rate of a layer that drops paths."""

    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return x


def sequence(p=0.5, kind=nn.Dropout):
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), kind(p), nn.Identity(), nn.Linear(6, 6))


def block(rate=0.5):
    return nn.Sequential(nn.Conv2d(4, 4, 1), Branch(DropPaths(rate)), Branch(DropPaths(rate)))


IMAGE, ROW = (2, 4, 8, 8), (3, 6)
DOUBLED = {
    "itself": (sequence, "2", Dropout(0.2), ROW, 0.6),
    "a scheduled rate": (sequence, "2", Dropout(RAMP), ROW, 0.6),
    "one class by another": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout2d(0.5)),
        "1",
        DropBlock2d(0.2, 3),
        IMAGE,
        0.6,
    ),
    "a branch": (block, "1.norm", DropPath(0.2), IMAGE, 0.6),
    "inside a branch": (block, "2.conv", DropPath(RAMP), IMAGE, 0.6),
    "around a branch": (block, "1", StochasticDepth(0.2), IMAGE, 0.6),
    "two on one": (sequence, "2", [Dropout(0.2), Dropout(0.5)], ROW, "0.6 to 0.75"),
}


def told_by_plan(model, spec, shape):
    planned = plan(model, spec, torch.randn(shape))
    return [each for each in planned.findings if each.kind == "dropped_twice"]


def told_by_attach(model, spec, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attach(model, spec, **options).remove()
    found = [each for w in caught if w.category is HookWarning for each in w.message.findings]
    return [each for each in found if each.kind == "dropped_twice"]


@pytest.mark.parametrize(
    ("build", "name", "regularizer", "shape", "rate"), DOUBLED.values(), ids=DOUBLED
)
def test_it_is_told_with_the_rate_that_results(build, name, regularizer, shape, rate):
    model, spec = build(), {name: regularizer}
    (own,) = [each for each in told_by_plan(model, spec, shape) if "the model's own" in each.text]
    assert own.text.endswith(f", together {rate}")
    assert own.sites[0].startswith(f"{name}/")
    assert own in told_by_attach(model.eval(), spec)
    assert own in told_by_attach(model, spec, example_input=torch.randn(shape))


HEALTHY = {
    "the next layer": (sequence, "1", Dropout(0.2), ROW),
    "a rate of 0": (lambda: sequence(0.0), "2", Dropout(0.2), ROW),
    "noise": (sequence, "2", [GaussianNoise(0.1), GaussianDropout(0.1)], ROW),
    "gradients": (sequence, "2", ClipGradNorm(1.0), ROW),
    "another branch": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), Branch(DropPaths(0.0)), Branch(DropPaths(0.5))),
        "1.norm",
        DropPath(0.2),
        IMAGE,
    ),
    "two in a list": (block, "0", [Dropout(0.1), Dropout(0.2), Dropout2d(0.2)], IMAGE),
}


@pytest.mark.parametrize(("build", "name", "regularizer", "shape"), HEALTHY.values(), ids=HEALTHY)
def test_silent_where_nothing_is_dropped_twice(build, name, regularizer, shape):
    model, spec = build(), {name: regularizer}
    assert told_by_plan(model, spec, shape) == []
    assert told_by_attach(model, spec) == []


@register
class DropoutLike(Regularizer):
    p: Probability = 0.2

    def apply(self, x, now):
        return x / 2, None


@register
class DropsElements(DropoutLike):
    unit = "elements"


@pytest.mark.parametrize(("cls", "number"), [(DropoutLike, 0), (DropsElements, 1)])
def test_a_class_of_your_own_drops_what_it_says_whatever_its_name(cls, number):
    regularizer = cls()
    assert len(told_by_plan(sequence(), {"2": regularizer}, ROW)) == number
    assert len(told_by_attach(sequence(), {"2": regularizer})) == number


def test_a_layer_of_another_library_is_known_by_its_name():
    spec = {"2": Foreign(nn.AlphaDropout, p=0.2)}
    assert len(told_by_attach(sequence(), spec)) == 1


def test_a_layer_in_evaluation_drops_nothing():
    frozen = sequence()
    frozen[2].eval()
    assert told_by_plan(frozen, {"2": Dropout(0.2)}, ROW) == []
    assert told_by_attach(frozen, {"2": Dropout(0.2)}) == []


def test_what_a_retune_sets_is_not_told():
    model = Branch(DropPaths(0.2))
    for selector in ("drop_path", "attr:drop_path.drop_prob"):
        assert told_by_attach(model, {"norm": DropPath(p=0.1), selector: Retune(p=0.4)}) == []
    assert len(told_by_attach(model, {"norm": DropPath(p=0.1)})) == 1


def test_inside_the_drop_blocks_of_timm():
    timm = pytest.importorskip("timm", reason="its models")
    model = timm.create_model("resnet18", drop_block_rate=0.1)
    assert told_by_attach(model, {"layer4.*": DropBlock2d(p=0.2, block_size=7)}) == []
    (told,) = told_by_attach(model, {"layer4.*.bn2": DropBlock2d(p=0.2, block_size=7)})
    assert told.text.endswith("together 0.28")
    assert told_by_attach(model, {"layer3.1.conv1": DropBlock2d(p=0.2, block_size=7)}) != []
    assert told_by_attach(model, {"layer3.1.conv1": Dropout(0.2)}) == []
