"""Pictures of what observers have seen, layer by layer."""

import pytest
import torch
from torch import nn

from dropblock_hooks import ActivationStats, ClipGradNorm, GradientStats, attach
from dropblock_hooks.plots import plot_activations, plot_gradient_flow

pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")


def trained(spec):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2))
    attached = attach(model, spec)
    for _ in range(3):
        model(torch.randn(16, 6)).square().mean().backward()
    return attached


def names(ax):
    return [label.get_text() for label in ax.get_xticklabels()]


def line(ax, label):
    (found,) = [each for each in ax.get_lines() if each.get_label() == label]
    return found.get_ydata().tolist()


def test_gradients_stand_in_the_order_of_the_model_with_their_bounds():
    attached = trained({"3": ClipGradNorm(0.5), "2": GradientStats(), "0": GradientStats()})
    figure = plot_gradient_flow(attached)
    figure.draw_without_rendering()
    (ax,) = figure.axes
    assert names(ax) == ["0", "2", "3"]
    rows = {row.site: row for row in attached.report()}
    norms = [rows[f"{i}/GradientStats"].observed.norm for i in (0, 2)]
    assert line(ax, "norm, mean") == norms
    assert line(ax, "bound") == [0.5]
    assert line(ax, "their mean") == [rows["3/ClipGradNorm"].mean_norm]
    assert ax.get_yscale() == "log"


def test_a_layer_that_is_gone_comes_last():
    attached = trained({"*": GradientStats()})
    model = attached._base
    del model[3]
    figure = plot_gradient_flow(attached)
    assert names(figure.axes[0]) == ["0", "1", "2", "3"]
    sites = attached.select(GradientStats)
    assert [site.name for site in sites] == ["0", "1", "2", "3"]


def test_gradients_that_are_all_zero_can_be_drawn():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    attached = attach(model, {"*": GradientStats()})
    model(torch.ones(1, 2)).mul(0).sum().backward()
    figure = plot_gradient_flow(attached)
    figure.draw_without_rendering()
    (zero,) = [each for each in figure.axes[0].get_lines() if each.get_label() == "0"]
    assert zero.get_xdata().tolist() == [0, 1]


def test_a_column_of_activations_is_the_share_of_each_size():
    attached = trained({"*": ActivationStats(every=1, low=2**-6, high=4.0)})
    figure = plot_activations(attached)
    figure.draw_without_rendering()
    ax, bar = figure.axes
    (mesh,) = ax.collections
    shares = torch.as_tensor(mesh.get_array()).reshape(8, 4)
    assert torch.allclose(shares.sum(0), torch.ones(4, dtype=shares.dtype), atol=0.1)
    histogram = attached.report()[0].observed.histogram
    assert shares[:, 0].tolist() == [n / sum(histogram) for n in histogram[1:-1]]
    assert bar.get_ylabel() == "share of the values that are not 0"
    zeros = attached.report()[1].observed.zeros
    assert names(ax)[1] == f"1  {zeros:.0%}"
    assert zeros > 0.2


@pytest.mark.parametrize("plot", [plot_activations, plot_gradient_flow])
def test_nothing_seen(plot):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="nothing to draw.*attach (Act|Grad).*Stats"):
        plot(attach(model, {"0": [ActivationStats(), GradientStats()]}))


@pytest.mark.parametrize("plot", [plot_gradient_flow, plot_activations])
def test_layers_with_nan_are_marked_and_long_names_are_told_apart(plot):
    model = nn.Sequential()
    model.add_module("encoder_of_the_first_stage", nn.Sequential(*(nn.Linear(2, 2) for _ in "ab")))
    with torch.no_grad():
        model[0][1].bias.fill_(torch.nan)
    attached = attach(model, {"**.*": [GradientStats(), ActivationStats()]}, root="")
    model(torch.ones(1, 2)).square().sum().backward()
    figure = plot(attached)
    figure.draw_without_rendering()
    (ax, *_) = figure.axes
    (mark,) = [each for each in ax.get_lines() if each.get_label() == "NaN or Inf"]
    assert 2 in mark.get_xdata()
    assert len(set(names(ax))) == 3
