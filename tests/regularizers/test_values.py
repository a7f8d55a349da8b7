"""Regularizers as values: compared, hashed, copied, shown; their rates, and what is refused."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch

import dropblock_hooks
from dropblock_hooks import (
    AdaptiveClipGrad,
    ByDepth,
    CentralizeGrad,
    ClampGrad,
    ClipGradNorm,
    ConstantSchedule,
    CosineSchedule,
    Disout,
    DropBlock1d,
    DropBlock2d,
    DropBlock3d,
    DropGrad2d,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    GradNoise,
    LinearSchedule,
    Observer,
    Probability,
    Regularizer,
    ScaleGrad,
    StepSchedule,
    StochasticDepth,
    WindowSchedule,
    ZeroGrad,
    register,
)

pytestmark = pytest.mark.pairwise

IN_BLOCKS = [DropBlock1d, DropBlock2d, DropBlock3d, Disout]
WITH_P = [
    *(*IN_BLOCKS, Dropout, Dropout1d, Dropout2d, Dropout3d, DropPath, StochasticDepth),
    *(GaussianDropout, DropGrad2d),
]
RATES = {  # the first rate of each class, and its others
    **{cls: ("p", {}) for cls in WITH_P},
    Disout: ("p", {"alpha": 1.0}),
    GaussianNoise: ("std", {}),
    GradNoise: ("std", {}),
    ClampGrad: ("min", {}),
    ClipGradNorm: ("max_norm", {}),
    ScaleGrad: ("scale", {}),
    AdaptiveClipGrad: ("clip_factor", {}),
}
each_class = pytest.mark.parametrize("cls", RATES)

INSTANCES = [
    DropBlock1d(),
    DropBlock2d(p=0.1, block_size=7),
    DropBlock2d(p=0.2, block_size=(3, 5), normalize="sample", share_channels=True),
    DropBlock2d(p=LinearSchedule(0.0, 0.1, epochs=90), calibration="paper", normalize=None),
    DropBlock3d(p=StepSchedule({0: 0.0, 3: 0.2})),
    Disout(),
    Disout(0.2, (3, 5), alpha=LinearSchedule(0.0, 2.0, epochs=9), share_channels=True),
    Dropout(),
    Dropout1d(0.2, layout="NLC"),
    Dropout2d(p=ByDepth(0.0, CosineSchedule(0.0, 0.1, 5)), at="input", index="x"),
    Dropout3d(0.2, index=1),
    DropPath(WindowSchedule(0.1, 0, 5), scale_by_keep=False),
    StochasticDepth(0.1, mode="batch"),
    GaussianNoise(ConstantSchedule(3.0)),
    GaussianDropout(0.9),
    ClampGrad(-1.0, 1.0),
    ClampGrad(max=1.0),
    ClampGrad(min=LinearSchedule(-1.0, -0.1, 5), max=1.0),
    ClipGradNorm(1.0),
    ClipGradNorm(CosineSchedule(10.0, 1.0, 5), norm_type=math.inf, per="sample"),
    ClipGradNorm(1.0, norm_type=1, index=0, at="input"),
    ScaleGrad(-0.1),
    ScaleGrad(StepSchedule({0: 0.0, 5: -1.0}), active="always"),
    ZeroGrad(),
    AdaptiveClipGrad(),
    AdaptiveClipGrad(LinearSchedule(0.1, 0.01, 5), eps=0.1, norm_type=math.inf),
    CentralizeGrad(),
]


@pytest.mark.parametrize("regularizer", INSTANCES, ids=repr)
def test_copies_are_equal_others_are_not_and_all_are_frozen(regularizer):
    shown, names = repr(regularizer), vars(dropblock_hooks) | {"inf": math.inf}
    assert shown.startswith(type(regularizer).__name__ + "(")
    assert "\n" not in shown
    for other in (
        copy.deepcopy(regularizer),
        pickle.loads(pickle.dumps(regularizer)),
        eval(shown, names),
    ):
        assert other == regularizer
        assert hash(other) == hash(regularizer)
        assert repr(other) == shown
    assert [regularizer == other for other in INSTANCES].count(True) == 1
    for name in (*(field.name for field in fields(regularizer)), "something_new"):
        with pytest.raises(FrozenInstanceError):
            setattr(regularizer, name, 0.5)
    assert repr(regularizer) == shown


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DropBlock2d(0.1, (7, 7)), DropBlock2d(0.1, 7)),
        (DropBlock2d(0.1, [3, 5]), DropBlock2d(0.1, (3, 5))),
        (DropBlock2d(0.1, np.int64(3)), DropBlock2d(0.1, 3)),
        (Disout(0.1, [3, 3], 1), Disout(0.1, 3, 1.0)),
        (Dropout(np.float64(0.25)), Dropout(0.25)),
        (Dropout(1), Dropout(1.0)),
    ],
    ids=repr,
)
def test_the_same_in_other_words_is_equal(one, other):
    assert (one, hash(one), repr(one)) == (other, hash(other), repr(other))


# Rates --------------------------------------------------------------------------------------------


@each_class
def test_rates(cls):
    name, others = RATES[cls]
    schedule, one = LinearSchedule(0.1, 0.5, 6), cls(0.1, active="always")
    assert cls(0.1).rates == {name: 0.1, **others}
    assert cls(schedule).rates == {name: schedule, **others}
    assert [cls(schedule).values(t)[name] for t in (0, 5)] == [0.1, 0.5]
    assert one.with_rates(**{name: 0.4}) == cls(0.4, active="always")
    assert one == cls(0.1, active="always")
    with pytest.raises(ValueError, match="has no rate 'q'; its rates: " + name):
        one.with_rates(q=0.4)
    with pytest.raises(ValueError, match=f"{name} must be"):
        one.with_rates(**{name: math.nan})


def test_rates_that_may_be_left_out():
    schedule = LinearSchedule(-1.0, -0.1, 10)
    assert ClampGrad(min=schedule, max=1).values(9) == {"min": -0.1, "max": 1.0}
    assert ClampGrad(max=1.0).rates == {"max": 1.0}
    assert ClampGrad(max=1.0).with_rates(min=-1.0) == ClampGrad(-1.0, 1.0)
    assert ZeroGrad().rates == {}
    with pytest.raises(ValueError, match="ZeroGrad has no rate 'scale'; its rates: none"):
        ZeroGrad().with_rates(scale=1.0)
    low, high = LinearSchedule(-1.0, 2.0, 5), LinearSchedule(0.0, 3.0, 5)
    assert ClampGrad(low, high).values(4) == {"min": 2.0, "max": 3.0}


NO_RATES = [
    pytest.param(math.nan, ValueError, "must be .*got nan", id="nan"),
    pytest.param(math.inf, ValueError, "must be .*got inf", id="inf"),
    pytest.param("0.1", TypeError, "must be a number.*'0.1'.*write 0.1", id="text"),
    pytest.param(True, TypeError, "must be a number.*True", id="bool"),
    pytest.param(torch.tensor(0.1), TypeError, "must be a number.*tensor", id="tensor"),
    pytest.param([0.1], TypeError, r"must be a number.*\[0.1\]", id="list"),
    pytest.param(LinearSchedule, TypeError, r"the class LinearSchedule: write", id="class"),
]


@each_class
@pytest.mark.parametrize(("rate", "error", "message"), NO_RATES)
def test_rates_are_checked(rate, error, message, cls):
    with pytest.raises(error, match=f"^{RATES[cls][0]} .*{message}"):
        cls(rate)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Disout(alpha=-0.1), ValueError, "alpha .*got -0.1"),
        (lambda: Dropout(None), TypeError, "must be a number.*None"),
        (lambda: DropPath(), TypeError, "missing 1 required positional argument"),
        (ClampGrad, ValueError, "min or max must be given"),
        (lambda: ClampGrad(1.0, -1.0), ValueError, "min must be <= max, got min=1, max=-1"),
        (lambda: GaussianDropout(1.0), ValueError, r"p must be in \[0, 1\), got 1"),
        (lambda: AdaptiveClipGrad(eps=0.0), ValueError, "eps must be > 0, got 0.0"),
        (lambda: ClipGradNorm(0), ValueError, "max_norm must be > 0, got"),
        (lambda: ClipGradNorm(LinearSchedule(1.0, 0.0, 5)), ValueError, "max_norm must be > 0"),
        (lambda: ClipGradNorm(ByDepth(-1.0, 1.0)), ValueError, "max_norm must be > 0, got"),
        (lambda: ClipGradNorm(1.0, 0), ValueError, "norm_type must be"),
        (lambda: ClipGradNorm(1.0, "2"), TypeError, "norm_type must be"),
        (lambda: ClipGradNorm(1.0, per="sampel"), ValueError, "per must be .*'sample'.*got"),
        (lambda: StochasticDepth(0.1, "rwo"), ValueError, "mode must be one of 'row', 'batch'"),
        (lambda: StochasticDepth(0.1, at="input"), ValueError, "output of a block: at='output'"),
        (lambda: Dropout(0.1, "input"), TypeError, "positional"),
        (lambda: DropBlock2d(0.1, share_channels="false"), TypeError, "share_channels must be"),
        (lambda: DropPath(0.1, scale_by_keep="no"), TypeError, "scale_by_keep must be"),
        (lambda: DropBlock2d(normalize="bacth"), ValueError, "normalize must be .*'bacth'"),
        (lambda: DropBlock3d(calibration="exakt"), ValueError, "calibration must be .*'exact'"),
    ],
)
def test_arguments_are_checked(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("cls", WITH_P)
@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (1.3, "got 1.3"),
        (-0.1, "got -0.1"),
        (LinearSchedule(0.0, 1.5, 5), "which reaches 1.5"),
        (CosineSchedule(-0.1, 0.5, 5), "which reaches -0.1"),
        (WindowSchedule(0.1, 0, 5, outside=-1), "which reaches -1"),
        (ByDepth(0.1, LinearSchedule(0.1, 1.5, 5)), "which reaches 1.5"),
    ],
    ids=repr,
)
def test_p_outside_of_the_unit_interval_is_refused(rate, message, cls):
    with pytest.raises(ValueError, match=r"^p must be in \[0, 1.*" + message) as caught:
        cls(rate)
    assert repr(rate) in str(caught.value)


@pytest.mark.parametrize("cls", WITH_P)
def test_a_plain_function_is_checked_when_it_is_called(cls):
    regularizer = cls(lambda t: t / 10)
    assert regularizer.values(5) == {"p": 0.5, **RATES[cls][1]}
    with pytest.raises(ValueError, match=r"p must be in \[0, 1[])], got 1.1 at t=11"):
        regularizer.values(11)


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


# Options that all share ---------------------------------------------------------------------------


@each_class
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"at": "ouput"}, ValueError, "at"),
        ({"active": "trian"}, ValueError, r"active must be .*got 'trian' \(closest: train\)"),
        ({"layout": "aoto"}, ValueError, r"layout must be .*got 'aoto' \(closest: auto\)"),
        ({"index": True}, TypeError, "index must be an integer or a key, got"),
        ({"probability": 0.1}, TypeError, "probability"),
    ],
    ids=str,
)
def test_shared_options_are_checked(options, error, message, cls):
    with pytest.raises(error, match=message):
        cls(0.1, **options)


@pytest.mark.parametrize(
    ("cls", "taken", "refused", "closest"),
    [
        (DropBlock1d, ["NCL", "NLC"], "NCHW", "NCL"),
        (DropBlock2d, ["NCHW", "NHWC"], "NHCW", "NHWC"),
        (Dropout2d, ["NCHW", "NHWC"], "NWC", "NHWC"),
        (Dropout3d, ["NCDHW", "NDHWC"], "NDHW", "NDHWC"),
        (Dropout, ["NCL", "NLC", "NCHW", "NHWC", "NCDHW", "NDHWC"], "NHCW", "NHWC"),
    ],
)
def test_layouts_are_those_of_its_rank(cls, taken, refused, closest):
    assert [cls(0.1, layout=layout).layout for layout in ("auto", *taken)] == ["auto", *taken]
    with pytest.raises(ValueError, match=rf"layout must be one of .*got '{refused}'.*{closest}"):
        cls(0.1, layout=refused)


# Classes of one's own -----------------------------------------------------------------------------


def test_a_class_must_define_its_methods():
    @register(name="TestWithoutApply")
    class WithoutApply(Regularizer):
        p: Probability = 0.1

    with pytest.raises(TypeError, match=r"WithoutApply must define apply\(x, now\)"):
        WithoutApply()

    @register(name="TestWithoutCompute")
    class WithoutCompute(Observer):
        def start(self):
            return {}

        def update(self, state, seen):
            pass

    with pytest.raises(NotImplementedError, match=r"WithoutCompute must define compute\(state\)"):
        WithoutCompute().compute({})
