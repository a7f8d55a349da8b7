"""The classes against the functions."""

import pytest
import torch

import dropblock_hooks as r

pytestmark = pytest.mark.pairwise

SHAPES = {1: (6, 5, 12), 2: (6, 5, 8, 9), 3: (6, 5, 4, 6, 5)}
DROP_BLOCKS = [r.DropBlock1d, r.DropBlock2d, r.DropBlock3d]


def now(layer_input=None, **rates):
    return r.Now(input=layer_input, layout="", training=True, grad_scale=1.0, **rates)


def run(regularizer, x, layer_input=None, seed=3):
    torch.manual_seed(seed)
    return regularizer.apply(x, now(layer_input, **regularizer.values(0.0)))


def at_seed(function, *arguments, seed=3, **options):
    torch.manual_seed(seed)
    return function(*arguments, **options)


# Class against function -------------------------------------------------------------------------

ELEMENTWISE = [
    (r.Dropout(0.3), (0.3,)),
    (r.Dropout1d(0.3), (0.3,)),
    (r.Dropout2d(0.3), (0.3,)),
    (r.Dropout3d(0.3), (0.3,)),
    (r.DropPath(0.3), (0.3,)),
    (r.DropPath(0.3, scale_by_keep=False), (0.3, True, False)),
    (r.GaussianNoise(0.3), (0.3,)),
    (r.GaussianDropout(0.3), (0.3,)),
]


@pytest.mark.parametrize(
    ("regularizer", "arguments"),
    [pytest.param(*case, id=str(case[0])) for case in ELEMENTWISE],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_is_the_functions(dtype, regularizer, arguments):
    x = torch.randn(SHAPES[regularizer.spatial or 2]).to(dtype)
    y, dropped = run(regularizer, x)
    assert torch.equal(y, at_seed(regularizer.function, x, *arguments))
    if "Gaussian" in regularizer.label:
        assert dropped is None
    else:
        assert dropped == (y == 0).sum()


@pytest.mark.parametrize("cls", DROP_BLOCKS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"calibration": "paper"},
        {"normalize": "sample"},
        {"normalize": None},
        {"share_channels": True, "normalize": "sample", "calibration": "paper"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("block_size", [1, 2, 3, 50, "per axis"])
def test_drop_block_is_the_functions(block_size, options, cls):
    if block_size == "per axis":
        block_size = (2, 3, 1)[: cls.spatial]
    x = torch.randn(SHAPES[cls.spatial])
    y, dropped = run(cls(0.3, block_size, **options), x)
    assert torch.equal(y, at_seed(cls.function, x, 0.3, block_size, **options))
    assert dropped == (y == 0).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share_channels", [False, True])
@pytest.mark.parametrize("block_size", [1, 3, (2, 3), 50], ids=str)
def test_disout_is_the_functions(block_size, share_channels, dtype):
    x = torch.randn(SHAPES[2]).to(dtype)
    y, distorted = run(r.Disout(0.3, block_size, 0.5, share_channels), x)
    expected = at_seed(
        r.functional.disout, x, 0.3, block_size, alpha=0.5, share_channels=share_channels
    )
    assert torch.equal(y, expected)
    if dtype is torch.float32:  # in which a small distortion is seldom rounded away
        assert distorted == (y != x).sum()


@pytest.mark.parametrize("mode", ["row", "batch"])
def test_stochastic_depth_is_the_functions(mode):
    for seed in range(10):
        block, shortcut = torch.randn(2, 6, 5, 8, 9)
        y, dropped = run(r.StochasticDepth(0.4, mode), block, shortcut, seed)
        expected = at_seed(
            r.functional.stochastic_depth, block, 0.4, mode, shortcut=shortcut, seed=seed
        )
        assert torch.equal(y, expected)
        assert dropped == (y == shortcut).sum()


def test_stochastic_depth_without_an_input_of_the_same_shape_is_refused():
    with pytest.raises(ValueError, match=r"needs the block's input .* got NoneType"):
        run(r.StochasticDepth(0.4), torch.ones(2, 3), None)
    with pytest.raises(ValueError, match=r"input \(2, 4\) and output \(2, 3\).*use DropPath"):
        run(r.StochasticDepth(0.4), torch.ones(2, 3), torch.ones(2, 4))
