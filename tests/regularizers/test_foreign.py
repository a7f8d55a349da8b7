"""Peers' layers, modules and functions in the place of a regularizer."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from dropblock_hooks import DropBlock2d, Foreign, LinearSchedule, SiteError, SpecError, attach

X = torch.ones(8, 4, 12, 12)


def test_a_class_has_an_instance_per_site_and_a_schedule():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    spec = {"*": Foreign(nn.Dropout2d, p=LinearSchedule(0.0, 1.0, epochs=3))}
    attached = attach(model, spec)
    first, second = (site._live.bound.args[0] for site in attached.sites)
    assert first is not second
    assert torch.equal(model(X), X)
    attached.step(2)
    assert (first.p, attached.sites[0].rate) == (0.0, 1.0)
    assert (model(X) == 0).all()
    assert first.p == 1.0
    assert [site.realized_rate for site in attached.sites] == [1.0, 0.0]
    assert list(model.children()) == [model[0], model[1]]
    assert [site.key for site in attached.sites] == ["0/Foreign(Dropout2d)", "1/Foreign(Dropout2d)"]


def test_its_class_is_called_once_and_each_site_has_a_copy():
    class Counted(nn.Dropout):
        made = 0

        def __init__(self, p):
            super().__init__(p)
            Counted.made += 1

    model = nn.Sequential(nn.Identity(), nn.Identity())
    attached = attach(model, {"*": Foreign(Counted, p=LinearSchedule(0.0, 0.4, epochs=5))})
    assert Counted.made == 1
    first, second = (site._live.bound.args[0] for site in attached.sites)
    assert first is not second

    for epoch in range(5):
        attached.step(epoch)
        model(X)
    assert attached.sites[1].rate == 0.4
    assert Counted.made == 1


def test_an_integer_for_a_rate_stays_a_rate():
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": Foreign(nn.Dropout, p=0.5)})
    attached.set("0", p=1)
    assert attached.rates == {"0/Foreign(Dropout)": {"p": 1.0}}
    assert (model(X) == 0).all()


def test_it_acts_in_training_mode():
    class Mode(nn.Module):
        def forward(self, x):
            return x + (1 if self.training else 2)

    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": Mode()})
    assert (model(X) == 2).all()
    assert model.eval()(X) is X
    assert (model.train()(X) == 2).all()
    assert (attached.sites[0].calls, attached.sites[0].active_calls) == (3, 2)
    attached.remove()
    attach(model, {"0": Foreign(Mode().eval(), active="always")})
    assert (model.eval()(X) == 2).all()


class AddsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return x + self.shift


class ShapeSeen(nn.Module):
    """A peer's dropout, which drops nothing, and notes the shape that it gets."""

    shapes: ClassVar[list[tuple[int, ...]]] = []

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        return x + 0


class ShapeSeenDropout2d(ShapeSeen):
    """Its name says that it drops channels."""


@pytest.mark.parametrize("layout", ["auto", "NHWC"])
def test_a_dropout_of_channels_drops_channels_in_a_layout_with_channels_last(layout):
    model = nn.Sequential(nn.LayerNorm(16))
    attached = attach(model, {"0": Foreign(nn.Dropout2d, p=0.5, layout=layout)})
    y = model(torch.randn(8, 5, 6, 16))
    is_zero = y == 0
    assert torch.equal(is_zero.all(dim=(1, 2)), is_zero.any(dim=(1, 2)))
    assert 0 < is_zero.float().mean() < 1
    assert attached.sites[0].layout == "NHWC"


SHAPES = {
    "channels last": (Foreign(ShapeSeenDropout2d), (2, 4, 6, 8), (2, 8, 4, 6)),
    "channels last, stated": (
        Foreign(ShapeSeenDropout2d, layout="NHWC"),
        (2, 8, 6, 8),
        (2, 8, 8, 6),
    ),
    "vectors": (Foreign(ShapeSeenDropout2d), (2, 8), (2, 8)),
    "a map of tokens": (Foreign(ShapeSeen, grid=(4, 3)), (2, 12, 8), (2, 8, 4, 3)),
    "a volume of tokens": (Foreign(ShapeSeen, grid=(2, 3, 2)), (2, 12, 8), (2, 8, 2, 3, 2)),
    "tokens behind a class token": (
        Foreign(ShapeSeen, grid=(4, 3), prefix_tokens=1),
        (2, 13, 8),
        (2, 8, 4, 3),
    ),
    "no channels needed": (Foreign(ShapeSeen), (2, 4, 6, 8), (2, 4, 6, 8)),
}


@pytest.mark.parametrize("case", SHAPES)
def test_the_shape_that_a_module_gets(case):
    regularizer, given, expected = SHAPES[case]
    model = nn.Sequential(nn.LayerNorm(8))
    attach(model, {"0": regularizer})
    ShapeSeen.shapes.clear()
    assert model(torch.randn(given)).shape == given
    assert ShapeSeen.shapes == [expected]


def test_buffers_follow_the_layer_to_another_device():
    model = nn.Sequential(nn.Linear(4, 4, device="meta"))
    attach(model, {"0": Foreign(AddsBuffer)})
    assert model(torch.ones(2, 4, device="meta")).device.type == "meta"


def test_a_bare_module_is_copied_and_a_function_taken_as_it_is():
    drop = nn.Dropout(1.0)
    seen = []
    model = nn.Sequential(nn.Identity(), nn.Identity())
    attached = attach(model, {"0": drop, "1": lambda x: seen.append(1) or x + 1})
    assert (model(X) == 1).all()
    assert attached.sites[0]._live.bound.args[0] is not drop
    assert seen == [1]
    assert attached.sites[1].rate is None
    assert (model.eval()(X) == 1).all()
    assert seen == [1], "a function is on in training only"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Foreign(nn.Linear, in_features=2, out_features=2), ValueError, "parameters"),
        (lambda: Foreign(nn.Dropout, q=0.1), TypeError, "argument 'q'"),
        (lambda: Foreign(nn.Dropout, p=1.5), ValueError, "1.5"),
        (lambda: Foreign(dict), TypeError, "takes a module, its class or a function"),
        (lambda: Foreign(nn.Dropout(0.1), p=0.2), TypeError, "no arguments"),
        (lambda: Foreign(nn.Dropout, p=0.1, at="nowhere"), ValueError, "at must be"),
        (lambda: Foreign(torch.square, layout="NHWC"), ValueError, "layout='NHWC' has no effect"),
        (lambda: Foreign(nn.Dropout, layout="NHWC"), ValueError, "layout='NHWC' has no effect"),
        *[
            (
                lambda grid=grid: Foreign(nn.Dropout2d, grid=grid),
                ValueError,
                "grid must have 2 axes",
            )
            for grid in (7, (), (7,), (1, 2, 3, 4))
        ],
    ],
)
def test_refuses(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_schedule_without_an_attribute():
    class Hidden(nn.Module):
        def __init__(self, p):
            super().__init__()
            self._p = p

        def forward(self, x):
            return x

    with pytest.raises(ValueError, match="no attribute 'p'"):
        Foreign(Hidden, p=LinearSchedule(0, 1, epochs=3))


def test_a_module_in_a_spec_with_parameters_is_a_problem_of_the_spec():
    with pytest.raises(SpecError, match="parameters"):
        attach(nn.Sequential(nn.Identity()), {"0": nn.Linear(2, 2)})


@pytest.mark.parametrize("peer", ["torchvision.ops", "timm.layers"])
def test_dropblock_of_the_peers(peer):
    module = pytest.importorskip(peer, reason="the peer itself")
    rate = {"torchvision.ops": "p", "timm.layers": "drop_prob"}[peer]
    ramp = LinearSchedule(0.0, 0.3, epochs=3)
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": Foreign(module.DropBlock2d, **{rate: ramp}, block_size=3)})
    x = torch.rand(64, 16, 14, 14) + 0.1
    assert torch.equal(model(x), x)
    attached.step(2)
    y = model(x)
    (site,) = attached.sites
    assert site.rate == pytest.approx(0.3)
    assert site.realized_rate == pytest.approx((y == 0).float().mean().item(), abs=0.3)
    assert model.eval()(x) is x
    attached.remove()
    zero = Foreign(module.DropBlock2d, **{rate: 0.0}, block_size=3)
    attached = attach(model.train(), {"0": [DropBlock2d(0.3, 3), zero]})
    model(x)
    assert attached.sites[1].realized_rate == 0.0, "zeros of others are not counted"


@pytest.mark.parametrize("result", [None, (X, X), X[0]], ids=["None", "tuple", "shape"])
def test_what_returns_no_tensor_of_the_same_shape_is_told(result):
    class Wrong(nn.Module):
        def forward(self, x):
            return result

    for target in (Wrong(), Wrong, Wrong().forward):
        model = nn.Sequential(nn.Identity())
        attach(model, {"0": Foreign(target)})
        with pytest.raises(SiteError, match="apply must return|must keep the shape"):
            model(X)
