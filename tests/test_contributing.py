"""The examples of CONTRIBUTING.md and docs/own_regularizers.md run.

They do on every layout what the pages say.
"""

import itertools
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import nn

import dropblock_hooks
from dropblock_hooks import Dropout, SiteError, Spec, attach, plan, register

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "CONTRIBUTING.md", ROOT / "docs/own_regularizers.md"
NUMBERS = itertools.count()  # torch.compile remembers modules by name
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
]
SOURCES = {re.findall(r"@register\nclass (\w+)\(", block)[0]: block for block in BLOCKS}
SCHEDULES = {"Sawtooth"}


def test_the_tables_that_need_an_entry_are_in_the_named_files():
    text = PAGES[0].read_text(encoding="utf-8")
    places = re.findall(r"`(\w+)` of\s+`([\w/]+\.py)`", text)
    assert len(places) >= 5
    package = Path(dropblock_hooks.__file__).parent  # which may be installed from a wheel
    for name, path in places:
        file = next(p for p in (ROOT / path, package / path) if p.exists())
        source = file.read_text(encoding="utf-8")
        assert re.search(rf"^{name}\b.* = ", source, re.MULTILINE), (name, path)


@pytest.fixture(name="example")
def _example(monkeypatch, own_registry):
    """The class of an example, run as it stands there; it is registered for one test only."""
    place = f"contributing_{next(NUMBERS)}"

    def run(name):
        module = types.ModuleType(place)
        monkeypatch.setitem(sys.modules, place, module)  # where torch.compile looks
        exec(compile(SOURCES[name], f"the example {name}", "exec"), vars(module))
        return getattr(module, name)

    return run


def timm_model(name, **options):
    timm = pytest.importorskip("timm", reason="the model is timm's")
    return timm.create_model(name, num_classes=2, img_size=32, embed_dim=24, **options)


MODELS = {
    "NCHW": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)),
        "0",
    ),
    "NHWC": (
        lambda: timm_model("swin_tiny_patch4_window7_224", depths=(1, 1), num_heads=(2, 2)),
        "layers.0.blocks.0",
    ),
    "NLC": (
        lambda: timm_model("vit_tiny_patch16_224", patch_size=8, depth=1, num_heads=2),
        "blocks.0",
    ),
}
each_layout = pytest.mark.parametrize("layout", MODELS)
compiled_or_not = pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)


def build(layout):
    """A model, the name of a layer of this layout in it, and the axis of its channels."""
    make, layer = MODELS[layout]
    return make(), layer, -1 if layout.endswith("C") else 1


def compiled_anew(model, fullgraph=True):
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", fullgraph=fullgraph)


def output_of(model, layer, x, compiled=False):
    """What a layer gives in a forward of the model, after all hooks that are on it now."""
    found = []
    handle = model.get_submodule(layer).register_forward_hook(lambda *call: found.append(call[2]))
    compiled_anew(model)(x) if compiled else model(x)
    handle.remove()
    return found[0].detach()


@each_layout
@compiled_or_not
def test_whole_channels_and_only_those_are_muted(example, layout, compiled):
    model, layer, axis = build(layout)
    x = torch.randn(8, 3, 32, 32)
    before = output_of(model, layer, x)
    (site,) = attach(model, {layer: example("MuteChannels")(0.4)}).sites
    after = output_of(model, layer, x, compiled)
    muted = (after == 0).movedim(axis, 1).flatten(2).all(2)
    of_each = muted.view(*muted.shape, *[1] * (after.ndim - 2)).movedim(1, axis)
    assert torch.equal(after, before.masked_fill(of_each, 0.0))
    assert after.stride() == before.stride()
    assert 0.2 < muted.float().mean() < 0.6
    assert site.realized_rate == pytest.approx(muted.float().mean().item())


@compiled_or_not
def test_of_a_parameter_the_first_axis_is_that_of_the_channels(example, compiled):
    cls = register(type("MuteGradChannels", (example("MuteChannels"),), {"acts_on": "gradient"}))
    model = nn.Linear(5, 40)
    attach(model, {"param:weight": cls(0.5), "param:bias": cls(0.5)})
    run = compiled_anew(model) if compiled else model
    run(torch.ones(2, 5)).sum().backward()
    of_weight = model.weight.grad == 0
    assert torch.equal(of_weight.all(1), of_weight.any(1))
    for muted in (of_weight.all(1), model.bias.grad == 0):
        assert 0.2 < muted.float().mean() < 0.8


@compiled_or_not
@pytest.mark.parametrize("name", [name for name in SOURCES if name not in SCHEDULES])
def test_every_example_trains_and_stands_in_a_file(example, name, compiled):
    regularizer = example(name)()
    assert Spec.from_yaml(f"'1': {name}") == Spec({"1": regularizer})
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)), torch.randn(4, 3, 6, 6)
    (row,) = plan(model, {"1": regularizer}, x)
    assert row.calls == 1
    attached = attach(model, {"1": regularizer})
    run = compiled_anew(model) if compiled else model
    run(x).sum().backward()
    assert attached.sites[0].active_calls == 1


def test_blur_takes_tokens_as_maps(example):
    model, layer, _ = build("NLC")
    x = torch.randn(2, 3, 32, 32)
    before = output_of(model, layer, x)
    attach(model, {layer: example("Blur")(1.0)})
    after = output_of(model, layer, x)
    assert torch.equal(after[:, 0], before[:, 0])  # the class token
    maps = before[:, 1:].mT.unflatten(2, (4, 4))
    blurred = nn.functional.avg_pool2d(maps, 3, 1, 1, count_include_pad=False)
    torch.testing.assert_close(after[:, 1:].mT.unflatten(2, (4, 4)), blurred)


def test_bypass_passes_whole_samples(example):
    model = nn.Sequential(nn.Linear(5, 5))
    attach(model, {"0": example("Bypass")(0.4)})
    x = torch.randn(100, 5)
    passed = (model(x) == x).all(1)
    assert 0.2 < passed.float().mean() < 0.6
    attach(recurrent := nn.LSTM(5, 5), {".": example("Bypass")(0.4, index=0)})
    with pytest.raises(SiteError, match="batch_first=False"):
        recurrent(torch.ones(7, 2, 5))


@compiled_or_not
def test_an_observer_of_your_own(example, compiled):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    attached = attach(model, {"0": example("Kurtosis")()})
    x = torch.randn(16, 4)
    call = compiled_anew(model) if compiled else model
    for _ in range(3):
        call(x)
    with attached.paused():
        expected = stats.kurtosis(model[0](x).detach().numpy(), axis=None, fisher=False)
    assert attached.scalars() == {"reg/0/Kurtosis/kurtosis": pytest.approx(expected, rel=1e-5)}
    assert "kurtosis" in str(attached)


def test_a_schedule_of_your_own(example):
    sawtooth = example("Sawtooth")
    model = nn.Sequential(nn.ReLU())
    attached = attach(model, {"0": Dropout(p=sawtooth(0.0, 0.4, 4))})
    found = []
    for epoch in range(6):
        attached.step(epoch)
        model(torch.ones(3))
        found.append(attached.rates["0/Dropout"]["p"])
    assert found == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.0, 0.1])
    spec = Spec({"0": Dropout(p=sawtooth(0.0, 0.4, 4))})
    assert Spec.from_yaml(spec.to_yaml()) == spec
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        Dropout(p=sawtooth(0.0, 1.5, 4))
