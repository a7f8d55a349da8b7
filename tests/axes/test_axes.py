"""Where the channels are, and which grid tokens form, in this very forward: right or refused.

Blocks that permute inside are made in many ways and sizes; the truth is what they are made to be.
"""

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    ClipGradNorm,
    DropBlock2d,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    SiteError,
    attach,
)
from dropblock_hooks.axes.view import View
from tests.cases import rest_slow

C = 6


class Block(nn.Module):
    """Convolutions between two orders of the axes, as its `how` says; C channels out."""

    def __init__(self, how, hidden=9):
        super().__init__()
        self.how = how
        self.one, self.two = nn.Conv2d(C, hidden, 3, padding=1), nn.Conv2d(hidden, C, 1)
        if how == "linear":
            self.norm, self.fc = nn.LayerNorm(C), nn.Linear(C, C)

    def forward(self, x):
        return getattr(self, "_" + self.how.replace(" ", "_"))(x)

    def maps(self, x):
        return self.two(nn.functional.gelu(self.one(x)))

    def _permute(self, x):
        return self.maps(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    def _residual(self, x):
        return x + 0.5 * self.maps(x.movedim(-1, 1)).movedim(1, -1).contiguous()

    def _einsum(self, x):
        return torch.einsum("nchw->nhwc", self.maps(torch.einsum("nhwc->nchw", x))).sigmoid()

    def _linear(self, x):
        y = self.maps(self.norm(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.fc(nn.functional.relu(y))

    def _strange_view(self, x):
        y = self.maps(x.permute(0, 3, 1, 2))
        return y.flatten(2).mT.reshape(x.shape)

    def _in_place(self, x):
        return self.maps(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).relu_().add(1)

    def _enters(self, x):
        return self.maps(x.permute(0, 3, 1, 2))

    def _leaves(self, x):
        return self.maps(x).permute(0, 2, 3, 1)

    def _there_and_back(self, x):
        return nn.functional.layer_norm(self.maps(x).permute(0, 2, 3, 1), (C,)).permute(0, 3, 1, 2)


class Stays(nn.Module):
    """Maps of torch's own order, and no code that could turn them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(C, 9, 3, padding=1), nn.Conv2d(9, C, 1)
        self.act = nn.ReLU()

    def forward(self, x):
        return x + self.act(self.two(self.one(x)))


def make(how):
    return Stays() if how == "stays" else Block(how)


LAST = (
    "permute", "residual", "einsum", "linear", "strange view", "in place",
)  # fmt: skip
LAYOUTS = {
    **dict.fromkeys(LAST, ("NHWC", "NHWC")),
    "enters": ("NHWC", "NCHW"),
    "leaves": ("NCHW", "NHWC"),
    "stays": ("NCHW", "NCHW"),
    "there and back": ("NCHW", "NCHW"),
}
SIZES = [(5, 7), (C, 7), (5, C), (C, C), (9, 5), (9, 9), (9, C)]  # 6 and 9 are widths, too
NO_WIDTH_FIRST = [(5, 7), (5, C), (7, 9)]  # docs/limits.md: without a graph, widths must tell


SOME = rest_slow(LAYOUTS, ["permute", "stays"])


def before(layout, size):
    shape = (2, C, *size) if layout == "NCHW" else (2, *size, C)
    return torch.randn(shape, requires_grad=True)


def read(model, x, name=".", **options):
    """The layout that is read, or "refused"."""
    attached = attach(model.train(), {name: Dropout2d(0.5, **options)})
    try:
        model(x)
        return attached.sites[0].layout
    except SiteError as error:
        return "refused" if re.search(r"say .*layout=", str(error)) else str(error)
    finally:
        attached.remove()


@pytest.mark.every(plain=2)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("how", LAYOUTS)
def test_a_block_is_read_by_what_it_does(how, size):
    taken, given = LAYOUTS[how]
    if how == "in place":  # a view that was changed in place has lost its history
        assert read(make(how), before(taken, size)) in (given, "refused")
        return
    assert read(make(how), before(taken, size)) == given
    wrapped = nn.Sequential(make(how), nn.ReLU(), nn.Identity())
    assert read(wrapped, before(taken, size), "0") == given
    assert read(wrapped, before(taken, size), "1") == given
    assert read(wrapped, before(taken, size), "2", at="input") == given
    assert read(wrapped, before(taken, size)) == given


@pytest.mark.every(plain=2)
@pytest.mark.parametrize("size", NO_WIDTH_FIRST, ids=str)
@pytest.mark.parametrize("how", LAYOUTS)
def test_without_a_graph_a_block_is_read_rightly_or_refused(how, size):
    taken, given = LAYOUTS[how]
    frozen = make(how).requires_grad_(False)
    x = before(taken, size).detach()
    assert read(frozen, x) in (given, "refused")
    wrapped = nn.Sequential(make(how), nn.ReLU()).requires_grad_(False)
    assert read(wrapped, x, "1") in (given, "refused")
    if how == "stays":
        assert read(frozen, x) == "NCHW"


@pytest.mark.parametrize("size", [(5, 7), (C, C)], ids=str)
@pytest.mark.parametrize("how", LAYOUTS)
def test_a_layout_that_is_said_is_obeyed(how, size):
    taken, given = LAYOUTS[how]
    for layout in ("NCHW", "NHWC"):
        assert read(make(how), before(taken, size), layout=layout) == layout
    model = make(how)
    attached = attach(model.train(), {".": Dropout2d(0.5, layout=given)})
    y = model(before(taken, size))
    dropped = (y == 0).movedim(1 if given == "NCHW" else -1, 1).flatten(2).all(2).sum().item()
    share = attached.sites[0].realized_rate * y.numel() / (size[0] * size[1])
    assert dropped == round(share)


@pytest.mark.parametrize("how", SOME)
def test_compiled_a_block_is_read_rightly_or_refused(how):
    taken, given = LAYOUTS[how]
    model = nn.Sequential(make(how)).train()
    (site,) = attach(model, {"0": Dropout2d(1.0)}).sites

    def compiled(size):
        torch.compiler.reset()
        return torch.compile(model, fullgraph=True, backend="eager")(before(taken, size))

    if how in ("stays", "enters", "there and back"):
        assert not compiled((5, 7)).any()
    else:
        with pytest.raises(Exception, match=r"say .*layout="):
            compiled((5, 7))
    if how == "in place":  # its history is lost: refused in eager mode, too
        with pytest.raises(SiteError, match="say which with layout="):
            model(before(taken, (5, 7)))
        return
    model(before(taken, (5, 7)))  # one step in eager mode tells for good
    assert site.layout == given
    assert not compiled((C, C)).any()


@pytest.mark.parametrize("shape", [(7,), (1, 2, 2, 2, 2, 7)], ids=str)
def test_a_tensor_with_too_few_or_too_many_axes_is_refused(shape):
    model = nn.Sequential(nn.Linear(7, 7))
    attach(model, {"0": ClipGradNorm(1.0, per="channel")})
    reason = "needs 2 to 5 axes, one of them the channels, got shape"
    with pytest.raises(SiteError, match=rf"0/ClipGradNorm.*{reason} {re.escape(str(shape))}"):
        model(torch.ones(shape))


def test_volumes_and_sequences():
    class Turned(nn.Module):
        def __init__(self, conv):
            super().__init__()
            self.conv = conv

        def forward(self, x):
            return x + self.conv(x.movedim(-1, 1)).movedim(1, -1)

    for conv, regularizer, shape, layout in (
        (nn.Conv3d(4, 4, 1), Dropout3d(0.5), (2, 4, 4, 4, 4), "NDHWC"),
        (nn.Conv3d(4, 4, 1), Dropout3d(0.5), (2, 4, 3, 5, 4), "NDHWC"),
        (nn.Conv1d(4, 4, 1), Dropout1d(0.5), (2, 4, 4), "NLC"),
        (nn.Conv1d(4, 4, 1), Dropout1d(0.5), (2, 7, 4), "NLC"),
    ):
        (site,) = attach(model := Turned(conv).train(), {".": regularizer}).sites
        model(torch.randn(shape))
        assert site.layout == layout


class Vit(nn.Module):
    """A ViT for images of any size, as Transformers has it: positions are interpolated."""

    def __init__(self, image=64, patch=16, width=8, checkpointed=False):
        super().__init__()
        self.embeddings = Embeddings(image, patch, width)
        self.layers = nn.ModuleList([Layer(width), Layer(width)])
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.embeddings(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


class Embeddings(nn.Module):
    def __init__(self, image, patch, width):
        super().__init__()
        self.patch_embeddings = Patches(image, patch, width)
        n = self.patch_embeddings.num_patches
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.position_embeddings = nn.Parameter(torch.randn(1, n + 1, width))

    def positions(self, h, w):
        edge, table = self.patch_embeddings.edge, self.position_embeddings
        grid = table[:, 1:].reshape(1, edge, edge, -1).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, size=(h, w), mode="bicubic")
        return torch.cat([table[:, :1], grid.flatten(2).transpose(1, 2)], 1)

    def forward(self, x):
        p = self.patch_embeddings.patch_size[0]
        positions = self.positions(x.shape[2] // p, x.shape[3] // p)
        x = self.patch_embeddings(x)
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + positions


class Patches(nn.Module):
    def __init__(self, image, patch, width):
        super().__init__()
        self.image_size, self.patch_size = (image, image), (patch, patch)
        self.edge = image // patch
        self.num_patches = self.edge**2
        self.projection = nn.Conv2d(3, width, patch, patch)

    def forward(self, x):
        return self.projection(x).flatten(2).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc(self.norm(x))


SHAPES = [(64, 64), (16, 256), (256, 16), (32, 128), (96, 64), (48, 80), (64, 64)]


def test_tokens_form_the_grid_of_this_image():
    model = Vit().train()
    (site,) = attach(model, {"layers.1": DropBlock2d(0.2, 2)}).sites
    for size in SHAPES:
        model.eval()(torch.randn(2, 3, *reversed(size)))
        model.train()(torch.randn(2, 3, *size))
        assert site._live.reader.last == View("NLC", (size[0] // 16, size[1] // 16), 1)


def test_two_images_of_one_forward_are_not_mixed_up():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = Vit()

        def forward(self, a, b):
            a, b = self.vit.embeddings(a), self.vit.embeddings(b)
            return self.vit.layers[0](a) + self.vit.layers[0](b)

    model = Pair().train()
    attach(model, {"vit.layers.0": DropBlock2d(0.2, 2)})
    model(torch.randn(2, 3, 64, 64), torch.randn(2, 3, 64, 64))
    with pytest.raises(SiteError, match="4x4 with 1 in front or 2x8 with 1 in front"):
        model(torch.randn(2, 3, 64, 64), torch.randn(2, 3, 32, 128))


@pytest.mark.slow
def test_compiled_tokens_form_the_grid_of_this_image():
    model = Vit().train()
    (site,) = attach(model, {"layers.1": Dropout2d(0.5, active="always")}).sites
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for size in ((64, 64), (64, 64), (64, 64)):
        compiled(torch.randn(2, 3, *size))
    assert len(graphs) == 1
    assert site.map_size == (4, 4)
    for size in ((32, 128), (96, 64), (80, 48), (112, 160)):
        compiled(torch.randn(2, 3, *size))
    assert site.map_size == (7, 10)
    assert len(graphs) <= 3, "sizes are dynamic"


def test_a_recomputation_has_the_grid_of_its_own_forward():
    model = Vit(checkpointed=True).train()
    (site,) = attach(model, {"layers.1": DropBlock2d(0.5, 2)}).sites
    for size in SHAPES:
        model(torch.randn(2, 3, *size)).sum().backward()
        assert site._live.reader.last.grid == (size[0] // 16, size[1] // 16)
    a, b = model(torch.randn(2, 3, 64, 64)), model(torch.randn(2, 3, 96, 64))
    a.sum().backward()
    assert site._live.reader.last.grid == (4, 4)
    b.sum().backward()
    assert site._live.reader.last.grid == (6, 4)


def test_a_map_that_was_flattened_in_the_same_forward():
    class Hybrid(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
            self.layer = Layer(8)

        def forward(self, x):
            return self.layer(self.stem(x).flatten(2).transpose(1, 2))

    model = Hybrid().train()
    (site,) = attach(model, {"layer": DropBlock2d(0.2, 2)}).sites
    for size in ((16, 16), (8, 32), (12, 20)):
        model(torch.randn(2, 3, *size))
        assert site._live.reader.last == View("NLC", (size[0] // 4, size[1] // 4), 0)
