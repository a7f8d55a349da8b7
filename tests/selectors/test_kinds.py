"""Kinds of targets: a new one is an entry of `KINDS`, a class of hooks and a line of `HOOKS`."""

import pytest
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    Dropout,
    DropPath,
    GradientStats,
    Observer,
    ScaleGrad,
    SpecError,
    Watchdog,
    attach,
    plan,
    register,
)
from dropblock_hooks.attachment.place import HOOKS
from dropblock_hooks.selectors.kinds import KINDS, LAYER, TargetKind
from dropblock_hooks.sites.hooks import ObserveHook, SiteHook


class BufferHook(SiteHook):
    """Multiplies a buffer by 1 - p while the site is on the model."""

    takes = Dropout

    def install(self, module):
        super().install(module)
        setattr(module, self.local, getattr(module, self.local) * (1 - self.site.rate))

    def _act(self, module, *given):
        return None


@pytest.fixture
def buffers(monkeypatch):
    kind = TargetKind(
        "buffer",
        "buffer",
        lambda module: dict(module.named_buffers(recurse=False)),
        no_options=("at",),
        hint="a buffer is a tensor that register_buffer made",
    )
    monkeypatch.setitem(KINDS, "buffer", kind)
    monkeypatch.setitem(HOOKS, kind, (BufferHook,))
    return kind


def norm():
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_a_new_kind_is_selected_placed_and_reported(buffers):
    model = norm()
    with attach(model, {"buffer:*.running_var": Dropout(0.5)}) as attached:
        (site,) = attached.sites
        assert (site.key, site.at) == ("0.running_var/Dropout", "buffer")
        assert model[0].running_var.tolist() == [0.5] * 3
        assert attached.select("buffer:**") == attached.sites
        assert "0.running_var/Dropout" in str(attached)


def test_values_that_are_no_parameters_are_not_frozen_and_have_no_axes_of_a_parameter(buffers):
    spec = {"buffer:*.running_var": Dropout(0.5)}
    (planned,) = plan(norm(), spec)
    assert not planned.frozen
    (site,) = attach(norm(), spec)
    assert site.layout != "parameter"
    frozen = norm().requires_grad_(False)
    (planned,) = plan(frozen, {"param:1.bias": ScaleGrad(2.0)})
    assert planned.frozen


@pytest.mark.parametrize(
    ("selector", "regularizer", "reason"),
    [
        ("buffer:none", Dropout(0.5), "matches nothing: a buffer is a tensor that"),
        ("buffer:*.running_var", ScaleGrad(2.0), "running_var: a buffer takes only Dropout$"),
        ("buffer:*.running_var", Dropout(0.5, at="input"), "at= means nothing for a buffer"),
    ],
)
def test_a_new_kind_has_the_errors_of_all_kinds(buffers, selector, regularizer, reason):
    with pytest.raises(SpecError, match=reason):
        attach(norm(), {selector: regularizer})


@register
class LargestBuffer(Observer):
    """Reads a buffer at both ends of an epoch."""

    sees_values = False

    def start(self):
        return {"largest": 0.0}

    def read_layer(self, state, module, parameter):
        state["calls"] = 1
        state["largest"] = float(getattr(module, parameter).abs().max())

    def compute(self, state):
        return {"largest": state["largest"]}


def test_observers_of_a_kind_read_the_layer(buffers, monkeypatch):
    monkeypatch.setitem(HOOKS, buffers, (ObserveHook,))
    model = norm()
    attached = attach(model, {"buffer:0.running_var": LargestBuffer()})
    model[0].running_var[1] = 4.0
    (row,) = attached.report()
    assert (row.site, row.observed) == ("0.running_var/LargestBuffer", {"largest": 4.0})


@pytest.mark.parametrize("observer", [ActivationStats(), GradientStats(), Watchdog()], ids=repr)
def test_observers_of_calls_are_refused_at_other_kinds(observer, buffers, monkeypatch):
    monkeypatch.setitem(HOOKS, buffers, (ObserveHook,))
    with pytest.raises(SpecError, match="calls of the layer, and a buffer has none"):
        attach(norm(), {"buffer:*.running_var": observer})


def test_all_hooks_of_a_kind_are_named(buffers, monkeypatch):
    class OtherHook(BufferHook):
        takes = DropPath

    monkeypatch.setitem(HOOKS, buffers, (OtherHook, BufferHook))
    with pytest.raises(SpecError, match="a buffer takes only DropPath or Dropout$"):
        attach(norm(), {"buffer:*.running_var": ScaleGrad(2.0)})


def test_each_kind_has_hooks():
    assert set(HOOKS) == set(KINDS.values())
    assert [kind for kind in KINDS.values() if kind.is_layer] == [LAYER]
