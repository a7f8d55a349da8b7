"""The classes against the functions, their constructors, and what they are as values."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch
from torch import nn

import dropblock_hooks
from dropblock_hooks import (
    ByDepth,
    ClampGrad,
    ClipGradNorm,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    Now,
    ScaleGrad,
    StepSchedule,
    ZeroGrad,
    functional,
)
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
    regularized, changed = regularizer.apply(view.take(grad), now)
    return view.put(regularized, grad), changed


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


def test_a_scale_of_one_returns_the_same_object():
    grad = torch.randn(4, 3)
    assert run(ScaleGrad(1.0), grad)[0] is grad


@each_dtype
def test_zero_grad_is_zeros(dtype):
    grad = torch.tensor([1.0, -2.0, math.inf, math.nan], dtype=dtype)
    zeros, changed = run(ZeroGrad(), grad)
    assert torch.equal(zeros, torch.zeros(4, dtype=dtype))
    assert changed is None


@pytest.mark.parametrize(
    "regularizer", [ClampGrad(-0.1, 0.1), ClipGradNorm(0.1), ScaleGrad(2.0), ZeroGrad()], ids=repr
)
def test_the_gradient_given_is_left_alone(regularizer):
    """It belongs to autograd, and other branches of the graph may read it."""
    grad = torch.randn(4, 3, 5, 6)
    before = grad.clone()
    assert not torch.equal(run(regularizer, grad)[0], grad)
    assert torch.equal(grad, before)


@pytest.mark.parametrize(
    "regularizer", [ClampGrad(-0.1, 0.1), ClipGradNorm(0.1), ScaleGrad(2.0), ZeroGrad()], ids=repr
)
@pytest.mark.parametrize("shape", [(0, 3, 5, 6), (2, 0, 5, 6)], ids=str)
def test_zero_size_batches(shape, regularizer):
    assert run(regularizer, torch.empty(shape))[0].shape == shape


# Loss scales (AMP) ------------------------------------------------------------------------------

SCALES = [2.0, 1024.0, 65_536.0]


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "regularizer",
    [
        ClampGrad(-0.1, 0.05),
        ClampGrad(max=0.1),
        ClipGradNorm(1.0),
        ClipGradNorm(0.95, per="sample"),
    ],
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


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize(
    "regularizer", [ClampGrad(-1.0, 1.0), ClampGrad(max=1.0), ClipGradNorm(1.0)], ids=repr
)
def test_overflow_stays_visible_in_float16(regularizer, as_tensor):
    """At 65,536 a bound of 1 is above all of float16: finite values pass, and so does Inf."""
    grad = torch.tensor([[1000.0, math.inf, -3.0, math.nan]], dtype=torch.float16)
    scale = torch.tensor(65_536.0) if as_tensor else 65_536.0
    passed, changed = run(regularizer, grad, "", scale)
    assert passed.dtype == torch.float16
    torch.testing.assert_close(passed, grad, rtol=0, atol=0, equal_nan=True)
    assert changed == 0


# Values: compared, hashed, copied, shown ----------------------------------------------------------

INSTANCES = [
    ClampGrad(-1.0, 1.0),
    ClampGrad(max=1.0),
    ClampGrad(min=LinearSchedule(-1.0, -0.1, 5), max=1.0),
    ClipGradNorm(1.0),
    ClipGradNorm(CosineSchedule(10.0, 1.0, 5), norm_type=math.inf, per="sample"),
    ClipGradNorm(1.0, norm_type=1, index=0, at="input"),
    ScaleGrad(-0.1),
    ScaleGrad(StepSchedule({0: 0.0, 5: -1.0}), active="always"),
    ZeroGrad(),
    ZeroGrad(at="input"),
]
each_instance = pytest.mark.parametrize("regularizer", INSTANCES, ids=repr)


@each_instance
def test_copies_are_equal(regularizer):
    names = vars(dropblock_hooks) | {"inf": math.inf}
    for other in (
        copy.deepcopy(regularizer),
        pickle.loads(pickle.dumps(regularizer)),
        eval(repr(regularizer), names),
    ):
        assert other == regularizer
        assert hash(other) == hash(regularizer)
        assert repr(other) == repr(regularizer)


@each_instance
def test_different_ones_are_not_equal(regularizer):
    assert [regularizer == other for other in INSTANCES].count(True) == 1


@each_instance
def test_frozen(regularizer):
    for field in fields(regularizer):
        with pytest.raises(FrozenInstanceError):
            setattr(regularizer, field.name, 0.5)


@each_instance
def test_they_act_on_gradients_and_have_no_block(regularizer):
    assert regularizer.acts_on == "gradient"
    assert regularizer.block_in_force((14, 14)) is None


def test_rates():
    schedule = LinearSchedule(-1.0, -0.1, 10)
    regularizer = ClampGrad(min=schedule, max=1)
    assert regularizer.rates == {"min": schedule, "max": 1.0}
    assert regularizer.values(9) == {"min": -0.1, "max": 1.0}
    assert regularizer.moving
    assert ClampGrad(max=1.0).rates == {"max": 1.0}
    assert not ClampGrad(max=1.0).moving
    assert ZeroGrad().rates == {}
    assert ClampGrad(max=1.0).with_rates(min=-1.0) == ClampGrad(-1.0, 1.0)
    with pytest.raises(ValueError, match="ZeroGrad has no rate 'scale'; its rates: none"):
        ZeroGrad().with_rates(scale=1.0)


def test_a_moving_bound_is_the_one_of_the_time():
    grad = torch.tensor([[-5.0, 5.0]])
    regularizer = ClampGrad(LinearSchedule(-4.0, 0.0, 5), 1.0)
    assert torch.equal(run(regularizer, grad, t=0)[0], torch.tensor([[-4.0, 1.0]]))
    assert torch.equal(run(regularizer, grad, t=3)[0], torch.tensor([[-1.0, 1.0]]))


def test_clipping_per_sample_refuses_parameters():
    parameter = nn.Parameter(torch.ones(3))
    refusal = ClipGradNorm(1.0, per="sample").refusal(nn.Linear(2, 3), parameter)
    assert "a parameter has no samples" in refusal
    assert ClipGradNorm(1.0, per="sample").refusal(nn.Linear(2, 3), None) is None
    assert ClipGradNorm(1.0, per="channel").refusal(nn.Linear(2, 3), parameter) is None


# Constructor errors -----------------------------------------------------------------------------

NO_NUMBERS = [
    pytest.param(math.nan, ValueError, "must be .*got nan", id="nan"),
    pytest.param(math.inf, ValueError, "must be .*got inf", id="inf"),
    pytest.param("1", TypeError, "must be a number.*'1'.*write 1", id="text"),
    pytest.param(True, TypeError, "must be a number.*True", id="bool"),
    pytest.param(torch.tensor(1.0), TypeError, "must be a number.*tensor", id="tensor"),
    pytest.param([1.0], TypeError, "must be a number", id="list"),
    pytest.param(LinearSchedule, TypeError, "got the class LinearSchedule", id="class"),
]
FIELDS = {
    "min": lambda v: ClampGrad(min=v, max=10.0),
    "max": lambda v: ClampGrad(max=v),
    "max_norm": ClipGradNorm,
    "scale": ScaleGrad,
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(("value", "error", "message"), NO_NUMBERS)
def test_rates_are_checked(value, error, message, field):
    with pytest.raises(error, match=f"^{field} {message.replace('got the', '.*the')}"):
        FIELDS[field](value)


@pytest.mark.parametrize("field", ["max_norm", "scale"])
def test_none_is_no_rate_where_one_is_needed(field):
    with pytest.raises(TypeError, match=f"{field} must be a number.*None"):
        FIELDS[field](None)


@pytest.mark.parametrize(
    "max_norm",
    [0, 0.0, -1.0, LinearSchedule(1.0, 0.0, 5), ConstantSchedule(-1.0), ByDepth(-1.0, 1.0)],
    ids=repr,
)
def test_max_norm_is_above_zero(max_norm):
    with pytest.raises(ValueError, match="max_norm must be > 0, got"):
        ClipGradNorm(max_norm)


def test_min_is_not_above_max():
    with pytest.raises(ValueError, match="min must be <= max, got min=1, max=-1"):
        ClampGrad(1.0, -1.0)
    assert ClampGrad(0.5, 0.5).min == 0.5


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (LinearSchedule(-1.0, 2.0, 5), 1.0),
        (-1.0, StepSchedule({0: 1.0, 4: -2.0})),
        (LinearSchedule(-1.0, 2.0, 5), LinearSchedule(1.0, -2.0, 5)),
    ],
    ids=repr,
)
def test_bounds_that_cross_later_are_refused_then(low, high):
    """``step`` checks the values of each time before it moves."""
    regularizer = ClampGrad(low, high)
    regularizer.check(regularizer.values(0))
    with pytest.raises(ValueError, match="min must be <= max"):
        regularizer.check(regularizer.values(4))


def test_bounds_that_move_together_are_taken():
    low, high = LinearSchedule(-1.0, 2.0, 5), LinearSchedule(0.0, 3.0, 5)
    assert ClampGrad(low, high).values(4) == {"min": 2.0, "max": 3.0}


def test_a_bound_must_be_given():
    with pytest.raises(ValueError, match="min or max must be given"):
        ClampGrad()


@pytest.mark.parametrize("per", ["sampel", None, 0])
def test_per_is_checked(per):
    with pytest.raises(ValueError, match="per must be .*'sample'.*got"):
        ClipGradNorm(1.0, per=per)


@pytest.mark.parametrize(
    ("norm_type", "error"),
    [
        (0, ValueError),
        (-2, ValueError),
        (-math.inf, ValueError),
        (math.nan, ValueError),
        ("2", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
    ids=str,
)
def test_norm_type_is_checked(norm_type, error):
    with pytest.raises(error, match="norm_type must be"):
        ClipGradNorm(1.0, norm_type)


@pytest.mark.parametrize("cls", [ClampGrad, ClipGradNorm, ScaleGrad])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": "ouput"}, r"at must be one of 'output', 'input', got 'ouput' \(closest: output"),
        ({"active": "trian"}, r"active must be one of .*got 'trian' \(closest: train\)"),
        ({"layout": "NHCW"}, r"layout must be one of .*got 'NHCW' \(closest: NHWC"),
    ],
    ids=str,
)
def test_shared_options_are_checked(options, message, cls):
    with pytest.raises(ValueError, match=message):
        cls(1.0, **options)


@pytest.mark.parametrize("cls", [ClipGradNorm, ScaleGrad])
def test_rates_without_a_default_must_be_given(cls):
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        cls()
