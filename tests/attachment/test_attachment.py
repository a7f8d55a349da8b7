"""The handle: time, switches, table, statistics, state."""

import copy
import io
import re

import numpy as np
import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    Capture,
    ClampGrad,
    ClipGradNorm,
    CosineSchedule,
    DropBlock2d,
    Dropout,
    Dropout2d,
    GaussianNoise,
    GradientStats,
    HookWarning,
    LinearSchedule,
    Select,
    Watchdog,
    WeightStats,
    WindowSchedule,
    ZeroGrad,
    attach,
)
from tests.told import ids, told

RAMP = LinearSchedule(0.0, 0.4, epochs=5)


def run(model, n=1, size=16):
    for _ in range(n):
        model(torch.randn(4, 3, size, size)).sum().backward()


def test_step(net):
    attached = attach(net, {"layer1.0": Dropout2d(RAMP)})
    seen = []
    for t in (0, 2.5, 4, 9, 2):
        attached.step(t)
        seen.append(attached.rates["layer1.0/Dropout2d"]["p"])
    assert seen == pytest.approx([0.0, 0.25, 0.4, 0.4, 0.2])
    net(torch.ones(1, 3, 16, 16))
    attached.step()
    assert (attached.epoch, attached.sites[0].rate) == (3.0, pytest.approx(0.3))
    attached.step(np.float32(0.5))
    attached.step(np.int64(2))
    assert attached.epoch == 2.0


@pytest.mark.parametrize("t", [-0.5, "x", float("nan"), True, torch.tensor(1.0)], ids=repr)
def test_step_refuses(net, t):
    attached = attach(net, {"layer1.0": Dropout2d(RAMP)})
    attached.step(2)
    with pytest.raises((ValueError, TypeError), match="^epoch must be"):
        attached.step(t)
    assert (attached.epoch, attached.sites[0].rate) == (2.0, 0.2)


def test_a_schedule_that_leaves_its_range_moves_nothing(net):
    spec = {"layer1.0": Dropout2d(RAMP), "layer1.1": Dropout2d(lambda t: t / 2)}
    attached = attach(net, spec)
    attached.step(2)
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got 1.5 at t=3"):
        attached.step(3)
    assert attached.epoch == 2
    assert attached.sites[0].rate == 0.2


def test_set(net):
    attached = attach(net, {"layer1.*": Dropout2d(0.1), "layer2.*": ClipGradNorm(1.0)})
    attached.set("layer1.0/Dropout2d", p=0.2)
    attached.set("layer2.*", max_norm=3)
    attached.set(Select(names="layer1.1"), p=RAMP)
    attached.step(4)
    assert list(attached.rates.values()) == [
        {"p": 0.2},
        {"p": 0.4},
        {"max_norm": 3.0},
        {"max_norm": 3.0},
    ]
    assert attached["layer1.0/Dropout2d"].regularizer == Dropout2d(0.2)


@pytest.mark.parametrize(
    ("which", "rates", "error", "text"),
    [
        ("layer1.0/Dropout2d", {"q": 0.2}, ValueError, "its rates: p"),
        ("layer1.*", {"p": 1.2}, ValueError, "p must be"),
        ("layer*.*", {"p": 0.2}, ValueError, "no rate 'p'"),
        ("layer1.*", {}, ValueError, "at least one"),
        (Dropout, {"p": 0.2}, KeyError, "no site has a Dropout"),
        (nn.Conv2d, {"p": 0.2}, TypeError, "a class of regularizers, got Conv2d"),
    ],
)
def test_set_refuses(net, which, rates, error, text):
    attached = attach(net, {"layer1.*": Dropout2d(0.1), "layer2.*": ClipGradNorm(1.0)})
    before = attached.rates
    with pytest.raises(error, match=re.escape(text)):
        attached.set(which, **rates)
    assert attached.rates == before


def test_lookup(net):
    attached = attach(net, {"layer1.*": [Dropout2d(0.1), GaussianNoise(0.1)]})
    assert attached["layer1.0/Dropout2d"] == attached.sites[0]
    keys = ["layer1.0/Dropout2d", "layer1.0/GaussianNoise"]
    assert [site.key for site in attached.select("layer1.0")] == keys
    assert len(attached.select("type:Residual")) == 4
    assert attached.select("layer1.0/Dropout2d") == (attached.sites[0],)
    assert len(attached) == len(list(attached)) == 4


def test_two_sites_of_the_same_are_equal(net):
    attached = attach(net, {"layer1.*": Dropout2d(0.1)})
    first, second = attached
    assert first == attached[0] == attached.select("layer1.0")[0] != second
    assert hash(first) == hash(attached[0])
    assert len({first, second, *attached.sites}) == 2
    assert first != first.key


def test_a_key_is_one_site(net):
    shared = nn.Sequential(net, net)
    attached = attach(shared, {"0.layer1.0": Dropout2d(0.1), "0": ZeroGrad()})
    first, second = attached.sites
    assert attached["0.layer1.0"] == attached["1.layer1.0"] == attached["0.layer1.0/Dropout2d"]
    assert attached["0.layer1.0"] == attached[0] == attached[-2] == first
    assert attached["0"] == attached[1] == second
    whole = attach(net, {".": Dropout2d(0.1)})
    assert whole["."] == whole[0]


@pytest.mark.parametrize(
    ("key", "error", "part"),
    [
        (
            "layer1.0",
            KeyError,
            "'layer1.0' has 2 sites: layer1.0/Dropout2d, layer1",
        ),
        ("layer1.*", KeyError, "no site has this key or is on a layer of this name"),
        ("layer1.0/Dropot2d", KeyError, "closest: layer1.0/Dropout2d"),
        (Dropout2d, TypeError, "got Dropout2d: attached.select(...) finds several"),
        (True, TypeError, "got True"),
        (slice(2), TypeError, "attached.select(...) finds several"),
        (4, IndexError, "out of range"),
    ],
    ids=str,
)
def test_a_key_of_no_site_or_of_several_is_refused(net, key, error, part):
    attached = attach(net, {"layer1.*": [Dropout2d(0.1), GaussianNoise(0.1)]})
    with pytest.raises(error, match=re.escape(part)):
        attached[key]


def test_enabled_and_paused(net):
    x = torch.randn(4, 3, 16, 16)
    bare = net(x)
    attached = attach(net, {"layer1.*": Dropout2d(0.5)})
    with attached.paused():
        assert not attached.enabled
        assert torch.equal(net(x), bare)
        assert "paused" in repr(attached)
    assert attached.enabled
    assert not torch.equal(net(x), bare)
    attached.enabled = False
    with attached.paused():
        pass
    assert not attached.enabled
    assert (attached.sites[0].calls, attached.sites[0].active_calls) == (2, 1)


def test_realized_rate_counts_what_was_dropped():
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": DropBlock2d(0.3, 3)})
    zeros = total = 0
    for _ in range(5):
        y = model(torch.ones(2, 3, 9, 7))
        zeros, total = zeros + int((y == 0).sum()), total + y.numel()
    assert attached.sites[0].realized_rate == zeros / total


def test_clipped_blocks_and_varying_maps_are_told():
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": DropBlock2d(0.1, (3, 7))})
    model(torch.ones(2, 2, 9, 9))
    assert "clipped" not in str(attached)
    model(torch.ones(2, 2, 5, 9))
    model(torch.ones(2, 2, 9, 4))
    site = attached.sites[0]
    assert site.map_size == (9, 4)
    assert site.block_size == (3, 4)
    assert "9x4 (varies)" in str(attached)
    assert "3x4 (clipped)" in str(attached)


def test_report(net):
    attached = attach(net, {"layer1.*": DropBlock2d(RAMP, 3), "layer2.0": ClipGradNorm(1.0)})
    attached.step(2)
    run(net)
    report = attached.report()
    assert len(report) == 3
    assert report[0].site == "layer1.0/DropBlock2d"
    assert [row.calls for row in report] == [1, 1, 1]
    assert report.to_dict()[0]["rate"] == 0.2
    lines = str(attached).splitlines()
    assert lines[0] == "3 sites on Net, epoch 2"
    assert lines[1].split() == ["site", "options", "rate", "realized", "calls", "active", "map"]
    assert lines[2].split() == ["now", "this", "epoch", "total", "total", "last"]
    assert lines[4].startswith("2 sites layer1.*/DropBlock2d")
    assert " 0.2 " in lines[4]
    assert lines[4].endswith("8x8")
    attached.remove()
    assert "removed" in repr(attached)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.rarely = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, rarely=True):
        y = self.always(x)
        return self.rarely(y) if rarely else y


@pytest.mark.filterwarnings("ignore:.*was never called")  # in the second epoch
@pytest.mark.parametrize("item", [ClipGradNorm(1.0), ActivationStats(), GradientStats()], ids=repr)
def test_report_shows_only_numbers_of_the_epoch_that_it_names(item):
    model = TwoLayers()
    attached = attach(model, {"*": item})
    model(torch.ones(3, 2)).square().sum().backward()
    attached.step()
    assert "this epoch" not in str(attached.report())
    model(torch.ones(3, 2), rarely=False).sum().backward()
    lines = str(attached.report()).splitlines()
    assert any("this epoch" in line for line in lines)
    always = {cell for line in lines if line.startswith("always") for cell in line.split()[1:]}
    rarely = {cell for line in lines if line.startswith("rarely") for cell in line.split()[1:]}
    assert always
    assert "-" not in always
    # options, and the numbers of calls of the whole training
    assert "-" in rarely
    assert rarely <= {"norm_type=2.0", "max_norm=1", "1", "-"}


def test_a_layer_whose_parameters_stay_has_its_numbers_in_the_report():
    model = TwoLayers()
    model.rarely.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(model, {"*": WeightStats()})
    for _ in range(2):
        attached.step()
        model(torch.ones(3, 2)).square().sum().backward()
        optimizer.step()
    moved, stayed = attached.report()
    assert moved.observed.updates["weight"] > 0
    assert stayed.observed.updates == {"weight": 0.0, "bias": 0.0}
    (line,) = (line for line in str(attached.report()).splitlines() if line.startswith("rarely"))
    assert "-" not in line.split()


def test_a_site_without_counts_does_not_choose_the_epoch_of_its_section():
    """`ZeroGrad` counts no elements."""
    model = TwoLayers()
    attached = attach(model, {"always": ZeroGrad(), "rarely": ClipGradNorm(1.0)})
    model(torch.ones(3, 2)).square().sum().backward()
    attached.step()
    assert "norms before the bound, last epoch" in str(attached.report())
    model(torch.ones(3, 2)).square().sum().backward()
    assert "norms before the bound, this epoch" in str(attached.report())


def test_report_as_a_data_frame(net):
    pytest.importorskip("pandas", reason="an option of the user's")
    frame = attach(net, {"layer1.*": Dropout2d(0.1)}).report().to_pandas()
    assert list(frame["site"]) == ["layer1.0/Dropout2d", "layer1.1/Dropout2d"]


def test_verify(net):
    class Lazy(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.unused = inner, nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(x)

    model = Lazy(net)
    attached = attach(model, {"unused": Dropout(0.1), "inner.layer*.*": Dropout2d(0.1)})
    assert [f.kind for f in attached.verify()] == ["not_run"]
    model.eval()(torch.ones(1, 3, 16, 16))
    assert {f.kind for f in attached.verify()} == {"never_called", "never_active"}
    model.train()
    net.layer1[0].eval()
    with pytest.warns(HookWarning) as caught:
        run(model)
    wanted = [("unused/Dropout", "never_called"), ("inner.layer1.0/Dropout2d", "never_active")]
    assert told(caught) == ids(attached.verify()) == wanted
    net.layer2[1]._forward_hooks.clear()
    del model.unused
    replaced = {("unused/Dropout", "replaced"), ("inner.layer2.1/Dropout2d", "replaced")}
    assert replaced < set(ids(attached.verify()))
    attached.remove()
    assert [f.kind for f in attached.verify()] == ["removed"]


def test_verify_of_paused_and_of_gradients(net):
    attached = attach(net, {"layer1.0": ClipGradNorm(1.0), "param:fc.bias": ClampGrad(-1, 1)})
    with torch.no_grad():
        net(torch.ones(1, 3, 16, 16))
    assert "no gradient" in str(attached.verify()[0])
    with attached.paused():
        run(net)
        assert "paused" in str(attached.verify()[0])
    run(net)
    assert attached.verify() == []
    net.fc.bias = nn.Parameter(torch.zeros(5))
    assert [f.kind for f in attached.verify()] == ["lost"]
    run(net)
    assert attached.verify() == []


def test_state(net):
    spec = {"layer1.*": DropBlock2d(RAMP, 3), "layer2.*": ClipGradNorm(1e-6)}
    attached = attach(net, spec)
    attached.step(1)
    run(net, 3)
    attached.step(2)
    run(net, 2)
    state = attached.state_dict()
    assert all(type(v) in (int, float, bool, dict) for v in state.values())
    attached.remove()
    resumed = attach(net, spec)
    resumed.load_state_dict(copy.deepcopy(state))
    assert (resumed.epoch, resumed.rates) == (attached.epoch, attached.rates)
    for a, b in zip(attached.report(), resumed.report(), strict=True):
        assert (a.total_realized_rate, a.calls) == (b.total_realized_rate, b.calls)
        assert b.realized_rate == a.realized_rate
    assert resumed.state_dict() == state


def test_the_state_is_read_without_pickled_code(net):
    measures = [ActivationStats(), GradientStats(), Watchdog(), Capture(gradients=True)]
    spec = {
        "layer1.*": [DropBlock2d(RAMP, 3), *measures],
        "param:fc.*": [ClipGradNorm(1e-6), WeightStats()],
    }
    attached = attach(net, spec)
    run(net, 2)
    file = io.BytesIO()
    torch.save(attached.state_dict(), file)
    file.seek(0)
    attached.load_state_dict(torch.load(file, weights_only=True))


def test_the_state_of_the_model_is_no_state_of_an_attachment(net):
    attached = attach(net, {"fc": Dropout(0.1)})
    returned = r"pass what attached.state_dict\(\) returned"
    with pytest.raises(ValueError, match=f"^this is the state_dict of a model, .*{returned}$"):
        attached.load_state_dict(net.state_dict())
    for other in ({}, None, {"model": net.state_dict()}):
        with pytest.raises(ValueError, match=f"^this is not the state_dict .*: {returned}$"):
            attached.load_state_dict(other)
    with pytest.raises(ValueError, match="in version 3, and this .* reads version 4$"):
        attached.load_state_dict({**attached.state_dict(), "version": 3})


WHOLE = {
    "regularizer": "Dropout(p=0.1)",
    "without_epochs": "Dropout(p=0.1)",
    "calls": 1,
    "active_calls": 1,
    "affected": 0,
    "total": 0,
    "expected": 0.0,
    "window": {"affected": 0, "total": 0, "expected": 0.0},
}


@pytest.mark.parametrize(
    "damage",
    [
        {"sites": []},
        {"sites": {"fc/Dropout": {"regularizer": "Dropout(p=0.1)"}}},
        {"sites": {"fc/Dropout": {**WHOLE, "calls": "x"}}},
        {"sites": {"fc/Dropout": {**WHOLE, "total": [1]}}},
        {"sites": {"fc/Dropout": {**WHOLE, "window": {"affected": 0}}}},
        {"sites": {"fc/Dropout": {**WHOLE, "affected": float("inf")}}},
        {"epoch": -1.0},
        {"epoch": float("inf")},
        {"forwards": None},
        {"sites": {"fc/Dropout": {**WHOLE, "anchor": [1.0]}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_damaged_state_changes_nothing(net, damage, strict):
    attached = attach(net, {"fc": Dropout(0.1)})
    whole = {**attached.state_dict(), "epoch": 2.0, "sites": {"fc/Dropout": WHOLE}}
    for state in ({**whole, **damage}, {name: whole[name] for name in whole.keys() - damage}):
        with pytest.raises(ValueError, match="is damaged: "):
            attached.load_state_dict(state, strict)
        assert (attached.epoch, attached.sites[0].calls) == (0, 0)
    attached.load_state_dict(whole)
    assert (attached.epoch, attached.sites[0].calls) == (2, 1)


def test_state_of_another_spec(net):
    attached = attach(net, {"layer1.*": Dropout2d(LinearSchedule(0.0, 0.1, epochs=9))})
    attached.step(5)
    run(net)
    state = attached.state_dict()
    attached.remove()
    spec = {"layer1.0": Dropout2d(LinearSchedule(0.0, 0.2, epochs=9)), "fc": Dropout(0.1)}
    other = attach(net, spec)
    with pytest.raises(ValueError, match="another model or spec") as caught:
        other.load_state_dict(state)
    for part in (
        "stop=0.1",
        "stop=0.2",
        "fc/Dropout: the state has none, the model has Dropout(p=0.1)",
        "layer1.1/Dropout2d: the state has Dropout2d(",
        "To load the sites whose keys are the same, pass strict=False",
    ):
        assert part in str(caught.value)
    assert other.epoch == 0
    assert other.sites[0].calls == 0
    other.load_state_dict(state, strict=False)
    assert other.epoch == 5
    assert [site.calls for site in other.sites] == [1, 0]


def test_scalars(net):
    attached = attach(net, {"layer1.0": Dropout2d(0.5), "layer2.0": ClampGrad(-1, 1)})
    assert attached.scalars() == {
        "reg/layer1.0/Dropout2d/p": 0.5,
        "reg/layer2.0/ClampGrad/min": -1.0,
        "reg/layer2.0/ClampGrad/max": 1.0,
    }
    run(net)
    scalars = attached.scalars(prefix="x/")
    assert len(scalars) == 5
    assert type(scalars["x/layer1.0/Dropout2d/realized_rate"]) is float


@pytest.mark.parametrize(
    "schedule", [RAMP, CosineSchedule(0.0, 0.1, epochs=3), WindowSchedule(0.1, 5, 9)]
)
def test_a_schedule_that_nobody_steps_is_told_once(net, schedule):
    attached = attach(net, {"layer1.*": Dropout2d(schedule)})
    for _ in range(2):
        run(net, 3)
        net.eval()(torch.ones(1, 3, 16, 16))
        net.train()
    text = r"still 0.0 in call 9 of the layer.*attached.step\(epoch\).*step\(0\)"
    with pytest.warns(HookWarning, match=text) as told:
        run(net, 3)
    assert len(told) == 1
    assert {finding.kind for finding in attached.verify()} == {"not_stepped"}
    assert "step() was never called" in attached.report().title
    attached.step(1)
    assert attached.verify() == []
    assert "never called" not in attached.report().title


@pytest.mark.parametrize(
    ("which", "part"),
    [
        ("fc.weight", "param:fc.weight"),
        ("layer1.0/Dropot2d", "closest: layer1.0/Dropout2d"),
        ("fc", "nothing is attached to its layers: fc"),
    ],
)
def test_a_lookup_of_nothing_says_why(net, which, part):
    spec = {"layer?.*": [Dropout2d(0.1), GaussianNoise(0.1)]}
    attached = attach(net, spec)
    for look in (lambda: attached.select(which), lambda: attached.set(which, p=0.2)):
        with pytest.raises(KeyError) as caught:
            look()
        assert part in caught.value.args[0]
        assert re.search(r"; sites(: .* and 3 more| \(closest: .*\))$", caught.value.args[0])


def test_set_after_remove_is_refused(net):
    attached = attach(net, {"layer1.*": Dropout2d(0.1)})
    attached.remove()
    with pytest.raises(RuntimeError, match="was removed.*attach again"):
        attached.set("nothing", p=0.2)


def _later(value):
    """A schedule that goes wrong after time 0."""
    return lambda t: value(t) if t else 0.1


@pytest.mark.parametrize(
    ("schedule", "error", "part"),
    [
        (_later(lambda t: 0.1 + t), ValueError, "p must be in [0, 1], got 3.1"),
        (_later(lambda t: None), TypeError, "must be a number, got None"),
        (_later(lambda t: t / 0), ValueError, "raised ZeroDivisionError"),
    ],
    ids=["range", "type", "raises"],
)
@pytest.mark.parametrize("how", ["step", "set", "load"])
def test_faults_of_schedules_name_site_and_field(net, schedule, error, part, how):
    attached = attach(net, {"fc": GaussianNoise(0.1), "layer1.*": Dropout2d(p=0.2)})
    attached.step(3)
    state = attached.state_dict()
    if how != "set":
        attached.step(0)
        attached.set("layer1.1", p=schedule)
    before = (attached.epoch, attached.rates)
    acts = {
        "step": lambda: attached.step(3),
        "set": lambda: attached.set("layer1.1", p=schedule),
        "load": lambda: attached.load_state_dict(state, strict=False),
    }
    with pytest.raises(error, match=rf"^layer1.1/Dropout2d: .*{re.escape(part)}.* at t=3$"):
        acts[how]()
    assert (attached.epoch, attached.rates) == before


def test_a_longer_training_is_no_other_spec():
    def made(length, **own):
        model = nn.Sequential(nn.Conv2d(3, 8, 3))
        return attach(model, {"0": Dropout2d(LinearSchedule(0, 0.5, **own))}, epochs=length)

    attached = made(5)
    attached.step(4)
    longer = made(9)
    longer.load_state_dict(attached.state_dict())
    assert longer.epoch == 4
    assert longer.sites[0].rate == LinearSchedule(0, 0.5, epochs=9)(4)
    made(9, epochs=5).load_state_dict(made(5, epochs=5).state_dict())
    with pytest.warns(HookWarning, match="takes 20 epochs, and the training has 10"):
        made(20, epochs=20).load_state_dict(made(10, epochs=20).state_dict())
    made(10, epochs=10).load_state_dict(made(None, epochs=10).state_dict())
    made(20, delay=1.5).load_state_dict(made(10, delay=1.5).state_dict())
    for other in (made(9, delay=2), made(9, epochs=7)):
        with pytest.raises(ValueError, match="the state is of another model or spec"):
            other.load_state_dict(attached.state_dict())


def test_set_warns_of_a_schedule_that_is_longer_than_the_training(net):
    attached = attach(net, {"layer1": Dropout2d(0.1)}, epochs=10)
    with pytest.warns(HookWarning, match="takes 11 epochs, and the training has 10"):
        attached.set("layer1", p=LinearSchedule(0, 0.2, epochs=11))
    attached.set("layer1", p=LinearSchedule(0, 0.2, epochs=10))
    attached.set("layer1", p=LinearSchedule(0, 0.2))
    assert attached.sites[0].regularizer.p.epochs == 10


def test_a_step_after_the_end_is_reported_once():
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    with attach(model, {"0": Dropout2d(0.5)}) as attached:
        model(torch.randn(2, 3, 8, 8))
    with pytest.warns(HookWarning, match="the attachment was removed"):
        attached.step(1)
    attached.step(2)


def test_a_state_without_these_sites():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    state = attach(model, {"0": Dropout2d(0.5)}).state_dict()
    other = attach(model, {"1": Dropout2d(0.5)})
    with pytest.warns(HookWarning, match="none of these sites"):
        other.load_state_dict(state, strict=False)


def test_gradients_in_evaluation_mode_are_not_called_lost():
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).eval()
    attached = attach(model, {"param:0.weight": ClipGradNorm(1.0)})
    attached.step(0)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    (finding,) = attached.verify()
    assert "evaluation mode" in str(finding)
    assert "detach" not in str(finding)
