"""How the axes of a layer's tensors are read: views, what the model tells, what is refused."""

import copy
import pickle

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    ClipGradNorm,
    DropBlock1d,
    DropBlock2d,
    DropBlock3d,
    Dropout,
    Dropout1d,
    Dropout2d,
    Foreign,
    SiteError,
    Spec,
    attach,
)
from dropblock_hooks.axes.view import View


class Turned(nn.Module):
    """A convolution and a norm of last channels: NHWC out of NCHW."""

    def __init__(self, channels=6, eps=1e-5):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 1)
        self.norm = nn.LayerNorm(channels, eps)

    def forward(self, x):
        return self.norm(self.conv(x).permute(0, 2, 3, 1))


class Tokens(nn.Module):
    """A patch embedding, a class token and blocks, as a ViT has them."""

    def __init__(self, grid=(4, 6), width=8, prefix=1, strict=True):
        super().__init__()
        self.patch_embed = Patches(grid, width, strict)
        self.cls_token = nn.Parameter(torch.zeros(1, prefix, width))
        self.blocks = nn.ModuleList([Mlp(width), Mlp(width)])

    def forward(self, x):
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.patch_embed(x)], 1)
        for block in self.blocks:
            x = block(x)
        return x


class Patches(nn.Module):
    def __init__(self, grid, width, strict):
        super().__init__()
        self.grid_size, self.patch_size, self.strict_img_size = grid, (2, 2), strict
        self.proj = nn.Conv2d(3, width, 2, stride=2)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)
        self.act = nn.ReLU()

    def forward(self, x):
        return x + self.act(self.fc(self.norm(x)))


def run(model, spec, *inputs):
    """The output of a training forward, and the sites."""
    attached = attach(model, spec)
    return model.train()(*inputs), attached.sites


def forms(model, spec, *inputs):
    return [site.reader.last for site in run(model, spec, *inputs)[1]]


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (View("NCHW"), (2, 3, 4, 6)),
        (View("NHWC"), (2, 4, 6, 3)),
        (View("NDHWC"), (2, 5, 4, 6, 3)),
        (View("NLC"), (2, 7, 3)),
        (View("NLC", None, 2), (2, 7, 3)),
        (View("NCL", (4, 6), 0), (2, 3, 24)),
        (View("NCL", (4, 6), 1), (2, 3, 25)),
        (View("NLC", (4, 6), 5), (2, 29, 3)),
        (View("NLC", (2, 4, 6), 1), (2, 49, 3)),
    ],
)
def test_a_map_goes_back_to_where_it_came_from(form, shape):
    x = torch.randn(shape)
    inner = form.take(x)
    assert inner.shape[1] == 3
    assert torch.equal(form.put(inner, x), x)
    changed = form.put(torch.zeros_like(inner), x)
    assert changed.count_nonzero() == 2 * 3 * form.prefix
    if form.grid:
        assert inner.shape[2:] == form.grid


@pytest.mark.parametrize("layout", ["NHWC", "NLC", "NCL"])
def test_maps_of_every_order_are_views(layout):
    form = View(layout, None if layout == "NHWC" else (4, 6), 0 if layout == "NHWC" else 1)
    x = torch.randn({"NHWC": (2, 4, 6, 3), "NLC": (2, 25, 3), "NCL": (2, 3, 25)}[layout])
    assert form.take(x)._base is x


def test_the_type_of_a_layer_tells_its_layout():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Turned(6))
    model[1].conv = nn.Conv2d(4, 6, 1)
    spec = {"0": Dropout2d(0.5), "1": Dropout2d(0.5), "1.conv": Dropout2d(0.5)}
    with pytest.warns(UserWarning, match="lie inside others"):
        found = forms(model, spec, torch.randn(2, 3, 5, 5))
    assert [form.layout for form in found] == ["NCHW", "NHWC", "NCHW"]


def test_channels_are_dropped_along_their_own_axis():
    y, _ = run(Turned(6), {".": Dropout2d(0.5)}, torch.randn(8, 3, 5, 5))
    zero = (y == 0).flatten(1, 2)
    assert torch.equal(zero.all(1), zero.any(1))
    assert 0 < zero.all(1).sum() < 48


def test_a_layer_without_width_is_read_by_what_surrounds_it():
    model = nn.Sequential(Turned(6), nn.ReLU(), nn.Linear(6, 7), nn.Identity())
    found = forms(
        model, {"1": DropBlock2d(0.1, 3), "3": DropBlock2d(0.1, 3)}, torch.randn(2, 3, 5, 5)
    )
    assert [form.layout for form in found] == ["NHWC", "NHWC"]


def test_a_relu_of_a_network_with_a_classifier():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    assert forms(model, {"1": DropBlock2d(0.1, 3)}, torch.randn(2, 3, 12, 12)) == [View("NCHW")]


def test_maps_of_concatenated_channels_are_still_channels_first():
    class Concatenated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 5, 1)

        def forward(self, x):
            return torch.cat([self.a(x), self.b(x)], 1)

    assert forms(Concatenated(), {".": Dropout2d(0.1)}, torch.randn(2, 3, 5, 5)) == [View("NCHW")]


def test_without_any_layer_that_tells_it_is_torchs_own_order():
    found = forms(nn.Identity(), {".": DropBlock2d(0.1, 3)}, torch.randn(2, 3, 5, 5))
    assert found == [View("NCHW")]


def test_as_many_channels_as_rows_is_refused():
    x, model = torch.randn(2, 3, 6, 6), Turned(6).requires_grad_(False)
    with pytest.raises(
        SiteError, match=r"can't tell the channels of shape \(2, 6, 6, 6\).*layout="
    ):
        run(model, {".": DropBlock2d(0.1, 3)}, x)
    found = forms(Turned(6), {".": DropBlock2d(0.1, 3, layout="NHWC")}, x)
    assert found == [View("NHWC")]


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (nn.Conv2d(3, 6, 1), "NHWC", "contradicts the layer: a Conv2d gives NCHW"),
        (Turned(6), "NLC", r"needs a 3-D tensor \(N, L, C\), got shape \(2, 5, 7, 6\)"),
    ],
)
def test_a_layout_that_is_impossible(model, layout, message):
    with pytest.raises(SiteError, match=message):
        run(model, {".": DropBlock2d(0.1, 3, layout=layout)}, torch.randn(2, 3, 5, 7))


@pytest.mark.parametrize(
    ("model", "layout"), [(nn.Sequential(nn.Conv2d(3, 6, 1)), "NHWC"), (Turned(6), "NCHW")]
)
def test_a_layout_that_is_said_is_obeyed(model, layout):
    spec = {".": DropBlock2d(0.1, 3, layout=layout)}
    assert forms(model, spec, torch.randn(2, 3, 5, 7)) == [View(layout)]


def test_a_layout_that_is_said_is_obeyed_at_a_stage():
    model = nn.Sequential(Turned(6))
    model.feature_info = [{"module": "0", "num_chs": 6, "reduction": 1}]
    spec = {"stage:0": DropBlock2d(0.1, 3, layout="NCHW")}
    assert forms(model, spec, torch.randn(2, 3, 5, 7)) == [View("NCHW")]


def test_heads_are_no_rows():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.qkv, self.drop = 2, nn.Linear(8, 16), nn.Identity()

        def forward(self, x):
            n, length, _ = x.shape
            return self.drop(self.qkv(x).reshape(n, length, 2, 8).transpose(1, 2))

    with pytest.raises(SiteError, match=r"2x9 may be no map: .* has heads \(2\)"):
        run(nn.Sequential(Attention()), {"0.drop": DropBlock2d(0.1, 3)}, torch.randn(2, 9, 8))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_has_its_channels_last_whatever_is_around_it(kind):
    x, spec = torch.randn(2, 7, 4), ActivationStats(index=0)
    layer = kind(4, 5, batch_first=True)
    assert forms(layer, {".": spec}, x) == [View("NLC")]
    model = nn.Sequential(nn.Conv1d(3, 7, 1), kind(4, 5, batch_first=True))
    assert forms(model, {"1": spec}, torch.randn(2, 3, 4)) == [View("NLC")]


def test_a_linear_has_channels_in_windows_too():
    class PartitionAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.drop = nn.Linear(8, 16), nn.Identity()

        def forward(self, x):
            return self.drop(self.qkv(x))

    model, x = nn.Sequential(PartitionAttention()), torch.randn(32, 2, 2, 8)
    clip = ClipGradNorm(1.0, per="channel")
    spec = {"0.qkv": [ActivationStats(), clip]}
    assert forms(model, spec, x) == [View("NHWC"), View("NHWC")]


def test_sequences_of_an_attention_with_samples_second():
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    with pytest.raises(SiteError, match="batch_first=False"):
        run(layer, {".": Dropout1d(0.1)}, torch.randn(5, 2, 8))
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    assert forms(layer, {".": Dropout1d(0.1)}, torch.randn(2, 5, 8)) == [View("NLC")]


def test_tokens_are_a_map_of_the_models_grid():
    y, (site,) = run(Tokens(), {"blocks.1": DropBlock2d(0.3, 3)}, torch.randn(16, 3, 8, 12))
    assert site.reader.last == View("NLC", (4, 6), 1)
    assert site.map_size == (4, 6)
    assert (y[:, 0] != 0).any()
    zero = (y[:, 1:] == 0).transpose(1, 2).reshape(-1, 4, 6)
    assert 0.2 < zero.double().mean() < 0.4
    blocks = -nn.functional.max_pool2d(-zero.float(), 3, 1)
    covered = nn.functional.max_pool2d(nn.functional.pad(blocks, (2, 2, 2, 2)), 3, 1)
    assert torch.equal(covered.bool(), zero)


def test_tokens_before_the_map_are_left_to_the_bit():
    x, model = torch.randn(4, 3, 8, 12), Tokens(prefix=3)
    bare = model(x)
    y, (site,) = run(model, {"blocks.1": Dropout2d(0.5)}, x)
    assert torch.equal(y[:, :3], bare[:, :3])
    zero = y[:, 3:] == 0
    assert torch.equal(zero.all(1), zero.any(1))
    assert site.total_realized_rate == zero.double().mean()


def test_the_rate_is_of_the_map_alone():
    _, (site,) = run(Tokens(prefix=24), {"blocks.1": Dropout2d(1.0)}, torch.randn(2, 3, 8, 12))
    assert site.realized_rate == 1.0


def test_gradients_reach_the_tokens_before_the_map():
    model, x = Tokens(prefix=2), torch.randn(2, 3, 8, 12)
    y, _ = run(model, {"blocks.1": DropBlock2d(1.0, 3)}, x)
    y.square().sum().backward()
    assert (model.cls_token.grad != 0).any()
    assert (model.patch_embed.proj.weight.grad == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": (5, 6)}, r"25 tokens \(L\), 0 or 1 of them before the map, are not 5x6"),
        ({"grid": (5, 5)}, "are not 5x5 but 4x6 with 1 in front"),
        ({"grid": (6, 4)}, "are not 6x4 but 4x6 with 1 in front"),
        ({"grid": (4, 6), "prefix_tokens": 3}, r"25 tokens \(L\), 3 of them before"),
        ({"prefix_tokens": 2}, "2 of them before the map, are none of the maps of this forward"),
    ],
)
def test_a_grid_or_prefix_that_does_not_fit(options, message):
    with pytest.raises(SiteError, match=message):
        run(Tokens(), {"blocks.1": DropBlock2d(0.1, 3, **options)}, torch.randn(2, 3, 8, 12))


def test_a_square_is_never_guessed():
    with pytest.raises(SiteError, match=r"its 16 tokens.*grid=, \(height, width\)"):
        run(nn.Linear(8, 8), {".": DropBlock2d(0.1, 3)}, torch.randn(2, 16, 8))
    found = forms(nn.Linear(8, 8), {".": Dropout2d(0.1, grid=(2, 8))}, torch.randn(2, 16, 8))
    assert found == [View("NLC", (2, 8), 0)]


def test_blocks_that_are_called_without_their_model_have_no_grid():
    model = Tokens()
    attach(model, {"blocks.1": DropBlock2d(0.1, 3)})
    with pytest.raises(SiteError, match="form no known grid; say grid="):
        model.train().blocks[1](torch.randn(2, 25, 8))


def test_tokens_out_of_the_order_of_rows_form_no_map():
    class Unroll(nn.Module):
        def forward(self, x):
            return x

    model = Tokens()
    model.unroll = Unroll()
    attach(model, {"blocks.0": DropBlock2d(0.1, 3), "blocks.1": DropBlock2d(0.1, 3, grid=(4, 6))})
    with pytest.raises(SiteError, match="blocks.0.*Unroll .* out of the order of rows"):
        model.train()(torch.randn(2, 3, 8, 12))


def test_views_of_many_shapes():
    model = nn.Sequential(nn.Identity())
    (site,) = attach(model, {"0": Dropout2d(0.5)}).sites
    for edge in (*range(1, 600), 1):
        model(torch.ones(1, 1, edge, 1))
    assert site.map_size == (1, 1)
    assert site.active_calls == 600
    assert len(pickle.dumps(site)) < 10_000, "not all shapes are kept"


def test_tokens_of_a_volume():
    model = nn.Sequential(nn.Linear(8, 8))
    spec = {"0": DropBlock3d(0.3, 2, grid=(2, 3, 4), prefix_tokens=1)}
    y, (site,) = run(model, spec, torch.randn(2, 25, 8))
    assert site.map_size == (2, 3, 4)
    assert site.block_size == (2, 2, 2)
    assert (y[:, 0] != 0).any()


def test_a_sequence_can_begin_with_tokens_that_are_left_alone():
    x, model = torch.randn(2, 9, 8), nn.Sequential(nn.Linear(8, 8))
    bare = model(x)
    y, _ = run(model, {"0": DropBlock1d(1.0, 3, prefix_tokens=2)}, x)
    assert torch.equal(y[:, :2], bare[:, :2])
    assert (y[:, 2:] == 0).all()
    with pytest.raises(SiteError, match="prefix_tokens=2 leaves none"):
        model(x[:, :2])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DropBlock2d(0.1, grid=(3,)), "grid must have 2 axes for DropBlock2d"),
        (lambda: DropBlock2d(0.1, grid=(3, 0)), "grid must be integers above 0"),
        (lambda: DropBlock2d(0.1, grid=7), "grid must be integers above 0"),
        (lambda: DropBlock2d(0.1, grid=(3, 3), layout="NHWC"), "not layout='NHWC'"),
        (lambda: DropBlock1d(0.1, grid=(9,)), "needs no map"),
        (lambda: Dropout(0.1, grid=(3, 3)), "needs no map"),
        (lambda: Dropout(0.1, prefix_tokens=1), "needs no map"),
        (lambda: DropBlock2d(0.1, prefix_tokens=-1), "prefix_tokens must be an integer >= 0"),
        (lambda: DropBlock2d(0.1, prefix_tokens=True), "prefix_tokens must be an integer >= 0"),
    ],
)
def test_options_that_mean_nothing(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_grid_for_a_layer_of_maps_is_refused():
    with pytest.raises(SiteError, match=r"are for tokens, but the layer gives NCHW"):
        run(nn.Conv2d(3, 4, 1), {".": Dropout2d(0.1, grid=(5, 5))}, torch.randn(2, 3, 5, 5))


def test_the_options_are_written_and_read():
    spec = Spec({"blocks.*": DropBlock2d(0.1, 3, grid=(4, 6), prefix_tokens=0)})
    assert "grid=(4, 6), prefix_tokens=0" in repr(spec)
    assert Spec.from_yaml(spec.to_yaml()) == spec
    assert Spec.from_json(spec.to_json()) == spec


def test_a_peers_layer_gets_tokens_as_a_map():
    spec = {"blocks.1": Foreign(nn.Dropout2d, p=1.0, grid=(4, 6))}
    y, (site,) = run(Tokens(), spec, torch.randn(2, 3, 8, 12))
    assert (y[:, 1:] == 0).all()
    assert (y[:, 0] != 0).any()
    assert "grid=(4, 6)" in repr(site.regularizer)


def test_channels_of_gradients_are_those_of_the_activation():
    model, weight = Turned(6), torch.tensor([1.0, 2.0, 3.0, 4.0, 0.01, 6.0])
    attach(model, {"norm": ClipGradNorm(2.0, per="channel")})
    model(torch.randn(2, 3, 5, 5)).mul(weight).sum().backward()
    clipped = (weight * 50**0.5).clamp(max=2.0)  # the norm over 2 x 5 x 5 places
    assert torch.allclose(model.norm.bias.grad, clipped * 50**0.5, rtol=1e-4)


def test_facts_are_plain_data():
    model = Tokens()
    (site,) = attach(model, {"blocks.1": DropBlock2d(0.1, 3)}).sites
    assert pickle.loads(pickle.dumps(site.facts)) == site.facts
    copied = copy.deepcopy(model)
    copied.train()(torch.randn(2, 3, 8, 12))


@pytest.mark.parametrize("layer", ["1", "2", "0"])
def test_a_norm_of_whole_maps_does_not_say_where_the_channels_are(layer):
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.LayerNorm([64, 8, 8]), nn.ReLU())
    y, (site,) = run(model, {layer: Dropout2d(0.5, layout="NCHW")}, torch.randn(4, 3, 8, 8))
    assert site.map_size == (8, 8)
    dropped = (y == 0).flatten(2).all(2) if layer != "2" else None
    assert dropped is None or layer == "0" or dropped.any()


@pytest.mark.parametrize("layer", ["1", "2.norm1"])
def test_samples_may_be_axis_1_in_a_model_with_sequences_first(layer):
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=False)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), encoder)
    with pytest.raises(SiteError, match="batch_first=False, whose samples are axis 1"):
        run(model, {layer: Dropout1d(0.5)}, torch.randn(5, 2, 4))
