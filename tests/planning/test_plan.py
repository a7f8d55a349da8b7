"""The dry run: what it tells, what it refuses, and that it touches nothing."""

import functools
import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from dropblock_hooks import (
    ActivationStats,
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    Dropout2d,
    DropPath,
    GaussianNoise,
    HookWarning,
    LinearSchedule,
    Retune,
    SpecError,
    StochasticDepth,
    attach,
    plan,
)
from dropblock_hooks.presets import drop_block_resnet

IMAGE = torch.ones(2, 3, 16, 16)


def kinds(planned):
    return [finding.kind for finding in planned.findings]


def found(planned, kind):
    """The only finding of a kind."""
    (finding,) = [finding for finding in planned.findings if finding.kind == kind]
    return finding


def line(planned, kind):
    return found(planned, kind).text


def test_a_plan_is_what_then_happens(net):
    spec = {
        "layer1.*": [DropBlock2d(0.2, 3), ClipGradNorm(1.0)],
        "stem": Dropout2d(0.1, at="input"),
        "layer2.0.act": GaussianNoise(0.1),
        "fc": Dropout(LinearSchedule(0.0, 0.3, epochs=3)),
        "param:fc.bias": ClampGrad(-1, 1),
    }
    planned = plan(net, spec, IMAGE)
    attached = attach(net, spec)
    net(IMAGE).sum().backward()
    for row, site in zip(planned, attached, strict=True):
        assert (row.site, row.calls, row.aliases) == (site.key, site.calls, site.aliases)
        assert (row.map_size, row.block_size) == (site.map_size, site.block_size)
        assert (row.type, row.at) == (site.module_type, site.at)
    rows = {row.site: row for row in planned}
    assert rows["stem/Dropout2d"].shape == (2, 3, 16, 16)
    assert rows["layer1.0/DropBlock2d"].shape == (2, 8, 8, 8)
    assert rows["layer1.0/DropBlock2d"].layout == "NCHW"
    assert rows["fc/Dropout"].shape == (2, 5)
    assert rows["fc/Dropout"].rate == rows["fc/Dropout"].expected_share == (0.0, 0.3)
    assert rows["fc.bias/ClampGrad"].shape == (5,)
    assert rows["layer2.0.act/GaussianNoise"].expected_share is None
    assert planned.problems == ()
    assert planned.to_dict()[0]["site"] == "layer1.0/DropBlock2d"
    assert "2x8x8x8" in str(planned)


def test_rates_that_move(net):
    spec = {"layer1.0": DropBlock2d(lambda t: 0.1 + t, 3), "layer1.1": ClampGrad(None, 1.0)}
    rows = plan(net, spec, IMAGE)
    assert [row.rate for row in rows] == [pytest.approx(0.1), 1.0]
    spec = {"layer1.0": DropBlock2d(LinearSchedule(0.0, 0.4, epochs=5), 3, calibration="paper")}
    (row,) = plan(net, spec, IMAGE)
    assert row.rate == (0.0, 0.4)
    assert row.expected_share[0] == 0.0
    assert 0.25 < row.expected_share[1] < 0.4


class Two(nn.Module):
    """A layer that is called twice, by two names, on maps of two sizes, and one never."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.same, self.act, self.unused = self.conv, nn.ReLU(inplace=True), nn.Linear(2, 2)

    def forward(self, x):
        x = self.act(self.conv(x))
        return x, self.same(x[..., ::2, ::2])


def test_what_is_good_to_know():
    spec = {
        "conv": [DropBlock2d(0.1, 9), Dropout2d(0.1)],
        ".": Dropout(0.1, index=1),
        "unused": [Dropout(0.1), ActivationStats()],
    }
    planned = plan(Two(), spec, IMAGE)
    assert planned[0].shape == (2, 3, 8, 8)
    assert planned[0].calls == 2
    assert planned[0].aliases == ("same",)
    assert planned[0].map_size == planned[0].block_size == (8, 8)
    assert planned[0].clipped
    assert "conv/DropBlock2d (= same" in str(planned)
    assert planned[2].shape == (2, 3, 8, 8)
    assert (planned[3].calls, planned[3].shape, planned[3].expected_share) == (0, None, 0.0)
    assert (planned[4].calls, planned[4].expected_share) == (0, None)  # it never drops anything
    assert "8x8 (clipped)" in str(planned)
    assert found(planned, "never_called").sites == ("unused/Dropout", "unused/ActivationStats")
    assert planned.problems == ()


def test_frozen_layers_and_parts(net):
    net.layer1[0].eval()
    for parameter in (*net.stem.parameters(), *net.layer1.parameters()):
        parameter.requires_grad_(False)
    spec = {"layer1.0": Dropout(0.1), "layer2.0": ClipGradNorm(1.0)}
    frozen = found(plan(net, spec, IMAGE), "never_active")
    assert frozen.sites == ("layer1.0/Dropout",)
    assert "the layer is in evaluation mode" in frozen.text
    assert "never_active" not in kinds(plan(net.eval(), spec, IMAGE))


def test_all_problems_come_at_once(net):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.split = net, nn.Identity()

        def forward(self, x):
            return self.net(x), self.split((x, x))[0]

    spec = {
        "net.fc": Dropout2d(0.1),
        "split": Dropout(0.1),
        "net.stem": [StochasticDepth(0.1), Dropout(0.1, index=0)],
        "net.layer1.*": [DropBlock2d(0.1), Dropout2d(0.1, at="input", index=3)],
    }
    model = Pair()
    planned = plan(model, spec, IMAGE)
    assert len(planned.problems) == 5
    assert [row.problem is None for row in planned].count(False) == 6
    with pytest.raises(SpecError) as refused:
        attach(model, spec, example_input=IMAGE)
    assert refused.value.problems == planned.problems
    text = str(refused.value)
    assert "net.fc/Dropout2d: needs a 4-D tensor" in text
    assert "split/Dropout: the output is a tuple of 2" in text
    assert "net.stem/StochasticDepth: needs a residual block that keeps" in text
    assert "net.stem/Dropout: the output is a float32 tensor" in text
    assert "net.layer1.0/Dropout2d, net.layer1.1/Dropout2d: what the layer is given" in text
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_attach_plans_first(net):
    spec = {"layer1.0": Dropout2d(0.1)}
    attached = attach(net, spec, example_input=IMAGE)
    assert attached.sites[0].calls == 0
    attached.remove()
    net.unused = nn.Linear(2, 2)
    with pytest.warns(HookWarning, match="unused/Dropout: .*never called"):
        attach(net, {**spec, "unused": Dropout(0.1)}, example_input=(IMAGE,))
    net(IMAGE)  # it has been told


def test_spec_faults_are_raised(net):
    with pytest.raises(SpecError, match="layr1"):
        plan(net, {"layr1": Dropout(0.1)}, IMAGE)
    attached = attach(net, {"layer1.0": Dropout(0.1), "param:fc.bias": ClampGrad(-1, 1)})
    with pytest.raises(SpecError, match="an earlier attach has put Dropout on layer1.0"):
        plan(net, {"layer1.0": Dropout(0.1)}, IMAGE)
    assert plan(net, {"layer1.1": Dropout(0.1)}, IMAGE).findings == ()
    assert attached.sites[0].calls == 0
    with pytest.raises(ValueError, match="root=.layr. is not a submodule"):
        plan(net, {"0": Dropout(0.1)}, IMAGE, root="layr")
    with pytest.raises(ValueError, match=r"Its children are .*fc.*layers\(model\) lists all"):
        plan(net, {"0": Dropout(0.1)}, IMAGE, root="qqqqq")
    with pytest.raises(ValueError, match="submodule of the model, which has none"):
        attach(nn.ReLU(), {".": Dropout(0.1)}, root="net")


def test_without_an_example(net):
    planned = plan(net, {"layer1.*": Dropout2d(0.1)})
    assert [row.site for row in planned] == ["layer1.0/Dropout2d", "layer1.1/Dropout2d"]
    assert planned[0].shape is planned[0].calls is None
    assert kinds(planned) == ["no_pass"]
    shape = plan(net, {"layer1.*": Dropout2d(0.1)}, (2, 3, 16, 16))
    assert "Give a tensor in place of its shape" in line(shape, "no_pass")
    for nothing in ((), {}):
        told = line(plan(net, {"layer1.*": Dropout2d(0.1)}, nothing), "no_pass")
        assert told.endswith("missing 1 required positional argument: 'x'")
    for batch in ((IMAGE, torch.ones(2)), [IMAGE, torch.ones(2)]):
        meant = "an argument of the model. Of a batch (x, y), give only x"
        assert meant in line(plan(net, {"layer1.*": Dropout2d(0.1)}, batch), "no_pass")
    for example in (IMAGE, (IMAGE,), {"x": IMAGE}):
        assert plan(net, {"layer1.*": Dropout2d(0.1)}, example)[0].shape == (2, 8, 8, 8)
    net.pretrained_cfg = {"input_size": (3, 32, 32)}
    planned = plan(net, {"layer1.*": Dropout2d(0.1)})
    assert planned[0].shape == (2, 8, 16, 16)


class Reads(nn.Module):
    """A forward that needs numbers."""

    def __init__(self, how):
        super().__init__()
        self.how, self.fc = how, nn.Linear(3, 3)

    def forward(self, x):
        if self.how == "item":
            return self.fc(x) if x.sum().item() > 0 else x
        if self.how == "nonzero":
            return self.fc(x[x[:, 0] > 0])
        raise RuntimeError("it fails anyway")


@pytest.mark.parametrize("how", ["item", "nonzero"])
def test_where_fake_tensors_fail_a_real_copy_runs(how):
    model, state = Reads(how), torch.get_rng_state()
    planned = plan(model, {"fc": Dropout(0.1)}, torch.ones(2, 3))
    assert planned[0].shape == (2, 3)
    assert planned.findings == ()
    assert torch.equal(torch.get_rng_state(), state)
    meta = plan(model.to("meta"), {"fc": Dropout(0.1)}, torch.ones(2, 3))
    assert kinds(meta) == ["no_pass"]
    model = Reads("raise")
    planned = plan(model, {"fc": Dropout(0.1)}, torch.ones(2, 3))
    assert planned[0].calls is None
    assert "it fails anyway" in line(planned, "no_pass")
    with pytest.warns(HookWarning, match="it fails anyway"):
        attach(model, {"fc": Dropout(0.1)}, example_input=torch.ones(2, 3))


def test_the_error_of_the_real_forward_is_said_once():
    text = line(plan(Reads("item"), {".": Dropout(0.1)}, torch.ones(2, 4)), "no_pass")
    assert "no forward of a copy ran with example_input of (2, 4): RuntimeError" in text
    assert text.count("Error") == 1


class Keeps(nn.Module):
    """Buffers, caches, random numbers, plain tensors, tied parameters: all that a copy shares."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.tied = self.fc.weight
        self.plain, self.cache = [torch.ones(3)], {}

    def forward(self, x):
        key = x.shape[0]
        if key not in self.cache:
            self.cache[key] = self.fc.weight.detach().sum() + torch.zeros(3, device=x.device)
        random.random(), torch.rand(1)
        self.plain[0].add_(1)
        x = nn.functional.dropout(x * self.plain[0] + self.cache[key], 0.1, self.training)
        return nn.functional.linear(self.fc(self.norm(x)), self.tied)


@pytest.mark.parametrize("faked", [True, False])
def test_nothing_is_touched(faked, hook_count):
    model = nn.Sequential(Keeps(), *([] if faked else [Reads("item")]))
    model[0].norm.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate()
    flags = [module.training for module in model.modules()]
    plan(model, {"0.*": [Dropout(0.1), ClipGradNorm(1.0)]}, torch.ones(4, 3))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert [module.training for module in model.modules()] == flags
    assert hook_count(model) == 0
    assert model[0].cache == {}
    assert model[0].plain[0].tolist() == [1.0, 1.0, 1.0]
    assert model[0].tied is model[0].fc.weight
    for mode in (True, False):
        model.train(mode)(torch.ones(4, 3)).sum().backward()


_MASKS: dict = {}


@functools.lru_cache
def _mask(n):
    return torch.ones(n)


class CachesOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        if len(x) not in _MASKS:
            _MASKS[len(x)] = [(torch.ones(3), torch.ones(3))]
        return self.fc(x * _mask(3) * _MASKS[len(x)][0][1])


def test_caches_outside_of_the_model_hold_no_fake_tensor():
    model = CachesOutside()
    assert plan(model, {"fc": Dropout(0.1)}, torch.ones(2, 3)).findings == ()
    assert _MASKS == {}
    model(torch.ones(2, 3)).sum().backward()
    plan(model, {"fc": Dropout(0.1)}, torch.ones(2, 3))  # real ones stay
    assert list(_MASKS) == [2]
    assert _mask.cache_info().currsize == 1


def test_hooks_of_the_user():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    kept = []
    model[0].register_forward_hook(lambda module, args, output: kept.append(output))
    prune.l1_unstructured(model[1], "weight", 1)  # works by a hook, which stays
    spec = {"*": Dropout(0.1), "param:1.weight_orig": ClampGrad(-1, 1)}
    planned = plan(model, spec, torch.ones(2, 3))
    assert kept == []
    assert planned.findings == ()
    assert planned[1].shape == (2, 4)
    assert len(model[0]._forward_hooks) == 1
    model(torch.ones(2, 3))
    assert len(kept) == 1


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.branch, self.act = inner, nn.ReLU()

    def forward(self, x):
        return self.act(x + self.branch(x))


def test_where_drop_path_loses_samples():
    branch = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sigmoid(), nn.Identity())
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Block(branch), Block(nn.Conv2d(4, 4, 1)))
    planned = plan(model, {"re:.*": DropPath(0.1)}, IMAGE)
    lost = {key.removesuffix("/DropPath") for key in found(planned, "loses_samples").sites}
    assert lost == {"0", "1", "1.act", "2", "2.act"}
    assert "loses_samples" not in kinds(plan(model, {"1": StochasticDepth(0.1)}, IMAGE))


def test_a_model_on_the_meta_device_takes_no_memory():
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True)
        model = nn.TransformerEncoder(layer, 34, enable_nested_tensor=False)
    assert sum(p.numel() for p in model.parameters()) > 6.8e9
    planned = plan(model, {"layers.*.linear2": DropPath(0.1)}, torch.ones(1, 16, 4096))
    assert [(row.calls, row.shape) for row in planned] == [(1, (1, 16, 4096))] * 34
    assert planned.warnings == ()
    assert all(p.is_meta for p in model.parameters())


def test_a_rate_that_begins_at_0_is_planned_as_any_other():
    """The first forward of a training would not read the axes at a rate of 0."""
    model, ramp = nn.Sequential(nn.Flatten(2)), LinearSchedule(0.0, 0.4, epochs=5)
    planned = plan(model, {"0": DropBlock2d(ramp, 3)}, IMAGE)
    assert "say grid=" in planned.problems[0]


def warned(action):
    """The texts of the findings that an action warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [finding.text for warning in caught for finding in warning.message.findings]


@pytest.mark.parametrize(("block_size", "mark"), [(7, "whole map"), (9, "clipped")])
def test_a_block_as_large_as_the_map_is_reported(block_size, mark):
    def model():
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())

    spec, x = {"0": DropBlock2d(0.1, block_size)}, torch.randn(2, 3, 7, 7)
    told = "the block is as large as the map (7x7): it drops whole channels"
    planned = plan(model(), spec, x)
    assert [finding.kind for finding in planned.findings] == ["clipped"]
    assert told in planned.warnings[0]
    assert f"7x7 ({mark})" in str(planned)
    is_larger = block_size > 7  # a block of exactly the map may be meant, as in the paper
    assert planned.findings[0].severity == ("warning" if is_larger else "note")
    assert warned(lambda: attach(model(), spec, example_input=x)) == [told] * is_larger

    net = model()
    attached = attach(net, spec)
    net(x).sum().backward()
    assert f"7x7 ({mark})" in str(attached.report())
    assert [finding.text for finding in attached.verify()] == [told] * is_larger
    assert warned(lambda: attached.step(1)) == [told] * is_larger
    net(x).sum().backward()
    assert warned(lambda: attached.step(2)) == []  # once
    net(torch.randn(2, 3, 12, 12))
    net(x)
    assert attached.verify() == []  # some maps are larger


def test_the_preset_of_the_paper_is_silent_at_the_size_of_its_images():
    model = nn.Sequential()
    for name, stride in (("stem", 16), ("layer3", 1), ("layer4", 2)):
        block = nn.Sequential()
        block.add_module("bn1", nn.Conv2d(3, 3, 1, stride))
        model.add_module(name, nn.Sequential(block))
    attached = attach(model, drop_block_resnet(model), example_input=torch.randn(2, 3, 224, 224))
    for epoch in range(2):
        attached.step(epoch)
        model(torch.randn(2, 3, 224, 224)).sum().backward()
    assert attached["layer4.0.bn1"].map_size == (7, 7)
    assert attached.verify() == []


@pytest.mark.parametrize("block_size", [7, 9])
def test_blocks_across_the_border_leave_a_part_of_a_map_of_their_size(block_size):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1))
    x = torch.randn(2, 3, 7, 7)
    spec = {"0": DropBlock2d(0.1, block_size, border="across")}
    assert "whole channels" not in str(plan(model, spec, x).warnings)
    attached = attach(model, spec)
    model(x)
    assert attached.verify() == []


@pytest.mark.parametrize(
    ("p", "noted"), [(0.9, True), (LinearSchedule(0.0, 0.8, epochs=3), True), (0.5, False)], ids=str
)
def test_a_rate_above_a_half_is_noted_for_dropblock(p, noted):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    planned = plan(model, {"0": DropBlock2d(p, 3), "1": Dropout(0.9)}, torch.randn(2, 3, 16, 16))
    texts = [f"{finding.sites} {finding.text}" for finding in planned.findings]
    assert len(texts) == noted
    assert all(text.startswith("('0/DropBlock2d',) with p=0.") for text in texts)


def test_the_row_of_a_site_with_an_error_shows_no_map_of_an_earlier_call():
    class SharedReLU(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.fc = nn.Linear(8 * 49, 8)
            self.relu = nn.ReLU()

        def forward(self, x):
            return self.relu(self.fc(self.relu(self.conv(x)).flatten(1)))

    planned = plan(SharedReLU(), {"*": DropBlock2d(0.1, 3)}, torch.randn(2, 3, 7, 7))
    conv, fc, relu = planned
    assert (conv.layout, conv.block_size, conv.expected_share) == ("NCHW", (3, 3), 0.1)
    for row in (fc, relu):
        unknown = (row.layout, row.map_size, row.block_size, row.clipped, row.expected_share)
        assert unknown == (None, None, None, False, None)
    first, second = planned.problems
    assert "Use Dropout on a Linear layer" in first
    assert "this layer is called at several places. Put the regularizer on a layer" in second


def test_a_rate_that_compiled_code_holds_is_noted_if_it_moves():
    model = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.AlphaDropout(0.5))
    ramp = LinearSchedule(0.1, 0.3, epochs=3)
    planned = plan(model, {"[01]": Retune(ramp), "2": Retune(0.2)}, torch.ones(2, 3))
    assert found(planned, "recompiles").sites == ("1/Retune",)


class WithToken(nn.Module):
    """A model with a parameter of its own, beside those of a layer."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 3))
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x + self.token)


@pytest.mark.parametrize(("selector", "is_noted"), [("param:*", True), ("param:**", False)])
def test_a_selector_of_the_models_own_parameters_is_noted(selector, is_noted):
    planned = plan(WithToken(), {selector: ClipGradNorm(1.0)}, torch.ones(2, 3))
    noted = "'param:*' selects 1 of 3 parameters, those of the model itself: 'param:**' selects"
    assert (noted in str(planned)) is is_noted
    assert [finding.severity for finding in planned.findings] == ["note"] * is_noted
