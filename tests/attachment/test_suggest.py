"""Bounds that are proposed: set, they change the wanted share of the same data."""

import re

import pytest
import torch
from torch import nn

from dropblock_hooks import ClampGrad, ClipGradNorm, Dropout, ScaleGrad, Select, attach

ERROR = 2 ** (1 / 8) - 1  # a bin of the norms is a quarter of an octave


def make(spec):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3))
    return model, attach(model, spec)


def train(model, times=20):
    torch.manual_seed(1)
    for _ in range(times):
        (model(torch.randn(4, 2, 9, 9)) * torch.randn(4, 1, 1, 1).exp()).square().sum().backward()


def shares_beyond(spec, bound):
    """The least and the largest share that a bound within the error of this one changes."""
    found = []
    for factor in (1 + ERROR + 1e-3, 1 / (1 + ERROR + 1e-3)):
        model, attached = make(spec(bound * factor))
        train(model)
        found.append(attached.sites[0].realized_rate)
    return found


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("max_norm", lambda b: {"2": ClipGradNorm(b, per="sample")}),
        ("max_norm", lambda b: {"0": ClipGradNorm(b, per="channel")}),
        ("max_norm", lambda b: {"param:0.weight": ClipGradNorm(b)}),
    ],
)
@pytest.mark.parametrize("now", [1e-3, 1e3])
def test_it_changes_the_wanted_share(name, spec, now):
    """Whatever the bound of now has changed."""
    model, attached = make(spec(now))
    train(model)
    suggested = attached.suggest(0.3)
    proposed = {row.field: row.proposed for row in suggested}
    (line,) = [line for line in str(suggested).splitlines() if line.startswith("attached.set(")]
    exec(line, {"attached": attached})  # what it prints can be pasted
    (site,) = attached.sites
    assert attached.rates[site.key] == proposed
    assert site.realized_rate is None
    train(model)
    least, most = shares_beyond(spec, proposed[name])
    assert least <= site.realized_rate <= most
    assert least - 1e-9 <= 0.3 <= most + 0.05 * (site.norms.count < 30)  # of few, no exact share


@pytest.mark.parametrize("spec", [ClampGrad(-1.0, 1.0), ClampGrad(max=1.0)], ids=str)
def test_for_a_clamp_it_is_the_share_of_gradients_with_a_value_beyond(spec):
    """Of 100 gradients whose largest magnitudes are 1 to 100."""
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": spec})
    for magnitude in range(1, 101):
        x = torch.zeros(2, requires_grad=True)
        model(x).backward(torch.tensor([0.5, 1.0]) * magnitude)
    row = next(row for row in attached.suggest(0.3) if row.field == "max")
    assert (row.seen, row.proposed) == (100, pytest.approx(70, rel=ERROR))


def test_both_bounds_of_a_clamp_are_symmetric_and_others_are_left_out():
    spec = {"0": [Dropout(0.1), ClampGrad(-1.0, 2.0)], "2": ClampGrad(min=-1.0)}
    model, attached = make(spec)
    train(model)
    low, high, only = attached.suggest()
    assert (low.site, low.field, high.field) == ("0/ClampGrad", "min", "max")
    assert (low.bound, high.bound) == (-1.0, 2.0)
    assert low.proposed == -high.proposed < 0
    assert low.call == high.call
    assert (only.site, only.field) == ("2/ClampGrad", "min")
    assert only.proposed < 0
    assert low.changed == attached.sites[1].realized_rate
    assert [row.site for row in attached.suggest(which="2")] == ["2/ClampGrad"]
    assert len(attached.suggest(which=ClampGrad)) == 3
    assert "would have clipped 10 % of the measured gradients" in str(attached.suggest())
    assert "attached.set(" in attached.suggest()._repr_html_()


def test_where_nothing_was_seen():
    model, attached = make({"2": ClipGradNorm(1.0)})
    (row,) = attached.suggest()
    assert (row.proposed, row.seen, row.call) == (None, 0, "")
    nothing = "# 2/ClipGradNorm: no gradient with a finite norm was seen yet"
    assert nothing in str(attached.suggest())
    (model(torch.ones(1, 2, 9, 9)) * torch.inf).sum().backward()
    assert nothing in str(attached.suggest())
    (model(torch.ones(1, 2, 9, 9)) * 0).sum().backward()
    (row,) = attached.suggest()
    assert row.proposed is None
    assert "0.9 of the norms are 0" in row.reason


def test_what_can_not_be_answered():
    _, attached = make({"2": [ClipGradNorm(1.0), Dropout(0.1)], "0": Dropout(0.1)})
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match=re.escape(f"share must be in (0, 1), got {share:g}")):
            attached.suggest(share)
    with pytest.raises(ValueError, match="nothing to suggest.*ClipGradNorm"):
        attached.suggest(which="0")
    with pytest.raises(KeyError, match="no site is 'three'"):
        attached.suggest(which="three")
    attached.remove()
    with pytest.raises(RuntimeError, match="was removed, so nothing acts"):
        attached.suggest()


@pytest.mark.parametrize(
    ("spec", "which"),
    [
        ({"param:**": ClipGradNorm(1e6, group=True)}, "'param:**'"),
        ({Select("param:**"): ClipGradNorm(1e6, group=True)}, "Select(names='param:**')"),
        ({"param:**": [ClipGradNorm(1e6, group=True), ScaleGrad(0.5)]}, "ClipGradNorm"),
    ],
    ids=["selector", "Select", "class"],
)
def test_the_call_for_a_group_sets_the_bound_of_all_its_sites(spec, which):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    attached = attach(model, spec, optimizer=optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        train(model, times=1)
        optimizer.step()
    suggested = attached.suggest(0.3)
    (call,) = {row.call for row in suggested}
    assert call == f"attached.set({which}, max_norm={suggested[0].proposed})"
    (line,) = [line for line in str(suggested).splitlines() if "max_norm  " in line]
    assert line.startswith("4 sites ")
    exec(call)
    bounds = [rates["max_norm"] for rates in attached.rates.values() if "max_norm" in rates]
    assert bounds == [suggested[0].proposed] * 4
