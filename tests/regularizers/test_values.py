"""Regularizers as values: compared, hashed, copied, shown; their rates, and what is refused."""

import copy
import math
import pickle
import re
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch

import dropblock_hooks as r
from tests.classes import own_regularizers

pytestmark = pytest.mark.pairwise

IN_BLOCKS = [r.DropBlock1d, r.DropBlock2d, r.DropBlock3d, r.Disout]
WITH_P = [
    *(*IN_BLOCKS, r.Dropout, r.Dropout1d, r.Dropout2d, r.Dropout3d, r.DropPath, r.StochasticDepth),
    *(r.GaussianDropout, r.DropGrad2d),
]
RATES = {  # the first rate of each class, and its others
    **{cls: ("p", {}) for cls in WITH_P},
    r.Disout: ("p", {"alpha": 1.0}),
    r.GaussianNoise: ("std", {}),
    r.GradNoise: ("std", {}),
    r.ClampGrad: ("min", {}),
    r.ClipGradNorm: ("max_norm", {}),
    r.ScaleGrad: ("scale", {}),
    r.AdaptiveClipGrad: ("clip_factor", {}),
    r.AdaGC: ("ratio", {"max_norm": 1.0}),
    r.ZClip: ("z", {}),
    r.SkipUpdate: ("max_norm", {}),
}
each_class = pytest.mark.parametrize("cls", RATES)

INSTANCES = [
    r.DropBlock2d(p=0.2, block_size=(3, 5), normalize="sample", share_channels=True),
    r.DropBlock2d(p=r.LinearSchedule(0.0, 0.1, epochs=90), calibration="paper", normalize=None),
    r.Disout(0.2, (3, 5), alpha=r.LinearSchedule(0.0, 2.0, epochs=9), share_channels=True),
    r.Dropout1d(0.2, layout="NLC"),
    r.Dropout2d(p=r.ByDepth(0.0, r.CosineSchedule(0.0, 0.1, 5)), at="input", index="x"),
    r.DropPath(r.WindowSchedule(0.1, 0, 5), scale_by_keep=False),
    r.StochasticDepth(0.1, mode="batch"),
    r.GaussianNoise(r.ConstantSchedule(3.0)),
    r.GaussianDropout(0.9),
    r.ClampGrad(-1.0, 1.0),
    r.ClampGrad(min=r.LinearSchedule(-1.0, -0.1, 5), max=1.0),
    r.ClipGradNorm(r.CosineSchedule(10.0, 1.0, 5), norm_type=math.inf, per="sample"),
    r.ClipGradNorm(1.0, norm_type=1, index=0, at="input"),
    r.ScaleGrad(r.StepSchedule({0: 0.0, 5: -1.0}), active="always"),
    r.ZeroGrad(),
    r.AdaptiveClipGrad(r.LinearSchedule(0.1, 0.01, 5), eps=0.1, norm_type=math.inf),
    r.AdaptiveClipGrad(0.02, group=True),
    r.CentralizeGrad(),
    r.AdaGC(r.LinearSchedule(2.0, 1.05, 5), group=True, decay=0.9),
    r.ZClip(3.0, max_norm=1.0, group=False),
    r.SkipUpdate(z=r.StepSchedule({0: 8.0, 5: 6.0}), warmup=100),
]


UNITS = {
    **dict.fromkeys(["GaussianDropout", "GaussianNoise", "Disout", "ClipGradNorm"], None),
    **dict.fromkeys(["DropBlock1d", "DropBlock2d", "DropBlock3d"], "blocks"),
    **dict.fromkeys(["Dropout1d", "Dropout2d", "Dropout3d"], "channels"),
    **dict.fromkeys(["DropPath", "StochasticDepth"], "samples"),
    "Dropout": "elements",
}


def test_what_each_class_drops():
    classes = own_regularizers()
    assert {name: classes[name].unit for name in UNITS} == UNITS


MADE_OF_FIELDS = [  # whose values follow from fields
    r.Capture(gradients=True, detach=False, reduce="channels", device="cpu", dtype=torch.float16),
    r.Foreign(torch.nn.Dropout, p=r.LinearSchedule(0.0, 0.1, epochs=3)),
    r.Retune(0.1).fitted("p", r.Dropout(), read_elsewhere=True),
    r.Watchdog("nonfinite"),
]


@pytest.mark.parametrize("regularizer", [*INSTANCES, *MADE_OF_FIELDS], ids=repr)
def test_check_stores_nothing(regularizer):
    before = dict(vars(regularizer))
    regularizer.check(regularizer.values(2.0))
    after = vars(regularizer)
    assert list(after) == list(before)
    assert [name for name in after if after[name] is not before[name]] == []


@pytest.mark.parametrize("regularizer", INSTANCES, ids=repr)
def test_copies_are_equal_others_are_not_and_all_are_frozen(regularizer):
    shown, names = repr(regularizer), vars(r) | {"inf": math.inf}
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
        (r.DropBlock2d(0.1, (7, 7)), r.DropBlock2d(0.1, 7)),
        (r.DropBlock2d(0.1, [3, 5]), r.DropBlock2d(0.1, (3, 5))),
        (r.DropBlock2d(0.1, np.int64(3)), r.DropBlock2d(0.1, 3)),
        (r.Dropout(index=np.int64(1)), r.Dropout(index=1)),
        (r.Disout(0.1, [3, 3], 1), r.Disout(0.1, 3, 1.0)),
        (r.Dropout(np.float64(0.25)), r.Dropout(0.25)),
        (r.Dropout(1), r.Dropout(1.0)),
    ],
    ids=repr,
)
def test_the_same_in_other_words_is_equal(one, other):
    assert (one, hash(one), repr(one)) == (other, hash(other), repr(other))


# Rates --------------------------------------------------------------------------------------------


@each_class
def test_rates(cls):
    name, others = RATES[cls]
    low, middle, high = (0.1, 0.4, 0.5) if cls is not r.ClampGrad else (-0.1, -0.4, -0.5)
    schedule, one = r.LinearSchedule(low, high, 6), cls(low, active="always")
    assert cls(low).rates == {name: low, **others}
    assert cls(schedule).rates == {name: schedule, **others}
    assert [cls(schedule).values(t)[name] for t in (0, 5)] == [low, high]
    assert one.with_rates(**{name: middle}) == cls(middle, active="always")
    assert one == cls(low, active="always")
    with pytest.raises(ValueError, match="has no rate 'q'; its rates: " + name):
        one.with_rates(q=0.4)
    with pytest.raises(ValueError, match=f"{name} must be"):
        one.with_rates(**{name: math.nan})


def test_rates_that_may_be_left_out():
    schedule = r.LinearSchedule(-1.0, -0.1, 10)
    assert r.ClampGrad(min=schedule, max=1).values(9) == {"min": -0.1, "max": 1.0}
    assert r.ClampGrad(max=1.0).rates == {"max": 1.0}
    assert r.ClampGrad(max=1.0).with_rates(min=-1.0) == r.ClampGrad(-1.0, 1.0)
    assert r.ZeroGrad().rates == {}
    with pytest.raises(ValueError, match="ZeroGrad has no rate 'scale'; its rates: none"):
        r.ZeroGrad().with_rates(scale=1.0)
    low, high = r.LinearSchedule(-1.0, 2.0, 5), r.LinearSchedule(0.0, 3.0, 5)
    assert r.ClampGrad(low, high).values(4) == {"min": 2.0, "max": 3.0}


NO_RATES = [
    pytest.param(math.nan, ValueError, "must be .*got nan", id="nan"),
    pytest.param("0.1", TypeError, "must be a number.*'0.1'.*write 0.1", id="text"),
    pytest.param(True, TypeError, "must be a number.*True", id="bool"),
    pytest.param(torch.tensor(0.1), TypeError, "must be a number.*tensor", id="tensor"),
    pytest.param(r.LinearSchedule, TypeError, r"the class LinearSchedule: write", id="class"),
]


@each_class
@pytest.mark.parametrize(("rate", "error", "message"), NO_RATES)
def test_rates_are_checked(rate, error, message, cls):
    with pytest.raises(error, match=f"^{RATES[cls][0]} .*{message}"):
        cls(rate)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: r.Dropout(None), TypeError, "must be a number.*None"),
        (r.ClampGrad, ValueError, "min or max must be given"),
        (lambda: r.ClampGrad(1.0, -1.0), ValueError, "min must be <= max, got min=1, max=-1"),
        (lambda: r.ClampGrad(0.5), ValueError, "^min=0.5 without.*write.*min=-0.5 and max=0.5"),
        (lambda: r.ClampGrad(max=-2.0), ValueError, "^max=-2 without.*write.*min=-2 and max=2"),
        (lambda: r.DropBlock2d(p=10), ValueError, r"p must be .*got 10 \(10 % is 0.1\)"),
        (lambda: r.DropBlock2d(p=1.3), ValueError, r"p must be in \[0, 1\], got 1.3$"),
        (lambda: r.GaussianDropout(1.0), ValueError, r"p must be in \[0, 1\), got 1"),
        (lambda: r.ClipGradNorm(0), ValueError, "max_norm must be > 0, got"),
        (lambda: r.ClipGradNorm(r.LinearSchedule(1.0, 0.0, 5)), ValueError, "max_norm must be > 0"),
        (lambda: r.ClipGradNorm(1.0, 0), ValueError, "norm_type must be"),
        (lambda: r.ClipGradNorm(1.0, per="sampel"), ValueError, "per must be .*'sample'.*got"),
        (lambda: r.StochasticDepth(0.1, "rwo"), ValueError, "mode must be one of 'row', 'batch'"),
        (lambda: r.StochasticDepth(0.1, at="input"), ValueError, "output of a block: at='output'"),
        (lambda: r.DropBlock2d(0.1, share_channels="false"), TypeError, "share_channels must be"),
        (lambda: r.DropBlock2d(normalize="bacth"), ValueError, "normalize must be .*'bacth'"),
        *[
            (lambda i=i: r.Dropout(index=i), TypeError, "^index must be an integer or a key, got")
            for i in (1.5, True, b"x", [0], (0, 1), torch.ones(2))
        ],
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
        (r.LinearSchedule(0.0, 1.5, 5), "which reaches 1.5"),
        (r.CosineSchedule(-0.1, 0.5, 5), "which reaches -0.1"),
        (r.ByDepth(0.1, r.LinearSchedule(0.1, 1.5, 5)), "which reaches 1.5"),
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


def test_bounds_that_cross_later_are_refused_then():
    """``step`` checks the values of each time before it moves."""
    regularizer = r.ClampGrad(r.LinearSchedule(-1.0, 2.0, 5), r.LinearSchedule(1.0, -2.0, 5))
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
    ],
    ids=str,
)
def test_shared_options_are_checked(options, error, message, cls):
    with pytest.raises(error, match=message):
        cls(0.1, **options)


@pytest.mark.parametrize(
    ("cls", "taken", "refused", "closest"),
    [
        (r.DropBlock1d, ["NCL", "NLC"], "NCHW", "NCL"),
        (r.DropBlock2d, ["NCHW", "NHWC"], "NHCW", "NHWC"),
        (r.Dropout2d, ["NCHW", "NHWC"], "NWC", "NHWC"),
        (r.Dropout, ["NCL", "NLC", "NCHW", "NHWC", "NCDHW", "NDHWC"], "NHCW", "NHWC"),
    ],
)
def test_layouts_are_those_of_its_rank(cls, taken, refused, closest):
    assert [cls(0.1, layout=layout).layout for layout in ("auto", *taken)] == ["auto", *taken]
    with pytest.raises(ValueError, match=rf"layout must be one of .*got '{refused}'.*{closest}"):
        cls(0.1, layout=refused)


# Classes of one's own -----------------------------------------------------------------------------


def test_a_class_must_define_its_methods():
    @r.register(name="TestWithoutApply")
    class WithoutApply(r.Regularizer):
        p: r.Probability = 0.1

    with pytest.raises(TypeError, match=r"WithoutApply must define apply\(x, now\)"):
        WithoutApply()

    @r.register(name="TestWithoutCompute")
    class WithoutCompute(r.Observer):
        def update(self, state, seen):
            pass

    with pytest.raises(TypeError, match=r"WithoutCompute must define compute\(\)"):
        WithoutCompute()


@pytest.mark.parametrize("names", ["self, x", "self", "self, x, now, more"])
def test_apply_takes_the_tensor_and_now(names):
    methods = {}
    exec(f"def apply({names}): pass", methods)
    message = f"Mine.apply must take (self, x, now), got ({names}): write `def apply(self, x, now)`"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        type("Mine", (r.Regularizer,), {"apply": methods["apply"]})


def test_apply_may_have_other_parameters():
    class Mine(r.Regularizer):
        def apply(self, x, *rest, scale=1):
            return x, None

    assert Mine().apply(1, None) == (1, None)


def test_an_assignment_is_answered_with_what_to_write():
    @r.register(name="TestWithInit")
    class WithInit(r.Regularizer):
        def __init__(self, p=0.1):
            self.p = p

        def apply(self, x, now):
            return x, None

    class Grown(r.Dropout):
        pass

    with pytest.raises(FrozenInstanceError, match=r"'p' of WithInit, .*`p: Probability = 0.1`"):
        WithInit()
    for cls in (r.Dropout, Grown):
        with pytest.raises(FrozenInstanceError, match=r"write attached.set\(\.\.\., p=\.\.\.\)"):
            cls().p = 0.2
    Grown().more = 1  # only fields are frozen in a subclass that is not registered
