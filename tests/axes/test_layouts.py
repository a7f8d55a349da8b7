"""How the axes of a layer's tensors are read: views, what the model tells, what is refused."""

import copy

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
    SiteError,
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
    return [site._live.reader.last for site in run(model, spec, *inputs)[1]]


class Attention(nn.Module):
    """Heads on axis 1."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv, self.drop = 2, nn.Linear(8, 16), nn.Identity()

    def forward(self, x):
        n, length, _ = x.shape
        return self.drop(self.qkv(x).reshape(n, length, 2, 8).transpose(1, 2))


def as_stage(model):
    model.feature_info = [{"module": "0", "num_chs": 6, "reduction": 1}]
    return model


MAPS = (2, 3, 5, 7)
BLOCK = DropBlock2d(0.1, 3)
SEEN, SEEN_ALONE = ActivationStats(index=0), ActivationStats()
READ = {
    "a convolution": (nn.Conv2d(3, 4, 1), {".": BLOCK}, MAPS, "NCHW"),
    "a block": (Turned(6), {".": BLOCK}, MAPS, "NHWC"),
    "what surrounds it": (
        nn.Sequential(Turned(6), nn.ReLU(), nn.Linear(6, 7), nn.Identity()),
        {"1": BLOCK, "3": BLOCK}, MAPS, "NHWC NHWC",
    ),
    "said of a stage": (
        as_stage(nn.Sequential(Turned(6))), {"stage:0": DropBlock2d(0.1, 3, layout="NCHW")}, MAPS,
        "NCHW",
    ),
    "a recurrent layer": (
        nn.Sequential(nn.Conv1d(3, 7, 1), nn.GRU(4, 5, batch_first=True)), {"1": SEEN}, (2, 3, 4),
        "NLC",
    ),
    "samples first": (
        nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), {".": Dropout1d(0.1)}, (2, 5, 8),
        "NLC",
    ),
    "a Linear in windows": (
        nn.Sequential(nn.Linear(8, 16)), {"0": [SEEN_ALONE, ClipGradNorm(1.0, per="channel")]},
        (32, 2, 2, 8), "NHWC NHWC",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_what_is_read(case):
    model, spec, shape, layouts = READ[case]
    found = forms(copy.deepcopy(model), spec, torch.randn(shape))
    assert " ".join(form.layout for form in found) == layouts


ENCODER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=False)
MIXED = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), ENCODER)
REFUSED = {
    "as many channels as rows": (
        Turned(6).requires_grad_(False), {".": BLOCK}, (2, 3, 6, 6),
        r"can't tell the channels of shape \(2, 6, 6, 6\).*layout=",
    ),
    "a layout that is impossible": (
        nn.Conv2d(3, 6, 1), {".": DropBlock2d(0.1, 3, layout="NHWC")}, MAPS,
        "contradicts the layer: a Conv2d gives NCHW",
    ),
    "a layout of another rank": (
        Turned(6), {".": DropBlock2d(0.1, 3, layout="NLC")}, MAPS,
        r"needs a 3-D tensor \(N, L, C\), got shape \(2, 5, 7, 6\)",
    ),
    "a map after the pooling": (
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), {"1": BLOCK}, MAPS,
        r"got shape \(2, 3\). The layer gives no map: choose an earlier layer, before the pooling$",
    ),
    "a map of a Linear": (
        nn.Linear(4, 6), {".": BLOCK}, (2, 4), r"shape \(2, 6\). Use Dropout on a Linear layer$",
    ),
    "a class of another rank": (
        nn.Conv2d(3, 6, 1), {".": DropBlock1d(0.1)}, MAPS, "Use DropBlock2d on a 4-D tensor$",
    ),
    "a dropout of another rank": (
        nn.Conv3d(3, 6, 1), {".": Dropout2d(0.1)}, (*MAPS, 3), "Use Dropout3d on a 5-D tensor$",
    ),
    "heads are no rows": (
        nn.Sequential(Attention()), {"0.drop": BLOCK}, (2, 9, 8),
        r"2x9 may be no map: .* has heads \(2\)",
    ),
    "samples second": (ENCODER, {".": Dropout1d(0.1)}, (5, 2, 8), "batch_first=False"),
    "samples second in the model": (MIXED, {"1": Dropout1d(0.5)}, (5, 2, 4), "batch_first=False"),
    "a square is never guessed": (
        nn.Linear(8, 8), {".": BLOCK}, (2, 16, 8), r"its 16 tokens.*grid=, \(height, width\)",
    ),
    "a grid for maps": (
        nn.Conv2d(3, 4, 1), {".": Dropout2d(0.1, grid=(5, 5))}, MAPS, "are for tokens, .* NCHW",
    ),
    **{
        str(options): (Tokens(), {"blocks.1": DropBlock2d(0.1, 3, **options)}, (2, 3, 8, 12), text)
        for options, text in (
            ({"grid": (5, 6)}, r"25 tokens \(L\), 0 or 1 of them .*: 4x6 with 1 in front, not 5x6"),
            ({"grid": (6, 4)}, "4x6 with 1 in front, not 6x4"),
            ({"grid": (4, 6), "prefix_tokens": 3}, r"25 tokens \(L\), 3 of them before"),
            ({"prefix_tokens": 2}, "2 of them before the map, .* maps of 4x6; say grid="),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    model, spec, shape, message = REFUSED[case]
    with pytest.raises(SiteError, match=message):
        run(copy.deepcopy(model), spec, torch.randn(shape))


def test_maps_that_code_may_have_turned_are_refused_without_a_graph():
    class Last(nn.Sequential):
        def forward(self, x):
            return super().forward(x).permute(0, 2, 3, 1)

    model, x = nn.Sequential(Last(nn.Conv2d(3, 6, 1)), nn.LayerNorm(6)), torch.randn(2, 3, 6, 6)
    attached = attach(model, {"0": DropBlock2d(0.1, 3)})
    with torch.no_grad(), pytest.raises(SiteError, match="can't tell the channels"):
        model.train()(x)
    model(x)
    assert attached.sites[0].layout == "NHWC"


def test_tokens_are_a_map_of_the_models_grid():
    y, (site,) = run(Tokens(), {"blocks.1": DropBlock2d(0.3, 3)}, torch.randn(16, 3, 8, 12))
    assert site._live.reader.last == View("NLC", (4, 6), 1)
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


def test_gradients_reach_the_tokens_before_the_map():
    model, x = Tokens(prefix=2), torch.randn(2, 3, 8, 12)
    y, _ = run(model, {"blocks.1": DropBlock2d(1.0, 3)}, x)
    y.square().sum().backward()
    assert (model.cls_token.grad != 0).any()
    assert (model.patch_embed.proj.weight.grad == 0).all()


def test_blocks_that_are_called_without_their_model_have_no_grid():
    model = Tokens()
    attach(model, {"blocks.1": DropBlock2d(0.1, 3)})
    with pytest.raises(SiteError, match="no known grid; say grid="):
        model.train().blocks[1](torch.randn(2, 25, 8))


def test_tokens_out_of_the_order_of_rows_form_no_map():
    class Unroll(nn.Module):
        def forward(self, x):
            return x

    model = Tokens()
    model.unroll = Unroll()
    attach(model, {"blocks.0": DropBlock2d(0.1, 3), "blocks.1": DropBlock2d(0.1, 3, grid=(4, 6))})
    with pytest.raises(SiteError, match="blocks.0.*no known grid; say grid="):
        model.train()(torch.randn(2, 3, 8, 12))


def test_tokens_of_a_volume():
    model = nn.Sequential(nn.Linear(8, 8))
    spec = {"0": DropBlock3d(0.3, 2, grid=(2, 3, 4), prefix_tokens=1)}
    y, (site,) = run(model, spec, torch.randn(2, 25, 8))
    assert site.map_size == (2, 3, 4)
    assert site.block_size == (2, 2, 2)
    assert (y[:, 0] != 0).any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DropBlock2d(0.1, grid=(3,)), "grid must have 2 axes for DropBlock2d"),
        (lambda: DropBlock2d(0.1, grid=(3, 0)), "each axis of grid must be an integer >= 1"),
        (lambda: DropBlock1d(0.1, grid=(9,)), "acts on the tokens themselves"),
        (lambda: Dropout(0.1, prefix_tokens=1), "acts on the tokens themselves"),
        (lambda: DropBlock2d(0.1, prefix_tokens=-1), "prefix_tokens must be an integer >= 0"),
    ],
)
def test_options_that_mean_nothing(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_channels_of_gradients_are_those_of_the_activation():
    model, weight = Turned(6), torch.tensor([1.0, 2.0, 3.0, 4.0, 0.01, 6.0])
    attach(model, {"norm": ClipGradNorm(2.0, per="channel")})
    model(torch.randn(2, 3, 5, 5)).mul(weight).sum().backward()
    clipped = (weight * 50**0.5).clamp(max=2.0)  # the norm over 2 x 5 x 5 places
    assert torch.allclose(model.norm.bias.grad, clipped * 50**0.5, rtol=1e-4)
