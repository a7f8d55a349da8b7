"""WeightStats: what parameters are now, and how far they have moved in the epoch."""

import numpy as np
import pytest
import torch
from torch import nn

from dropblock_hooks import WeightStats, attach


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 40, 5), nn.BatchNorm2d(40), nn.Flatten())


def values(*parameters):
    return np.concatenate([p.detach().double().numpy().ravel() for p in parameters])


def of(attached):
    return [row.observed for row in attached.report()]


def test_of_a_layer_and_of_one_parameter_against_numpy():
    model = make()
    attached = attach(model, {"0": WeightStats(), "param:0.bias": WeightStats()})
    wanted = values(model[0].weight, model[0].bias), values(model[0].bias)
    for found, x in zip(of(attached), wanted, strict=True):
        assert found.values == x.size
        assert found.mean == pytest.approx(x.mean(), rel=1e-5)
        assert found.std == pytest.approx(x.std(), rel=1e-5)
        assert found.norm == pytest.approx(np.linalg.norm(x), rel=1e-6)
        assert found.largest == np.abs(x).max()
        assert found.zeros == found.nonfinite == 0.0


def test_they_are_read_as_they_are_now():
    model = make()
    attached = attach(model, {"0": WeightStats()})
    with torch.no_grad():
        model[0].weight.fill_(2.0)
        model[0].bias.fill_(float("nan"))
    (found,) = of(attached)
    assert (found.mean, found.left_out) == (2.0, 1)
    assert found.nonfinite == pytest.approx(40 / 3040)
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = float("inf")
    (found,) = of(attached)
    assert (found.mean, found.norm, found.left_out) == (None, None, 2)
    assert found.nonfinite == pytest.approx(41 / 3040)
    assert "0.01349" in str(attached)


def test_the_epoch_before_is_shown_until_something_has_moved():
    layer = nn.Linear(2, 2, bias=False)
    attached = attach(layer, {".": WeightStats()})

    def grow(factor):
        with torch.no_grad():
            layer.weight.mul_(factor)
        return of(attached)[0].updates["weight"]

    assert grow(2.0) == pytest.approx(1.0)
    attached.step()
    assert of(attached)[0].updates["weight"] == pytest.approx(1.0)
    assert "WeightStats, last epoch" in str(attached)
    assert grow(1.5) == pytest.approx(0.5)
    nn.init.constant_(layer.weight, float("nan"))
    assert of(attached)[0].left_out == 1


def test_norms_and_updates_of_weight_and_bias_since_the_epoch_began():
    model = make()
    attached = attach(model, {"0": WeightStats(), "param:0.bias": WeightStats()})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        attached.step(epoch)
        began = {name: values(p) for name, p in model[0].named_parameters()}
        for _ in range(2):
            model(torch.randn(2, 3, 6, 6)).square().sum().backward()
            optimizer.step()
        whole, bias = of(attached)
        for name, p in model[0].named_parameters():
            norm = np.linalg.norm
            update = norm(values(p) - began[name]) / norm(began[name])
            assert whole.norms[name] == pytest.approx(norm(values(p)), rel=1e-6)
            assert whole.updates[name] == pytest.approx(update, rel=1e-4)
        assert bias.updates == {"bias": whole.updates["bias"]}
    assert attached.scalars()["reg/0/WeightStats/update/weight"] == whole.updates["weight"]
    text = attached.report().to_text(width=200, wide=True)
    assert f"weight {whole.updates['weight']:.2g}" in text
    attached.step(2)
    assert of(attached)[0].updates == whole.updates  # nothing yet: of the epoch before


def test_of_a_module_without_own_parameters_those_inside_are_read():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False)))
    (row,) = attach(model, {"0": WeightStats()}).report()
    assert list(row.observed.norms) == ["0.weight", "0.bias", "2.weight"]
    assert row.observed.values == 12


def test_the_layer_need_not_be_called():
    attention = nn.MultiheadAttention(4, 2)  # takes the weight of its projection
    attached = attach(attention, {"out_proj": WeightStats()})
    x = torch.ones(2, 1, 4)
    for _ in range(2):
        attention(x, x, x)[0].sum().backward()
        assert attached.verify() == []
        attached.step()  # no warning
    assert of(attached)[0].values == 20


def test_a_norm_that_does_not_fit_into_the_dtype_of_the_weights():
    layer = nn.Linear(300, 300, bias=False, dtype=torch.float16)
    nn.init.constant_(layer.weight, 300.0)
    attached = attach(layer, {".": WeightStats()})
    with torch.no_grad():
        layer.weight.mul_(0.5)
    (found,) = of(attached)
    assert found.norms["weight"] == pytest.approx(150.0 * 300)
    assert found.updates["weight"] == pytest.approx(0.5)


def on_meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))


def materialize(model):
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device="cpu")
        for layer in model:
            layer.reset_parameters()


@pytest.mark.parametrize("make_empty", [on_meta, lazy])
def test_parameters_that_have_no_numbers_when_it_is_attached(make_empty):
    torch.manual_seed(0)
    model = make_empty()
    attached = attach(model, {"*": WeightStats()})
    materialize(model)
    model(torch.zeros(5, 3))
    began = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    updates = [update for found in of(attached) for update in found.updates.values()]
    assert len(updates) == len(began) == 4
    assert updates == pytest.approx([0.5] * 4)
