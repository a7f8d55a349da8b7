"""The GradScaler of the training loop: looked for in what wraps it, told where it is missing."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

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


SCALERS = {
    "amp": lambda: GradScaler("cpu"),
    "sharded": lambda: ShardedGradScaler("cpu"),
}


def make(spec, **options):
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
    return model, attach(model, spec, **options)


def backward(model, scaler=None):
    loss = model(X).square().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


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
@pytest.mark.parametrize("kind", SCALERS)
def test_one_that_was_not_given_is_told_once(kind, regularizer, selector):
    model, attached = make({selector: regularizer})
    scaler = SCALERS[kind]()  # as in timm's train.py, after the model
    assert warnings_of(lambda: model(X)) == []
    (text,) = warnings_of(lambda: backward(model, scaler))
    assert "attach(..., grad_scaler=scaler)" in text
    assert warnings_of(lambda: backward(model, scaler)) == []
    assert ids(attached.verify()) == [(".", "grad_scaler")]
    attached.grad_scaler = scaler
    assert attached.verify() == []
    assert warnings_of(lambda: attached.step(1)) == []


@pytest.mark.parametrize(
    "case",
    ["given", "disabled", "unused", "gone", "no bound", "evaluation", "removed", "none", "other's"],
)
def test_silent_where_all_is_well(case):
    spec = {"2": ClampGrad(-1, 1), "param:0.weight": ClipGradNorm(1.0)}
    if case == "no bound":
        spec = {"2": ScaleGrad(0.5), "0": Dropout(0.1)}
    model, attached = make(spec)
    scaler = None if case == "none" else GradScaler("cpu", enabled=case != "disabled")
    if case == "given":
        attached.grad_scaler = scaler
    elif case == "gone":
        backward(nn.Linear(6, 3), scaler)
        scaler = None
    elif case == "other's":
        other = make({"2": ClampGrad(-1, 1)}, grad_scaler=scaler)
        backward(other[0], scaler)
    elif case == "evaluation":
        model.eval()
    elif case == "removed":
        attached.remove()

    def train():
        for step in range(3):
            backward(model, None if case in ("unused", "other's") else scaler)
            attached.step(step + 1)
        attached.report()

    assert warnings_of(train) == []
    assert "grad_scaler" not in [finding.kind for finding in attached.verify()]


@pytest.mark.parametrize(
    "copied",
    [lambda model: model, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["itself", "pickle"],
)
def test_silent_where_it_was_ruled_out(copied):
    scaler = GradScaler("cpu")
    backward(nn.Linear(6, 3), scaler)  # another model's
    model = copied(make({"2": ClampGrad(-1, 1)}, grad_scaler=False)[0])
    (attached,) = attachments(model)
    assert warnings_of(lambda: backward(model)) == []
    assert attached.grad_scaler is False
    assert attached.verify() == []
    attached.grad_scaler = None  # nothing is said
    assert len(warnings_of(lambda: backward(model))) == 1
    assert [finding.kind for finding in attached.verify()] == ["grad_scaler"]


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
