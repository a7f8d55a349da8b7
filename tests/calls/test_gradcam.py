"""Grad-CAM on small models: its formulas, what it leaves as it was, and what it refuses."""

import types

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

from dropblock_hooks import (
    Capture,
    ClampGrad,
    DropBlock2d,
    HookWarning,
    LinearSchedule,
    attach,
    gradcam,
)
from tests.calls.test_capture import state

METHODS = ["gradcam", "gradcam++", "layercam"]


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(3, 3, 16, 12)


class Tokens(nn.Module):
    """A ViT with a class token, by its names as torchvision has them."""

    def __init__(self, pooled=False):
        super().__init__()
        self.patch_size, self.image_size, self.pooled = 4, 16, pooled
        self.conv_proj = nn.Conv2d(3, 8, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, 8))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.ln = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), 1)
        for layer in self.layers:
            x = layer(x)
        x = self.ln(x)
        return self.head(x[:, 1:].mean(1) if self.pooled else x[:, 0])


def by_hand(net, x, method, pick=lambda y: y.amax(1).sum()):
    """The map at the output of ``layer2``, in float64, one channel after another."""
    net = net.eval()
    a = net.layer2(net.layer1(net.stem(x)))
    g = torch.autograd.grad(pick(net.fc(a.mean((2, 3)))), a)[0].double().numpy()
    a = a.detach().double().numpy()
    raw = 0.0 * a[:, 0]
    for n in range(a.shape[0]):
        for c in range(a.shape[1]):
            f, d = a[n, c], g[n, c]
            positive = d * (d > 0)
            if method == "gradcam":
                raw[n] += f * d.mean()
            elif method == "gradcam++":
                d = d[d > 0]
                raw[n] += f * (d**3 / (2 * d**2 + f.sum() * d**3)).sum()
            else:
                raw[n] += f * positive
    return torch.from_numpy(raw * (raw > 0)).float()


@pytest.mark.parametrize("method", METHODS)
def test_the_formulas(net, x, method):
    cam = gradcam(net, x, "layer2", method=method)
    torch.testing.assert_close(cam.raw, by_hand(net, x, method), rtol=1e-4, atol=1e-7)
    low = cam.raw.amin((1, 2), keepdim=True)
    unit = (cam.raw - low) / (cam.raw - low).amax((1, 2), keepdim=True)
    expected = interpolate(unit[:, None], (16, 12), mode="bilinear", align_corners=False)[:, 0]
    torch.testing.assert_close(cam.maps, expected)
    assert torch.equal(cam.target, net.eval()(x).argmax(1))


@pytest.mark.parametrize("given", [2, [0, 4, 2], torch.tensor([0, 4, 2])], ids=repr)
def test_a_target_is_what_is_explained(net, x, given):
    cam = gradcam(net, x, "layer2", given)
    classes = torch.as_tensor(given).expand(3)
    expected = by_hand(net, x, "gradcam", lambda y: y.gather(1, classes[:, None]).sum())
    torch.testing.assert_close(cam.raw, expected, rtol=1e-4, atol=1e-7)
    assert torch.equal(cam.target, classes)


def test_a_short_summary_is_printed(net, x):
    cam = gradcam(net, x)
    shown = f"CAM(layer='layer2', target={cam.target.tolist()}, maps=(3, 16, 12), raw=(3, 8, 6) "
    assert repr(cam).startswith(shown)


@pytest.mark.parametrize("factor", [1e-12, 1e-4, 1.0, 1e6])
def test_maps_do_not_depend_on_the_size_of_the_score(net, x, factor):
    one = gradcam(net, x, "layer2", lambda y: y[:, 1])
    other = gradcam(net, x, "layer2", lambda y: y[:, 1] * factor)
    assert one.maps.amax() > 0.8
    torch.testing.assert_close(other.maps, one.maps)


def test_a_changed_result_keeps_the_name_of_the_layer(net, x):
    cam = gradcam(net, x, "layer2")
    other = cam._replace(raw=cam.raw * 2)
    assert other.layer == "layer2"
    torch.testing.assert_close(other.raw, cam.raw * 2)


def test_a_function_chooses_from_any_output(net, x):
    several = gradcam(net, x, "layer2", lambda y: y[:, 1] + y[:, 3])
    expected = by_hand(net, x, "gradcam", lambda y: (y[:, 1] + y[:, 3]).sum())
    torch.testing.assert_close(several.raw, expected, rtol=1e-4, atol=1e-7)
    assert several.target is None
    total = gradcam(net, x, "layer2", lambda y: (y[:, 1] + y[:, 3]).sum())
    assert torch.equal(total.raw, several.raw)


def test_segmentation_explains_the_layer_before_the_map_of_classes():
    class Segments(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU())
            self.classes = nn.Conv2d(8, 5, 1)

        def forward(self, x):
            return {"out": interpolate(self.classes(self.body(x)), x.shape[2:])}

    model, x = Segments(), torch.randn(2, 3, 16, 12)
    cam = gradcam(model, x, target=lambda y: y["out"][:, 2].mean((1, 2)))
    assert cam.layer == "body"
    with pytest.raises(ValueError, match=r'target=lambda output: output\["out"\]\[:, 3\]'):
        gradcam(model, x)


def test_frozen_parameters_and_a_callers_modes(net, x):
    expected = gradcam(net, x)
    net.requires_grad_(False)
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            cam = gradcam(net, x.clone())
        assert torch.equal(cam.maps, expected.maps)
    assert torch.equal(gradcam(net, x.clone().requires_grad_()).maps, expected.maps)


def test_a_compiled_model_runs_its_eager_module(net, x):
    expected = gradcam(net, x)
    compiled = torch.compile(net, backend="eager")
    compiled(x)
    for wrapped in (compiled, torch.optim.swa_utils.AveragedModel(net)):
        assert torch.equal(gradcam(wrapped, x).maps, expected.maps)
    torch._dynamo.reset()


def test_a_layer_that_returns_a_tuple(x):
    class Pair(nn.Conv2d):
        def forward(self, x):
            y = super().forward(x)
            return y, 1, y * 2

    class Model(nn.Sequential):
        def forward(self, x):
            return self[0](x)[2].mean((2, 3))

    model = Model(Pair(3, 4, 3))
    doubled, plain = (gradcam(model, x, "0", index=index).raw for index in (2, 0))
    assert plain.shape == (3, 14, 10)
    torch.testing.assert_close(plain, doubled)  # half the value, twice the gradient


def test_what_is_attached_is_paused(net, x, hook_count):
    expected = gradcam(net, x)
    spec = {"layer1.*": DropBlock2d(0.5, 3, active="always"), "layer2.*": ClampGrad(-1e-9, 1e-9)}
    attached, before = attach(net, spec), hook_count(net)
    assert torch.equal(gradcam(net, x).maps, expected.maps)
    with attached.always():
        assert torch.equal(gradcam(net, x, "layer2.1").maps, expected.maps)
    assert attached.enabled
    assert hook_count(net) == before


def test_it_is_counted_nowhere(net, x):
    schedule = LinearSchedule(0.0, 0.1, epochs=3)
    attached = attach(net, {"layer2.*": [DropBlock2d(schedule, 3), Capture()]})
    gradcam(net, x)
    assert [finding.kind for finding in attached.verify()] == ["not_run"]
    with pytest.raises(RuntimeError, match="nothing was captured"):
        attached.captured()
    for _ in range(4):  # no validations, after which a schedule that nobody steps is told
        net.train()(x)
        gradcam(net, x)
    assert [finding.kind for finding in attached.verify()] == ["not_stepped"]
    assert {site.calls for site in attached} == {4}
    net.eval()(x)
    assert {site.calls for site in attached} == {5}


def random_net(net):
    """With modes of its own in every module, gradients, and random numbers in evaluation."""
    net.layer1.append(nn.BatchNorm2d(8))
    net(torch.randn(2, 3, 16, 16)).sum().backward()
    net.stem.bias.requires_grad_(False)
    net.train()
    net.layer1[0].eval()
    net.layer1.register_forward_hook(lambda m, args, y: y + 0.01 * torch.randn_like(y))
    return net


@pytest.mark.parametrize(
    "options",
    [{}, {"layer": "fc"}, {"target": lambda y: 1 / 0}],
    ids=["default", "no_map", "raises"],
)
def test_nothing_is_changed(net, x, options):
    model = random_net(net)
    before, given = state(model), x.clone()
    if not options:
        assert torch.equal(gradcam(model, x).maps, gradcam(model, x).maps)
    else:
        with pytest.raises((ValueError, ZeroDivisionError)):
            gradcam(model, x, **options)
    assert state(model) == before
    assert torch.equal(x, given)
    assert torch.is_grad_enabled()


def test_a_forward_in_the_same_autocast_still_trains(net, x):
    """Up to torch 2.9, a cast that was made under no_grad() is used again, without its graph."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradcam(net, x)
        net(x).float().sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_tokens_before_the_last_attention():
    torch.manual_seed(0)
    model, x = Tokens(), torch.randn(2, 3, 16, 16)
    cam = gradcam(model, x)
    assert cam.layer == "layers.1.norm1"
    assert cam.raw.shape == (2, 4, 4)
    assert cam.maps.shape == (2, 16, 16)
    cause = "'layers.1': the gradient is 0 at all places .* class token only"
    with pytest.raises(ValueError, match=cause):
        gradcam(model, x, "layers.1")
    assert gradcam(model, x, "layers.0").raw.shape == (2, 4, 4)


def test_tokens_whose_mean_is_read():
    torch.manual_seed(0)
    model, x = Tokens(pooled=True), torch.randn(2, 3, 16, 16)
    cam = gradcam(model, x)
    assert cam.layer == "layers.1"  # and not a norm on a branch inside it
    assert torch.equal(cam.raw, gradcam(model, x, "layers.1").raw)


class Residual(nn.Module):
    """A residual block that returns a tuple; its branch returns a tensor."""

    def __init__(self, passes_on):
        super().__init__()
        self.branch, self.passes_on = nn.Conv2d(4, 4, 3, padding=1), passes_on

    def forward(self, x):
        y = x + self.branch(x)
        return (x, y) if self.passes_on else (y, None)


class Blocks(nn.Module):
    """A stem, a residual block that returns a tuple, and a head."""

    def __init__(self, passes_on=False):
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 4, 3), Residual(passes_on)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        pair = self.block(self.stem(x))
        return self.fc(pair[self.block.passes_on].mean((2, 3)))


def test_a_block_that_returns_a_tuple_comes_before_its_branch(x):
    torch.manual_seed(0)
    model = Blocks()
    cam = gradcam(model, x)
    assert cam.layer == "block"
    assert torch.equal(cam.raw, gradcam(model, x, "block", index=0).raw)
    assert torch.equal(cam.raw, gradcam(model, x, index=0).raw)
    with pytest.raises(ValueError, match="'block': .* tuple"):
        gradcam(model, x, "block")


def test_an_input_that_a_block_passes_on_is_not_its_map(x):
    torch.manual_seed(0)
    model = Blocks(passes_on=True)
    assert gradcam(model, x).layer == "block.branch"


def test_a_grid_that_must_be_told():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 5)

        def forward(self, x):
            return self.head(self.embed(x.flatten(2).transpose(1, 2)).mean(1))

    model, x = Mixed(), torch.randn(2, 3, 4, 6)
    with pytest.raises(ValueError, match="24 tokens .* say grid=, .height, width."):
        gradcam(model, x, "embed")
    assert gradcam(model, x, "embed", grid=(4, 6), prefix_tokens=0).raw.shape == (2, 4, 6)


def test_a_map_that_is_nowhere_positive_is_told(x):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(4, 2))
    nn.init.constant_(model[-1].weight[0], -1.0)
    nn.init.constant_(model[-1].weight[1], 1.0)
    with pytest.warns(HookWarning, match="no position at layer '1' raises .* image 0, 2: the wei"):
        cam = gradcam(model, x, target=[0, 1, 0])
    assert not cam.maps[[0, 2]].any()
    assert cam.maps[1].any()


def test_a_gradient_of_zero(net, x):
    nn.init.zeros_(net.fc.weight)
    with pytest.raises(ValueError, match="'layer2': the gradient is 0 at all .*weights of 0"):
        gradcam(net, x, "layer2")
    with pytest.raises(ValueError, match="no layer fits, of .* tried; name one .* the gradient is"):
        gradcam(net, x)


def test_values_that_are_not_finite(net, x):
    net.layer2.register_forward_hook(lambda m, args, y: y * torch.nan)
    with pytest.raises(ValueError, match="'layer2': its output, .* holds NaN or Inf"):
        gradcam(net, x, "layer2", target=1)


class Awkward(nn.Module):
    """Layers that Grad-CAM can't look at."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.unused, self.aside = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.cut = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        x = self.features(x)
        self.aside(x)
        return self.fc(self.pool(x + self.cut(x).detach()).flatten(1))


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ("fc", "needs a 4-D tensor .*choose an earlier layer, before the pooling"),
        ("pool", "it must give a map of several positions .* got 3 of 1x1"),
        ("unused", "does not reach the scores: it is not called"),
        ("aside", "does not reach the scores"),
        ("cut", "does not reach the scores"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(x, layer, why):
    message = f"gradcam on .* '{layer}': .*{why}"
    with pytest.raises(ValueError, match=message):
        gradcam(Awkward(), x, layer)


BAD = {
    "several layers": (
        {"layer": "layer1.*"},
        "'layer1.*' must match one layer, and not layer1.0, layer1.1",
    ),
    "no layer": ({"layer": "layr2"}, "'layr2' matches nothing.*closest: layer2"),
    "a method": ({"method": "grad-cam"}, "method must be one of 'gradcam', .*closest: gradcam"),
    "one image": ({"x": torch.randn(3, 16, 16)}, r"x must hold a batch .*\(N, C, H, W\), got"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_values(net, x, options, message):
    with pytest.raises(ValueError, match=message):
        gradcam(net, **{"x": x, **options})


@pytest.mark.parametrize(
    "target", [5, [0, 1, -1], [0, 1], 1.0, True, "cat", [0, None, 1]], ids=repr
)
def test_what_is_no_class_of_each_image(net, x, target):
    with pytest.raises(ValueError, match="target must be a class in 0..4, one for each of 3 image"):
        gradcam(net, x, target=target)


def test_a_function_that_gives_no_score(net, x):
    with pytest.raises(TypeError, match="no tensor but int"):
        gradcam(net, x, target=lambda y: 3)
    with pytest.raises(ValueError, match=r"a score for each of 3 images, .* got shape \(3, 5\)"):
        gradcam(net, x, target=lambda y: y)
    with pytest.raises(ValueError, match="does not reach the scores"):
        gradcam(net, x, "layer2", target=lambda y: y.detach().amax(1))


def test_models_without_a_map(x):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 12, 5))
    with pytest.raises(ValueError, match="no layer fits, of 0 tried; .*none gives a map"):
        gradcam(model, x)
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        gradcam("resnet18", x)


def test_an_output_object_with_a_map_of_logits_is_told(x):
    class Segments(nn.Conv2d):
        def forward(self, x):
            return types.SimpleNamespace(logits=super().forward(x))

    with pytest.raises(ValueError, match=r"target=lambda output: output\.logits\[:, 3\]"):
        gradcam(nn.Sequential(nn.Conv2d(3, 4, 3), Segments(4, 5, 1)), x)
