"""Peers' layers, modules and functions in the place of a regularizer."""

import copy
import io

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    DropBlock2d,
    Foreign,
    LinearSchedule,
    SiteError,
    SpecError,
    attach,
    attachments,
)

X = torch.ones(8, 4, 12, 12)


def test_a_class_has_an_instance_per_site_and_a_schedule():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    spec = {"*": Foreign(nn.Dropout2d, p=LinearSchedule(0.0, 1.0, epochs=3))}
    attached = attach(model, spec)
    first, second = (site.bound.module for site in attached.sites)
    assert first is not second
    assert torch.equal(model(X), X)
    attached.step(2)
    assert (first.p, attached.sites[0].rate) == (0.0, 1.0)
    assert (model(X) == 0).all()
    assert first.p == 1.0
    assert [site.realized_rate for site in attached.sites] == [1.0, 0.0]
    assert list(model.children()) == [model[0], model[1]]
    assert [site.key for site in attached.sites] == ["0/Foreign(Dropout2d)", "1/Foreign(Dropout2d)"]


def test_it_follows_the_mode_of_its_layer():
    class Mode(nn.Module):
        def forward(self, x):
            return x + (1 if self.training else 2)

    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": Mode()})
    assert (model(X) == 2).all()
    assert (model.eval()(X) == 3).all()
    assert (model.train()(X) == 2).all()
    assert (attached.sites[0].calls, attached.sites[0].active_calls) == (3, 2)
    attached.remove()
    attach(model, {"0": Foreign(Mode, active="always")})
    assert (model.eval()(X) == 2).all()


def test_a_bare_module_is_copied_and_a_function_taken_as_it_is():
    drop = nn.Dropout(1.0)
    seen = []
    model = nn.Sequential(nn.Identity(), nn.Identity())
    attached = attach(model, {"0": drop, "1": lambda x: seen.append(1) or x + 1})
    assert (model(X) == 1).all()
    assert attached.sites[0].bound.module is not drop
    assert seen == [1]
    assert attached.sites[1].rate is None
    assert (model.eval()(X) == 1).all()
    assert seen == [1], "a function is on in training only"


def test_an_in_place_module_is_counted():
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": Foreign(nn.Dropout, p=1.0, inplace=True)})
    model(X.clone())
    assert attached.sites[0].realized_rate == 1.0


def test_two_functions_are_two_classes():
    model = nn.Sequential(nn.Identity())
    attach(
        model, [("0", lambda x: x + 1), ("0", lambda x: x * 2), ("0", Foreign(nn.Dropout, p=0.1))]
    )
    with pytest.raises(SpecError, match="live"):
        attach(model, {"0": Foreign(nn.Dropout, p=0.2)})


def test_buffers_follow_the_device_and_numbers_can_be_set():
    class Shift(nn.Module):
        def __init__(self, by=1.0, times=2):
            super().__init__()
            self.by, self.times = by, times
            self.register_buffer("one", torch.ones(()))

        def forward(self, x):
            return x + self.one * self.by * self.times

    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": Foreign(Shift, times=3)})
    assert (model(X) == 4).all()
    attached.set("0", times=1)
    assert (model(X) == 2).all()
    with pytest.raises(ValueError, match="no argument 'by'"):
        attached.set("0", by=3.0)
    assert model(torch.ones(2, device="meta")).device.type == "meta"


def test_copies_have_their_own():
    model = nn.Sequential(nn.Identity())
    attach(model, {"0": Foreign(nn.Dropout, p=LinearSchedule(0.0, 1.0, epochs=2))})
    other = copy.deepcopy(model)
    attachments(other)[0].step(1)
    assert (other(X) == 0).all()
    assert (model(X) == 1).all()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: Foreign(nn.Linear, in_features=2, out_features=2),
            ValueError,
            "parameters.*weight",
        ),
        (lambda: Foreign(nn.BatchNorm2d(3)), ValueError, "parameters"),
        (lambda: Foreign(nn.Dropout, q=0.1), TypeError, "argument 'q'"),
        (lambda: Foreign(nn.Dropout, p=1.5), ValueError, "1.5"),
        (lambda: Foreign(dict), TypeError, "nn.Module"),
        (lambda: Foreign(3), TypeError, "got 3"),
        (lambda: Foreign(nn.Dropout(0.1), p=0.2), TypeError, "no arguments"),
        (lambda: Foreign(nn.Dropout, p=0.1, at="nowhere"), ValueError, "at must be"),
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


def test_repr_and_equality():
    a = Foreign(nn.Dropout, p=0.1, inplace=True, active="always")
    assert repr(a) == "Foreign(Dropout, p=0.1, inplace=True, active='always')"
    assert a == Foreign(nn.Dropout, p=0.1, inplace=True, active="always")
    assert hash(a) != hash(Foreign(nn.Dropout, p=0.2))


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


class Running(nn.Module):
    """Keeps statistics of several kinds, one of them in a child, one not before the first call."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.register_buffer("peak", None)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        if self.training:
            self.scratch += 1
            self.peak = x.detach().amax() if self.peak is None else self.peak.max(x.detach().amax())
        return self.norm(x) + self.scratch.sum() + (0 if self.peak is None else self.peak)


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [by_torch_save, copy.deepcopy])
def test_statistics_that_a_module_gathers_are_kept_in_copies_but_not_in_the_state(copied):
    model = nn.Sequential(nn.Identity())
    norm = Foreign(nn.InstanceNorm2d, num_features=4, momentum=0.1, track_running_stats=True)
    attached = attach(model, {"0": [norm, Running()]})
    x = torch.randn(8, 4, 3, 3) * 2 + 3
    fresh = model.eval()(x)
    for _ in range(3):
        model.train()(x)
    told = model.eval()(x)
    assert not torch.equal(fresh, told)
    again = copied(model).eval()
    torch.testing.assert_close(again(x), told)
    torch.testing.assert_close(again.train()(x), model.train()(x))
    state = attached.state_dict()
    assert "buffers" not in state["sites"]["0/Foreign(Running)"]
    attached.load_state_dict(state)
    assert attached.state_dict() == state


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("result", [None, (X, X), X[0]], ids=["None", "tuple", "shape"])
def test_what_returns_no_tensor_of_the_same_shape_is_told(result, training):
    class Wrong(nn.Module):
        def forward(self, x):
            return result

    for target in (Wrong(), Wrong, Wrong().forward):
        model = nn.Sequential(nn.Identity()).train(training)
        attach(model, {"0": Foreign(target, active="always")})
        with pytest.raises(SiteError, match="apply must return|must keep the shape"):
            model(X)
