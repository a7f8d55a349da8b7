"""What an observer sees, where it stands among what acts, and what it leaves."""

import copy
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    Capture,
    GradientStats,
    Observer,
    Regularizer,
    ScaleGrad,
    SiteError,
    attach,
    register,
)
from tests.cases import rest_slow


@register
class Twice(Regularizer):
    """Doubles the activation."""

    random: ClassVar[bool] = False

    def apply(self, x, now):
        return x * 2, x.numel()


@register
class Sums(Observer):
    """Sums values and gradients, and counts both."""

    sees_gradients: ClassVar[bool] = True

    def start(self):
        return {"sums": torch.zeros(4, dtype=torch.float64)}

    def update(self, state, seen):
        first = 2 if seen.gradient else 0
        for x in seen.tensors:
            state["sums"][first].add_(x.sum(dtype=torch.float64))
        state["sums"][first + 1].add_(1)

    def compute(self, state):
        names = ("value", "values", "gradient", "gradients")
        return dict(zip(names, state["sums"].tolist(), strict=True))


@register
class GradientSums(Sums):
    """The same of gradients alone."""

    acts_on: ClassVar[Any] = "gradient"
    sees_values: ClassVar[bool] = False


@register
class LargestNumber(Observer):
    """The largest number in the parameters of the layer, read for each report."""

    acts_on: ClassVar[Any] = "gradient"  # for `param:` selectors
    sees_values: ClassVar[bool] = False
    reads_parameters: ClassVar[bool] = True

    def read_layer(self, state, module, parameter):
        tensors = [getattr(module, parameter)] if parameter else [*module.parameters()]
        state["largest"] = max(float(x.detach().max()) for x in tensors)
        state["calls"] = 1

    def compute(self, state):
        return {"largest": state["largest"]}


def sums(attached, which=Sums):
    (site,) = [site for site in attached if isinstance(site.regularizer, which)]
    return sums_of(attached, site)


def sums_of(attached, site):
    (row,) = [row for row in attached.report() if row.site == site.key]
    return [0.0] * 4 if row.observed is None else list(row.observed.values())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("compiled", rest_slow([False, True]))
def test_it_stands_before_or_after_what_acts_on_its_layer(when, first, compiled):
    model = nn.Sequential(nn.Linear(4, 3), nn.Identity())
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(0.5)
    acting = [Twice(), ScaleGrad(10.0)]
    listed = [Sums(when=when), *acting] if first else [*acting, Sums(when=when)]
    attached = attach(model, {"0": listed})
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x, weight = torch.ones(2, 4), torch.full((2, 3), 3.0)
    for n in (1, 2):
        (run(x) * weight).sum().backward()
        made, calls, gradient, gradients = sums(attached)
        assert made == n * 6 * (4.5 if when == "before" else 9.0)
        assert gradient == n * 6 * (60.0 if when == "before" else 30.0)  # of the value it saw
        assert calls == gradients == n
    site = attached.sites[0 if first else -1]
    assert (site.calls, site.active_calls) == (2, 2)


def test_values_and_gradients_stay_what_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten()
    )
    twin = copy.deepcopy(model)
    attached = attach(model, {"**": Sums(), "0": GradientSums(when="before")})
    x = torch.randn(4, 3, 8, 8)
    outputs = []
    for each in (model, twin):
        y = each(x.clone())
        y.square().sum().backward()
        outputs.append((y, [p.grad for p in each.parameters()]))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    assert all(
        sums_of(attached, site)[1] == 1
        for site in attached.select(Sums)
        if not isinstance(site.regularizer, GradientSums)
    )
    assert all(sums_of(attached, site)[3] == 1 for site in attached)
    attached.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_observer_without_update_reads_the_layer_for_each_report():
    model = nn.Sequential(nn.Linear(3, 2))
    attached = attach(model, {"0": LargestNumber(), "param:0.bias": LargestNumber()})
    for epoch in range(2):
        attached.step(epoch)
        model(torch.ones(1, 3)).sum().backward()
        with torch.no_grad():
            model[0].weight.fill_(epoch + 2.0)
            model[0].bias.fill_(epoch + 1.0)
        assert attached.scalars() == {
            "reg/0/LargestNumber/largest": epoch + 2.0,
            "reg/0.bias/LargestNumber/largest": epoch + 1.0,
        }
    assert attached.verify() == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_runs_again_is_not_seen_twice(reentrant):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    attached = attach(model, {"0": Sums()})
    x = torch.randn(2, 4, requires_grad=True)
    seen = []
    model[0].register_forward_hook(lambda m, a, y: seen.append(y.detach().sum().item()))
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    made, calls, _, gradients = sums(attached)
    assert (calls, gradients) == (1, 1)
    assert made == pytest.approx(seen[0], abs=1e-5)


@pytest.mark.parametrize("observer", [Sums, GradientStats, partial(Capture, gradients=True)])
def test_gradients_at_an_input_are_refused(observer):
    with pytest.raises(ValueError, match="observe the output of the layer before"):
        observer(at="input")


def test_off_in_evaluation_unless_always_and_while_paused():
    model = nn.Sequential(nn.Linear(2, 2))
    attached = attach(model, {"0": [Sums(), Sums(active="always", when="before")]})
    model.eval()(torch.ones(1, 2))
    train, always = (sums_of(attached, site)[1] for site in attached)
    assert (train, always) == (0, 1)
    model.train()
    with attached.paused():
        model(torch.ones(1, 2)).sum().backward()
    assert [sums_of(attached, site)[1] for site in attached] == [0, 1]


def test_what_gives_no_tensor_is_one_error_that_names_the_layer():
    class Text(nn.Module):
        def forward(self, x):
            return "text"

    model = nn.Sequential(Text())
    with attach(model, {"0": Sums()}), pytest.raises(SiteError, match="0/Sums on Text '0'.*str"):
        model(torch.ones(1))
