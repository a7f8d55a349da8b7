"""Gradients bounded by value and by norm, against torch and NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropblock_hooks.functional import clamp_grad, clip_grad_norm

pytestmark = pytest.mark.pairwise

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
EPSILON = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
properties = settings(derandomize=True, deadline=None, max_examples=150)


def identical(a, b):
    """Equal to the bit, so that 0.0 is not -0.0; NaN is NaN."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    same = a.contiguous().view(bits) == b.contiguous().view(bits)
    return a.dtype == b.dtype and (same | (a.isnan() & b.isnan())).all()


def norm_of(x, norm_type, axes=None):
    """The norm in NumPy, in float64, of values divided by the largest: nothing overflows."""
    x = np.abs(x.double().numpy())
    axes = tuple(range(x.ndim)) if axes is None else axes
    largest = x.max(axis=axes, keepdims=True)
    if norm_type == math.inf:
        return largest
    share = x / np.where(largest > 0, largest, 1)
    return largest * (share**norm_type).sum(axis=axes, keepdims=True) ** (1 / norm_type)


# clamp_grad -----------------------------------------------------------------------------------

BOUNDS = [
    (-1.0, 1.0),
    (None, 0.5),
    (-0.5, None),
    (0.0, None),
    (None, 0.0),
    (0.25, 0.75),
    (-2, 0),
    (0.3, 0.3),
]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (4, 3, 5, 6), (0, 3)], ids=str)
@each_dtype
def test_clamp_is_torchs(dtype, shape, bounds):
    grad = torch.randn(shape).to(dtype)
    before = grad.clone()
    clamped = clamp_grad(grad, *bounds)
    assert clamped.dtype == dtype
    assert torch.equal(clamped, torch.clamp(grad, *bounds))
    assert torch.equal(grad, before)


@each_dtype
@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (None, 0.5), (-0.5, None)], ids=str)
def test_clamp_lets_inf_and_nan_pass(bounds, dtype):
    grad = torch.tensor([math.inf, -math.inf, math.nan, 3.0, -3.0], dtype=dtype)
    clamped = clamp_grad(grad, *bounds)
    assert identical(clamped[:3], grad[:3])
    assert torch.equal(clamped[3:], grad[3:].clamp(*bounds))


@pytest.mark.parametrize("bounds", [(-1e6, 1e6), (None, 65_536.0), (-65_536.0, None)], ids=str)
@each_dtype
def test_clamp_takes_bounds_that_the_dtype_does_not_reach(dtype, bounds):
    """A bound of 1 at a loss scale of 65,536 is above all of float16."""
    grad = torch.tensor([-60_000.0, 0.5, 60_000.0, math.inf], dtype=dtype)
    assert torch.equal(clamp_grad(grad, *bounds), grad)


# clip_grad_norm -------------------------------------------------------------------------------

NORMS = [1, 2, 3, 2.5, math.inf]
each_norm = pytest.mark.parametrize("norm_type", NORMS)


@each_norm
@pytest.mark.parametrize("max_norm", [0.01, 1.0, 20.0, 1e4])
@pytest.mark.parametrize("shape", [(), (7,), (4, 3), (4, 3, 5, 6)], ids=str)
def test_clip_is_torchs(shape, max_norm, norm_type):
    """torch adds 1e-6 to the norm, so that it agrees to about 1e-4 where the norm is 0.01."""
    grad = torch.randn(shape)
    parameter = torch.nn.Parameter(torch.empty(shape))
    parameter.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], max_norm, norm_type)
    before = grad.clone()
    clipped = clip_grad_norm(grad, max_norm, norm_type)
    torch.testing.assert_close(clipped, parameter.grad, rtol=1e-4, atol=0)
    assert torch.equal(grad, before)
    if norm < max_norm:
        assert identical(clipped, grad)


GROUPS = [
    pytest.param({"per": "tensor"}, (0, 1, 2, 3), id="tensor"),
    pytest.param({"per": "sample"}, (1, 2, 3), id="sample"),
    pytest.param({"per": "channel"}, (0, 2, 3), id="channel"),
    pytest.param({"per": "channel", "channel_axis": -1}, (0, 1, 2), id="last axis"),
    pytest.param({"per": "channel", "channel_axis": 0}, (1, 2, 3), id="axis 0"),
]


@each_norm
@pytest.mark.parametrize(("options", "axes"), GROUPS)
@each_dtype
def test_clip_per_group_is_numpys(dtype, options, axes, norm_type):
    """Groups of very different size; the bound is the middle one of their norms."""
    sizes = torch.tensor([0.1, 0.3, 1.0, 3.0, 10.0])
    grad = torch.randn(5, 5, 5, 5) * sizes.view(-1, 1, 1, 1) * sizes.view(-1, 1, 1) * sizes
    grad = grad.to(dtype)
    norm = norm_of(grad, norm_type, axes)
    max_norm = float(np.median(norm)) * (0.5 if options["per"] == "tensor" else 1.1)
    clipped = clip_grad_norm(grad, max_norm, norm_type, **options)
    assert clipped.dtype == dtype
    scale = np.minimum(1, max_norm / norm)
    expected = torch.from_numpy(grad.double().numpy() * scale).to(dtype)
    tiny = torch.finfo(dtype).smallest_normal  # float16 loses digits below it
    torch.testing.assert_close(clipped, expected, rtol=2 * EPSILON[dtype] + 1e-7, atol=tiny)
    if EPSILON[dtype] > 1e-4:  # a scale that is rounded to the dtype changes one value in ten
        assert (clipped == expected).float().mean() > 0.98
    below = torch.from_numpy(norm <= max_norm).expand(grad.shape)
    assert identical(clipped[below], grad[below])
    if options["per"] != "tensor":
        assert below.any()
    assert not below.all()


@pytest.mark.parametrize(("options", "axes"), GROUPS)
@each_norm
def test_one_group_that_is_not_finite_passes_and_the_others_are_clipped(norm_type, options, axes):
    grad = torch.randn(4, 3, 5, 6)
    grad[1, 2, 3, 4] = math.inf
    grad[3, 0, 0, 0] = math.nan
    clipped = clip_grad_norm(grad, 0.1, norm_type, **options)
    bad = ~grad.isfinite()
    for axis in axes:
        bad = bad.any(axis, keepdim=True)
    bad = bad.expand(grad.shape)
    assert identical(clipped[bad], grad[bad])
    if options["per"] != "tensor":
        norms = norm_of(torch.where(bad, 0, clipped), norm_type, axes)
        assert norms.max() <= 0.1 * (1 + 1e-5)
        assert (norms > 0.09).any()


@each_norm
@pytest.mark.parametrize("size", [1e30, 3e38, 1e-30, 1e-40])
def test_sizes_whose_squares_float32_does_not_hold(size, norm_type):
    grad = torch.randn(50).clamp(-1, 1) * size
    norm = norm_of(grad, norm_type).item()
    clipped = clip_grad_norm(grad, norm / 4, norm_type)
    torch.testing.assert_close(clipped, grad / 4, rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("per", ["tensor", "sample", "channel"])
def test_numbers_empty_gradients_and_vectors_by_elements(per):
    """On axis 0 every element of a bias is its own group, and so is a gradient without axes."""
    grad, clipped = torch.tensor([0.5, 3.0, -3.0]), torch.tensor([0.5, 1.0, -1.0])
    for one, wanted in zip(grad, clipped, strict=True):
        assert clip_grad_norm(one, 1.0, per=per) == wanted
    if per != "tensor":
        assert torch.equal(clip_grad_norm(grad, 1.0, per=per, channel_axis=0), clipped)
    for shape in ((0, 3, 4), (2, 0, 4)):
        assert clip_grad_norm(torch.empty(shape), 1.0, per=per).shape == shape


@pytest.mark.every(plain=2)
@pytest.mark.parametrize(("options", "axes"), GROUPS)
@pytest.mark.parametrize("norm_type", [1, 2, 3])
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_clip_is_differentiable(max_norm, norm_type, options, axes):
    grad = torch.randn(2, 2, 2, 2, dtype=torch.float64, requires_grad=True)

    def function(grad):
        return clip_grad_norm(grad, max_norm, norm_type, **options)

    assert torch.autograd.gradcheck(function, grad)
    assert torch.autograd.gradgradcheck(function, grad)


@pytest.mark.parametrize("per", ["tensor", "sample", "channel"])
@pytest.mark.parametrize("norm_type", [*NORMS, 20])
@each_dtype
def test_a_second_backward_through_zeros_is_finite(dtype, norm_type, per):
    grad = torch.zeros(2, 3, 4, dtype=dtype, requires_grad=True)
    clip_grad_norm(grad, 1.0, norm_type, per).sum().backward()
    assert torch.equal(grad.grad, torch.ones(2, 3, 4, dtype=dtype))


numbers = st.floats(-(2.0**100), 2.0**100, width=32)  # 1.3e30


@properties
@given(
    st.lists(numbers, min_size=1, max_size=20),
    st.floats(1e-5, 1e30),  # scales stay above 1.2e-38, where float32 begins to lose digits
    st.sampled_from(NORMS),
)
def test_clip_anywhere(values, max_norm, norm_type):
    """Never above the bound, unchanged to the bit below it, and always in the same direction."""
    grad = torch.tensor(values)
    norm = norm_of(grad, norm_type).item()
    clipped = clip_grad_norm(grad, max_norm, norm_type)
    assert norm_of(clipped, norm_type).item() <= max_norm * (1 + 1e-5)
    if norm <= max_norm * (1 - 1e-12):
        assert identical(clipped, grad)
    expected = (grad.double() * (min(1.0, max_norm / norm) if norm else 1.0)).float()
    torch.testing.assert_close(clipped, expected, rtol=1e-5, atol=1e-44)


# Errors ---------------------------------------------------------------------------------------

BAD = [
    (lambda g: clamp_grad(g), ValueError, "min or max must be given"),
    (lambda g: clamp_grad(g, 1.0), ValueError, "min=1 without another bound.*min=-1 and max=1"),
    (lambda g: clamp_grad(g, max=-1.0), ValueError, "max=-1 without another bound.*max=1"),
    (lambda g: clamp_grad(g, 1.0, -1.0), ValueError, "min must be <= max, got min=1, max=-1"),
    (lambda g: clamp_grad(g, math.nan, 1.0), ValueError, "min must be a finite number, got nan"),
    (lambda g: clamp_grad(g, "0", 1.0), TypeError, "min must be a number.*'0'"),
    (lambda g: clip_grad_norm(g, 0.0), ValueError, "max_norm must be > 0, got 0"),
    (lambda g: clip_grad_norm(g, math.nan), ValueError, "max_norm must be a finite number"),
    (lambda g: clip_grad_norm(g, torch.ones(())), TypeError, "max_norm must be a number.*tensor"),
    (lambda g: clip_grad_norm(g, 1.0, 0), ValueError, "norm_type must be"),
    (lambda g: clip_grad_norm(g, 1.0, "inf"), TypeError, "norm_type must be"),
    (lambda g: clip_grad_norm(g, 1.0, per="sampel"), ValueError, "per must be .*'tensor'.*got"),
    (lambda g: clip_grad_norm(g, 1.0, per="channel", channel_axis=1), ValueError, "channel_axis 1"),
    (lambda g: clip_grad_norm(g, 1.0, per="channel", channel_axis=-2), ValueError, "axis -2"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_arguments_are_checked(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ones(3))
