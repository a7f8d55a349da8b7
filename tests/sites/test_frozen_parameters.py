"""Parameters that are frozen when something is attached, and unfrozen later."""

from functools import cache

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ClipGradNorm,
    GradientStats,
    HookWarning,
    Retune,
    Select,
    ZeroGrad,
    attach,
    plan,
)
from tests.cases import rest_slow

X = torch.linspace(-1, 1, 64).reshape(8, 8)
GROUP = {"param:**": ClipGradNorm(0.1, group=True)}


def model_with(*frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    for i in frozen:
        model[i].requires_grad_(False)
    return model


def update(model, optimizer):
    optimizer.zero_grad()
    (100 * model(X).square().mean()).backward()
    optimizer.step()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def update_of_torch(model, optimizer):
    optimizer.zero_grad()
    (100 * model(X).square().mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("frozen", [(), (0,), (4,), (0, 2)], ids=str)
def test_a_group_is_clipped_as_torch_clips_it_while_it_is_unfrozen_layer_by_layer(frozen):
    ours, theirs = model_with(*frozen), model_with(*frozen)
    optimizer = torch.optim.SGD(ours.parameters(), 0.01)
    other = torch.optim.SGD(theirs.parameters(), 0.01)
    attached = attach(ours, GROUP, optimizer=optimizer)
    attached.step(0)
    for epoch, layer in enumerate([*frozen, *frozen[:1]], start=1):
        assert_same(update(ours, optimizer), update_of_torch(theirs, other))
        assert attached.verify() == []
        ours[layer].requires_grad_(True)
        theirs[layer].requires_grad_(True)
        attached.step(epoch)
    assert_same(update(ours, optimizer), update_of_torch(theirs, other))
    assert attached.verify() == []
    assert all(site.active_calls for site in attached.sites)


@cache
def unfreezing_is_compiled():
    """Whether torch compiles a model again after one of its parameters was unfrozen."""
    model = model_with(0)
    forward = torch.compile(model, backend="aot_eager")
    forward(X).sum().backward()
    model.requires_grad_(True)
    forward(X).sum().backward()
    torch._dynamo.reset()
    return model[0].weight.grad is not None


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("stepped", rest_slow([True, False]), ids=["stepped", "not stepped"])
def test_a_parameter_that_is_unfrozen_is_regularized(mode, stepped):
    torch._dynamo.reset()
    if mode == "compiled" and not unfreezing_is_compiled():
        pytest.skip(
            "this torch leaves unfrozen parameters without a gradient, also in a bare model"
        )
    model = model_with(0)
    attached = attach(model, {"param:**": ZeroGrad()})
    forward = model if mode == "eager" else torch.compile(model, backend="aot_eager")
    attached.step(0)
    forward(X).sum().backward()
    assert attached.verify() == []
    model[0].requires_grad_(True)
    if stepped or mode == "compiled":  # compiled code calls no Python, so step has to look
        attached.step(1)
    forward(X).sum().backward()
    assert all(not p.grad.any() for p in model.parameters())
    assert attached.verify() == []


def test_tables_name_the_frozen_parameters():
    model = model_with(0)
    planned = plan(model, GROUP, X)
    assert [row.site.partition("/")[0] for row in planned if row.frozen] == ["0.weight", "0.bias"]
    assert "frozen" in str(planned)
    assert planned.warnings == ()
    attached = attach(model, GROUP)
    rows = attached.report()
    assert [row.frozen for row in rows] == [True, True, False, False, False, False]
    assert "frozen" in str(rows)
    model.requires_grad_(True)
    assert "frozen" not in str(attached.report())


@pytest.mark.parametrize("name", ["param:0.*", "param:0.bias"])
def test_an_entry_of_frozen_parameters_alone_is_a_finding(name):
    model = model_with(0)
    spec = {name: ClipGradNorm(0.1), "param:[24].*": ClipGradNorm(0.1)}
    (warning,) = plan(model, spec, X).findings
    assert warning.kind == "lost"
    with pytest.warns(HookWarning, match="frozen") as caught:
        attached = attach(model, spec)
    (finding,) = caught[0].message.findings
    assert {site.partition(".")[0] for site in finding.sites} == {"0"}
    attached.step(0)
    model(X).sum().backward()
    assert [(each.kind, each.sites) for each in attached.verify()] == [("lost", finding.sites)]
    attached.step(1)  # it is told once
    model[0].requires_grad_(True)
    model(X).sum().backward()
    assert attached.verify() == []


def test_statistics_of_gradients_skip_frozen_parameters():
    model = model_with(0)
    attached = attach(model, {"param:**": GradientStats()})
    model(X).sum().backward()
    assert attached.verify() == []
    assert [site.active_calls for site in attached.sites] == [0, 0, 1, 1, 1, 1]


def test_where_gets_the_parameter():
    model = model_with(0)
    spec = {Select("param:**", where=lambda name, p: p.requires_grad and p.ndim > 1): ZeroGrad()}
    assert [site.name for site in attach(model, spec)] == ["2.weight", "4.weight"]


def test_types_with_parameters_and_attributes_are_those_of_the_layer_that_holds_them():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.AlphaDropout(0.1))
    spec = {
        Select("param:**", types="LayerNorm"): ZeroGrad(),
        Select("attr:**", types="AlphaDropout"): Retune(0.2),
    }
    assert [site.name for site in attach(model, spec)] == ["1.weight", "1.bias", "3.p"]
