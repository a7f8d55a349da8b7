"""The GradScaler of the training loop: found in what wraps it, and reported where it is missing."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from dropblock_hooks import (
    ClampGrad,
    ClipGradNorm,
    Dropout,
    ScaleGrad,
    attach,
    attachments,
)
from tests.told import ids

X = torch.randn(4, 6)


def make(spec, **options):
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
    return model, attach(model, spec, **options)


def forward(model, dtype=torch.float16):
    with torch.autocast("cpu", dtype):
        return model(X)


def backward(model, scaler):
    scaler.scale(model(X).square().sum()).backward()


def warnings_of(action):
    """The texts of the warnings of scalers that it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught if "GradScaler" in str(w.message)]


@pytest.mark.parametrize(
    ("selector", "regularizer"),
    [("2", ClampGrad(-1, 1)), ("param:0.weight", ClipGradNorm(1.0, per="channel"))],
)
def test_one_that_was_not_given_is_told_once(regularizer, selector):
    model, attached = make({selector: regularizer})
    (text,) = warnings_of(lambda: forward(model))
    assert "attach(..., grad_scaler=scaler)" in text
    attached.step(1)
    assert warnings_of(lambda: forward(model)) == []
    assert (".", "grad_scaler") in ids(attached.verify())

    attached.grad_scaler = GradScaler("cpu")
    assert (".", "grad_scaler") not in ids(attached.verify())


def test_an_autocast_inside_the_model_is_seen():
    class Autocast(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", torch.float16):
                return super().forward(x)

    model = Autocast(nn.Linear(6, 3))
    attach(model, {"param:0.weight": ClampGrad(-1, 1)})
    assert len(warnings_of(lambda: model(X))) == 1


@pytest.mark.parametrize(
    "case",
    ["given", "not scaled", "no autocast", "bfloat16", "no bound", "accumulated", "evaluation"],
)
def test_silent_where_all_is_well(case):
    spec = {"2": ClampGrad(-1, 1), "param:0.weight": ClipGradNorm(1.0)}
    if case == "no bound":
        spec = {"2": ScaleGrad(0.5), "0": Dropout(0.1)}
    if case == "accumulated":  # GradScaler.step unscales these before
        spec = {"param:0.weight": ClipGradNorm(1.0, when="accumulated")}
    scalers = {"given": GradScaler("cpu"), "not scaled": False}
    model, attached = make(spec, grad_scaler=scalers.get(case))
    if case == "evaluation":
        model.eval()
    dtypes = {"no autocast": torch.float32, "bfloat16": torch.bfloat16}
    dtype = dtypes.get(case, torch.float16)

    def train():
        for step in range(3):
            with torch.autocast("cpu", dtype, enabled=case != "no autocast"):
                model(X)
            attached.step(step + 1)

    assert warnings_of(train) == []
    assert "grad_scaler" not in [finding.kind for finding in attached.verify()]


@pytest.mark.parametrize(
    "copied",
    [lambda model: model, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["itself", "pickle"],
)
def test_silent_where_it_was_ruled_out(copied):
    model = copied(make({"2": ClampGrad(-1, 1)}, grad_scaler=False)[0])
    (attached,) = attachments(model)
    assert warnings_of(lambda: forward(model)) == []
    assert attached.grad_scaler is False
    attached.step(1)

    attached.grad_scaler = None  # nothing is said
    assert len(warnings_of(lambda: forward(model))) == 1
    assert "grad_scaler" in [finding.kind for finding in attached.verify()]


class Holder:
    def __init__(self, **held):
        vars(self).update(held)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda scaler: scaler,
        lambda scaler: Holder(_scaler=scaler),
        lambda scaler: Holder(scaler=scaler),
        lambda scaler: Holder(grad_scaler=scaler),
        lambda scaler: Holder(_precision=Holder(scaler=scaler)),
        lambda scaler: Holder(precision_plugin=Holder(scaler=scaler)),
        lambda scaler: Holder(accelerator=Holder(scaler=scaler)),
    ],
    ids=["itself", "timm", "plugin", "named", "fabric", "trainer", "transformers"],
)
def test_what_wraps_one_is_looked_through(wrap):
    scaler = GradScaler("cpu", init_scale=1024.0)
    wrapper = wrap(scaler)
    spec = {"param:0.weight": ClampGrad(-1e-3, 1e-3)}
    assert make(spec, grad_scaler=wrapper)[1].grad_scaler is scaler
    model, attached = make(spec)
    attached.grad_scaler = wrapper
    assert attached.grad_scaler is scaler
    backward(model, scaler)
    assert model[0].weight.grad.abs().max() == pytest.approx(1.024)
    assert attachments(copy.deepcopy(model))[0].grad_scaler is scaler


@pytest.mark.parametrize(
    "given", [object(), 65536.0, True, 0, Holder(scaler=3), Holder(scaling=1), "x"]
)
def test_what_holds_none_is_refused(given):
    _, attached = make({"2": ClampGrad(-1, 1)})
    with pytest.raises(TypeError, match=r"get_scale\(\), got .*GradScaler itself, or an object"):
        attached.grad_scaler = given
    with pytest.raises(TypeError, match="get_scale"):
        attach(nn.Linear(2, 2), {".": ClampGrad(-1, 1)}, grad_scaler=given)
