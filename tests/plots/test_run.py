"""Pictures of a training over its epochs, and of the schedules of a spec."""

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    ByDepth,
    ClipGradNorm,
    CosineSchedule,
    DropBlock2d,
    Dropout,
    DropPath,
    GaussianNoise,
    LinearSchedule,
    SpecError,
    attach,
)
from dropblock_hooks.plots import plot_run, plot_schedules

pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")


def trained(spec, epochs=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    attached = attach(model, spec, epochs=epochs)
    for epoch in range(epochs):
        attached.step(epoch)
        model(torch.randn(16, 6)).square().mean().backward()
    return attached


def lines(ax, style):
    return [
        (each.get_xdata().tolist(), each.get_ydata().tolist())
        for each in ax.get_lines()
        if each.get_linestyle() == style
    ]


def names(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("removed", [False, True])
def test_realized_and_nominal_rates_and_norms(removed):
    ramp = LinearSchedule(0.0, 0.4)
    spec = {"[13]": Dropout(p=ramp), "4": ActivationStats(), "param:0.weight": ClipGradNorm(0.1)}
    attached = trained(spec)
    if removed:
        attached.remove()
    figure = plot_run(attached)
    figure.draw_without_rendering()
    rates, norms = figure.axes
    rows = attached.history
    keys = ["1/Dropout", "3/Dropout"]
    assert names(rates) == keys
    realized = [[row.realized_rate for row in rows if row.site == key] for key in keys]
    assert lines(rates, "-") == [([0, 1, 2], values) for values in realized]
    nominal = [pytest.approx([0.0, 0.2, 0.4])] * 2
    assert [values for _, values in lines(rates, "--")] == nominal
    assert names(norms) == ["0.weight/ClipGradNorm"]
    means = [row.mean_norm for row in rows if row.mean_norm is not None]
    assert lines(norms, "-") == [([0, 1, 2], means)]
    assert lines(norms, "--") == [([0, 1, 2], [0.1] * 3)]
    assert norms.get_yscale() == "log"


def test_norms_alone_and_rates_alone():
    (ax,) = plot_run(trained({"1": Dropout(0.1)})).axes
    assert ax.get_ylabel().startswith("realized")
    (ax,) = plot_run(trained({"param:0.weight": ClipGradNorm(1.0)})).axes
    assert ax.get_ylabel().startswith("mean norm")


class Windows(nn.Module):
    """Puts two rows together, as Swin puts windows on the axis of the samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, x):
        return self.layer(x.view(-1, 4))


def test_epochs_with_findings_are_marked():
    model = Windows()
    attached = attach(model, {"layer": DropPath(0.5)})
    model(torch.ones(8, 4))
    attached.step(1)
    with pytest.warns(match="axis 0"):
        model(torch.ones(8, 8))
    (ax,) = plot_run(attached).axes
    (cross,) = [line for line in ax.get_lines() if line.get_marker() == "x"]
    assert cross.get_xdata().tolist() == [1]
    assert cross.get_ydata().tolist() == [attached.history[1].realized_rate]
    assert [row.findings for row in attached.history] == [(), ("no_batch",)]


def test_a_long_legend_is_cut():
    model = nn.Sequential(*[nn.ReLU() for _ in range(14)])
    attached = attach(model, {"*": Dropout(0.1)})
    model(torch.ones(8, 8))
    (ax,) = plot_run(attached).axes
    assert len(names(ax)) == 10
    assert ax.get_legend().get_title().get_text() == "the first 10 of 14"


def test_nothing_to_draw():
    attached = attach(nn.Sequential(nn.ReLU()), {"0": GaussianNoise(0.1)})
    with pytest.raises(RuntimeError, match="nothing to draw.*attached.step"):
        plot_run(attached)


def test_schedules_are_evaluated_over_the_epochs():
    spec = {
        "a": DropBlock2d(p=LinearSchedule(0.0, 0.2)),
        "b.*": Dropout(p=ByDepth(0.0, CosineSchedule(0.0, 0.4, epochs=5))),
        "c": [ClipGradNorm(2.0), ActivationStats()],
        "d": None,
    }
    figure = plot_schedules(spec, 11)
    figure.draw_without_rendering()
    rates, bounds = figure.axes
    assert [rates.get_ylabel(), bounds.get_ylabel()] == ["p", "max_norm"]
    assert names(rates) == ["a/DropBlock2d", "b.*/Dropout"]
    (times, linear), (_, last) = lines(rates, "-")
    assert times[0] == 0
    assert times[-1] < 11
    expected = [LinearSchedule(0.0, 0.2, epochs=11)(t) for t in times]
    assert linear == pytest.approx(expected)
    assert linear[-1] == 0.2
    assert last == pytest.approx([CosineSchedule(0.0, 0.4, epochs=5)(t) for t in times])
    (area,) = rates.collections
    heights = area.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.0, 0.4))
    assert lines(bounds, "-")[0][1] == [2.0] * len(times)


def test_a_long_training_has_a_bounded_number_of_values():
    (ax,) = plot_schedules({"a": Dropout(p=LinearSchedule(0.0, 1.0))}, 100_000).axes
    ((times, values),) = lines(ax, "-")
    assert len(times) == 2000
    assert values[-1] > 0.99


@pytest.mark.parametrize(
    ("spec", "epochs", "error", "message"),
    [
        ({"a": ActivationStats()}, 3, ValueError, "no regularizer of the spec has a rate"),
        ({"a": Dropout(0.1)}, 0, ValueError, "epochs must be"),
        ({"a": 1}, 3, SpecError, "a"),
    ],
)
def test_bad_input(spec, epochs, error, message):
    with pytest.raises(error, match=message):
        plot_schedules(spec, epochs)
