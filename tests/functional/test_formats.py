"""Every function keeps dtype, shape and memory format, with a scale and without."""

import pytest
import torch

from dropblock_hooks import functional as f

pytestmark = [pytest.mark.usefixtures("form"), pytest.mark.pairwise]  # on every form of the mask

FUNCTIONS = {
    **{
        f"drop_block2d-{n}": lambda x, n=n: f.drop_block2d(x, 0.3, 3, normalize=n)
        for n in ("batch", "sample", "expected", None)
    },
    "disout": lambda x: f.disout(x, 0.3, 3),
    "disout-shared": lambda x: f.disout(x, 0.3, 3, share_channels=True),
    "dropout": lambda x: f.dropout(x, 0.3),
    "dropout2d": lambda x: f.dropout2d(x, 0.3),
    "drop_path": lambda x: f.drop_path(x, 0.5),
    "drop_path-unscaled": lambda x: f.drop_path(x, 0.5, scale_by_keep=False),
    "stochastic_depth": lambda x: f.stochastic_depth(x, 0.5, shortcut=x.detach() * 0.5),
    "stochastic_depth-mixed": lambda x: f.stochastic_depth(
        x, 0.5, shortcut=x.detach().contiguous()
    ),
    "gaussian_noise": lambda x: f.gaussian_noise(x, 0.5),
    "gaussian_dropout": lambda x: f.gaussian_dropout(x, 0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_format(name, channels_last, dtype):
    x = torch.randn(4, 6, 9, 11).to(dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    for leaf in (x, x.clone().requires_grad_(True)):
        y = FUNCTIONS[name](leaf)
        assert y.stride() == x.stride()
        assert (y.dtype, y.shape) == (dtype, x.shape)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_integers_are_refused(name, dtype):
    with pytest.raises((TypeError, RuntimeError)):
        FUNCTIONS[name](torch.ones(4, 6, 9, 11, dtype=dtype))


@pytest.mark.parametrize("p", [1 - 2**-53, 1 - 1e-12, 1e-300])
@pytest.mark.parametrize(("size", "block"), [((56, 56), 5), ((28, 28), 7), ((7, 7), 3), ((5,), 2)])
def test_gamma_at_the_ends(p, size, block):
    assert 0 < f.block_gamma(p, size, block) <= 1


@pytest.mark.parametrize("size", [(0, 5), -1, (14.5, 14), "14"])
def test_a_size_that_is_none(size):
    with pytest.raises(ValueError, match="size must be an integer >= 1"):
        f.block_gamma(0.1, size, 3)
