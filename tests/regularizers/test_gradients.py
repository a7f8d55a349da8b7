"""The classes against the functions."""

import math

import numpy as np
import pytest
import torch

from dropblock_hooks import ClampGrad, ClipGradNorm, Now, ScaleGrad, ZeroGrad, functional
from dropblock_hooks.axes.view import View

pytestmark = pytest.mark.pairwise

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def run(regularizer, grad, layout="NCHW", grad_scale=1.0, t=0.0):
    now = Now(
        input=None, layout=layout, training=True, grad_scale=grad_scale, **regularizer.values(t)
    )
    if not regularizer.channelwise:
        return regularizer.apply(grad, now)
    view = View(layout)
    regularized, changed = regularizer.apply(view.to_maps(grad), now)
    return view.from_maps(regularized, grad), changed


# Class against function -------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("bounds", [(-0.5, 1.0), (None, 0.5), (-0.5, None)], ids=str)
def test_clamp_grad_is_the_functions(bounds, dtype):
    grad = torch.randn(4, 3, 5, 6).to(dtype)
    grad[0, 0, 0, :2] = torch.tensor([math.inf, math.nan])
    clamped, changed = run(ClampGrad(*bounds), grad)
    expected = functional.clamp_grad(grad, *bounds)
    torch.testing.assert_close(clamped, expected, rtol=0, atol=0, equal_nan=True)
    finite = grad.isfinite()
    assert changed == (clamped[finite] != grad[finite]).sum()
    assert changed > 0


@each_dtype
@pytest.mark.parametrize("norm_type", [1, 2.0, 3, math.inf])
@pytest.mark.parametrize(
    ("per", "layout", "options"),
    [
        ("tensor", "NCHW", {}),
        ("sample", "NCHW", {}),
        ("channel", "NCHW", {}),
        ("channel", "", {}),
        ("channel", "NHWC", {"channel_axis": -1}),
        ("channel", "parameter", {"channel_axis": 0}),
        ("tensor", "parameter", {}),
    ],
)
def test_clip_grad_norm_is_the_functions(per, layout, options, norm_type, dtype):
    grad = torch.randn(4, 3, 5, 6).to(dtype)
    limit = {1: 60.0, 2.0: 8.0, 3: 4.0, math.inf: 3.0}[norm_type] / (1 + (per == "sample"))
    clipped, changed = run(ClipGradNorm(limit, norm_type, per), grad, layout)
    expected = functional.clip_grad_norm(grad, limit, norm_type, per, **options)
    assert torch.equal(clipped, expected)
    assert changed == sum(
        part.numel() for part, old in groups(clipped, grad, per, options) if (part != old).any()
    )


def groups(clipped, grad, per, options):
    """The parts of two tensors that share a norm."""
    if per == "tensor":
        return [(clipped, grad)]
    axis = 0 if per == "sample" else options.get("channel_axis", 1)
    return zip(clipped.unbind(axis), grad.unbind(axis), strict=True)


@each_dtype
@pytest.mark.parametrize("scale", [-1.0, -0.1, 0.0, 0.5, 3])
def test_scale_grad_multiplies(scale, dtype):
    grad = torch.randn(4, 3).to(dtype)
    scaled, changed = run(ScaleGrad(scale), grad)
    wide = torch.promote_types(dtype, torch.float32)
    expected = grad.to(wide).numpy() * np.array(scale, dtype=str(wide).removeprefix("torch."))
    assert torch.equal(scaled, torch.from_numpy(expected).to(dtype))
    assert changed is None
    assert run(ScaleGrad(1.0), grad)[0] is grad


@pytest.mark.parametrize(
    "regularizer", [ClampGrad(-0.1, 0.1), ClipGradNorm(0.1), ScaleGrad(2.0), ZeroGrad()], ids=repr
)
def test_the_gradient_given_is_left_alone(regularizer):
    """It belongs to autograd, and other branches of the graph may read it."""
    grad = torch.randn(4, 3, 5, 6)
    before = grad.clone()
    assert not torch.equal(run(regularizer, grad)[0], grad)
    assert torch.equal(grad, before)
    for shape in ((0, 3, 5, 6), (2, 0, 5, 6)):
        assert run(regularizer, torch.empty(shape))[0].shape == shape


# Loss scales (AMP) ------------------------------------------------------------------------------

SCALES = [2.0, 1024.0, 65_536.0]


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "regularizer",
    [ClampGrad(-0.1, 0.05), ClipGradNorm(1.0), ClipGradNorm(0.95, per="sample")],
    ids=repr,
)
@each_dtype
def test_bounds_are_of_the_unscaled_loss(dtype, regularizer, scale, as_tensor):
    """Scaling the gradient by a power of two and the bound with it scales the result."""
    scaled = (torch.randn(4, 3, 5, 6) * 0.1 * scale).to(dtype)  # below 65,504, for float16
    expected, changed = run(regularizer, scaled / scale)
    grad_scale = torch.tensor(scale) if as_tensor else scale
    found, found_changed = run(regularizer, scaled, grad_scale=grad_scale)
    assert scaled.isfinite().all()
    assert found.dtype == dtype
    rounding = 2 * torch.finfo(dtype).eps + 1e-7
    torch.testing.assert_close(found / scale, expected, rtol=rounding, atol=1e-7)
    assert found_changed == changed
    assert changed > 0


@pytest.mark.parametrize(
    "regularizer", [ClampGrad(-1.0, 1.0), ClampGrad(max=1.0), ClipGradNorm(1.0)], ids=repr
)
def test_overflow_stays_visible_in_float16(regularizer):
    """At 65,536 a bound of 1 is above all of float16: finite values pass, and so does Inf."""
    grad = torch.tensor([[1000.0, math.inf, -3.0, math.nan]], dtype=torch.float16)
    passed, changed = run(regularizer, grad, "", torch.tensor(65_536.0))
    assert passed.dtype == torch.float16
    torch.testing.assert_close(passed, grad, rtol=0, atol=0, equal_nan=True)
    assert changed == 0
