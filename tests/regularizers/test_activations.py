"""The classes against the functions, their constructors, and what they are as values."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Literal

import numpy as np
import pytest
import torch

import dropblock_hooks
from dropblock_hooks import (
    ByDepth,
    ConstantSchedule,
    CosineSchedule,
    Disout,
    DropBlock1d,
    DropBlock2d,
    DropBlock3d,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    LinearSchedule,
    Now,
    Probability,
    Regularizer,
    StepSchedule,
    StochasticDepth,
    WindowSchedule,
    functional,
)

pytestmark = pytest.mark.pairwise

SHAPES = {1: (6, 5, 12), 2: (6, 5, 8, 9), 3: (6, 5, 4, 6, 5)}
DROP_BLOCKS = [DropBlock1d, DropBlock2d, DropBlock3d]
EACH = [
    *DROP_BLOCKS,
    Disout,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    StochasticDepth,
    GaussianNoise,
    GaussianDropout,
]
WITH_P = [cls for cls in EACH if cls is not GaussianNoise]
RATE = {cls: "std" if cls is GaussianNoise else "p" for cls in EACH}
OTHERS = {cls: {"alpha": 1.0} if cls is Disout else {} for cls in EACH}
IN_BLOCKS = [*DROP_BLOCKS, Disout]
each_class = pytest.mark.parametrize("cls", EACH)


def now(layer_input=None, **rates):
    return Now(input=layer_input, layout="", training=True, grad_scale=1.0, **rates)


def run(regularizer, x, layer_input=None, seed=3):
    torch.manual_seed(seed)
    return regularizer.apply(x, now(layer_input, **regularizer.values(0.0)))


def at_seed(function, *arguments, seed=3, **options):
    torch.manual_seed(seed)
    return function(*arguments, **options)


# Class against function -------------------------------------------------------------------------

ELEMENTWISE = [
    (Dropout(0.3), functional.dropout, (0.3,)),
    (Dropout1d(0.3), functional.dropout1d, (0.3,)),
    (Dropout2d(0.3), functional.dropout2d, (0.3,)),
    (Dropout3d(0.3), functional.dropout3d, (0.3,)),
    (DropPath(0.3), functional.drop_path, (0.3,)),
    (DropPath(0.3, scale_by_keep=False), functional.drop_path, (0.3, True, False)),
    (GaussianNoise(0.3), functional.gaussian_noise, (0.3,)),
    (GaussianDropout(0.3), functional.gaussian_dropout, (0.3,)),
]


@pytest.mark.parametrize(
    ("regularizer", "function", "arguments"),
    [pytest.param(*case, id=str(case[0])) for case in ELEMENTWISE],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_is_the_functions(dtype, regularizer, function, arguments):
    x = torch.randn(SHAPES[regularizer.spatial or 2]).to(dtype)
    y, dropped = run(regularizer, x)
    assert torch.equal(y, at_seed(function, x, *arguments))
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
        {"normalize": "expected"},
        {"normalize": None},
        {"share_channels": True},
        {"share_channels": True, "normalize": "sample", "calibration": "paper"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("block_size", [1, 2, 3, 50, "per axis"])
def test_drop_block_is_the_functions(block_size, options, cls):
    if block_size == "per axis":
        block_size = (2, 3, 1)[: cls.spatial]
    x = torch.randn(SHAPES[cls.spatial])
    function = getattr(functional, f"drop_block{cls.spatial}d")
    y, dropped = run(cls(0.3, block_size, **options), x)
    assert torch.equal(y, at_seed(function, x, 0.3, block_size, **options))
    assert dropped == (y == 0).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share_channels", [False, True])
@pytest.mark.parametrize("block_size", [1, 3, (2, 3), 50], ids=str)
def test_disout_is_the_functions(block_size, share_channels, dtype):
    x = torch.randn(SHAPES[2]).to(dtype)
    y, distorted = run(Disout(0.3, block_size, 0.5, share_channels), x)
    expected = at_seed(
        functional.disout, x, 0.3, block_size, alpha=0.5, share_channels=share_channels
    )
    assert torch.equal(y, expected)
    if dtype is torch.float32:  # in which a small distortion is seldom rounded away
        assert distorted == (y != x).sum()


@pytest.mark.parametrize("mode", ["row", "batch"])
def test_stochastic_depth_is_the_functions(mode):
    for seed in range(10):
        block, shortcut = torch.randn(2, 6, 5, 8, 9)
        y, dropped = run(StochasticDepth(0.4, mode), block, shortcut, seed)
        expected = at_seed(
            functional.stochastic_depth, block, 0.4, mode, shortcut=shortcut, seed=seed
        )
        assert torch.equal(y, expected)
        assert dropped == (y == shortcut).sum()


def test_stochastic_depth_without_an_input_says_what_is_missing():
    with pytest.raises(ValueError, match=r"needs the block's input .* got NoneType"):
        run(StochasticDepth(0.4), torch.ones(2, 3), None)


def test_stochastic_depth_of_a_block_that_changes_shape_is_refused():
    with pytest.raises(ValueError, match=r"input \(2, 4\) and output \(2, 3\).*use DropPath"):
        run(StochasticDepth(0.4), torch.ones(2, 3), torch.ones(2, 4))


@each_class
def test_a_rate_of_zero_returns_the_same_object_and_draws_nothing(cls):
    x = torch.randn(SHAPES[cls.spatial or 2])
    state = torch.get_rng_state()
    y, dropped = cls(0.0).apply(x, now(torch.zeros_like(x), **cls(0.0).values(0.0)))
    assert y is x
    assert dropped in (0, None)
    assert torch.equal(torch.get_rng_state(), state)


@each_class
def test_the_rate_in_force_is_the_one_of_now(cls):
    """Not the one of the field, which may be a schedule."""
    x = torch.randn(SHAPES[cls.spatial or 2])
    shortcut = torch.randn(x.shape)
    schedule = LinearSchedule(0.0, 0.5, 6)
    results = []
    for regularizer in (cls(schedule), cls(0.2)):
        torch.manual_seed(1)
        rates = regularizer.values(2.0)
        assert rates == {RATE[cls]: 0.2, **OTHERS[cls]}
        results.append(regularizer.apply(x, now(shortcut, **rates))[0])
    assert torch.equal(*results)
    assert not torch.equal(results[0], x)


@each_class
def test_gradients_flow(cls):
    x = torch.randn(SHAPES[cls.spatial or 2], requires_grad=True)
    y, _ = run(cls(0.3), x, torch.zeros(x.shape))
    y.sum().backward()
    assert x.grad.isfinite().all()
    if cls not in (GaussianNoise, Disout):
        assert not torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("cls", DROP_BLOCKS)
def test_all_dropped_is_counted(cls):
    x = torch.randn(SHAPES[cls.spatial])
    y, dropped = run(cls(1.0, 3), x)
    assert torch.equal(y, torch.zeros_like(x))
    assert dropped == x.numel()


@pytest.mark.parametrize("cls", [cls for cls in WITH_P if cls is not GaussianDropout])
def test_zero_size_batches(cls):
    x = torch.empty(0, *SHAPES[cls.spatial or 2][1:])
    y, dropped = run(cls(0.5), x, x.clone())
    assert y.shape == x.shape
    assert dropped == 0


@pytest.mark.parametrize(
    ("block_size", "map_size", "in_force"),
    [
        (7, (14, 14), (7, 7)),
        (7, (4, 14), (4, 7)),
        ((3, 5), (4, 4), (3, 4)),
        (50, (1, 9), (1, 9)),
    ],
)
@pytest.mark.parametrize("cls", [DropBlock2d, Disout])
def test_block_in_force_is_clipped_per_axis(cls, block_size, map_size, in_force):
    assert cls(0.1, block_size).block_in_force(map_size) == in_force


@pytest.mark.parametrize("cls", [Dropout, Dropout2d, DropPath, GaussianNoise])
def test_others_have_no_block(cls):
    assert cls(0.1).block_in_force((14, 14)) is None


# Values: compared, hashed, copied, shown ----------------------------------------------------------

INSTANCES = [
    DropBlock1d(),
    DropBlock2d(p=0.1, block_size=7),
    DropBlock2d(p=0.1, block_size=5),
    DropBlock2d(p=0.2, block_size=(3, 5), normalize="sample", share_channels=True),
    DropBlock2d(p=LinearSchedule(0.0, 0.1, epochs=90), calibration="paper", normalize=None),
    DropBlock3d(p=StepSchedule({0: 0.0, 3: 0.2})),
    Disout(),
    Disout(0.2, (3, 5), alpha=LinearSchedule(0.0, 2.0, epochs=9), share_channels=True),
    Dropout(),
    Dropout(0.2, active="always"),
    Dropout1d(0.2, layout="NLC"),
    Dropout2d(p=ByDepth(0.0, CosineSchedule(0.0, 0.1, 5)), at="input", index="x"),
    Dropout3d(0.2, index=1),
    DropPath(WindowSchedule(0.1, 0, 5), scale_by_keep=False),
    StochasticDepth(0.1, mode="batch"),
    GaussianNoise(ConstantSchedule(3.0)),
    GaussianDropout(0.9),
]
each_instance = pytest.mark.parametrize("regularizer", INSTANCES, ids=repr)


@each_instance
def test_copies_are_equal(regularizer):
    for other in (
        copy.deepcopy(regularizer),
        pickle.loads(pickle.dumps(regularizer)),
        eval(repr(regularizer), vars(dropblock_hooks).copy()),
    ):
        assert other == regularizer
        assert hash(other) == hash(regularizer)
        assert repr(other) == repr(regularizer)


@each_instance
def test_different_ones_are_not_equal(regularizer):
    assert [regularizer == other for other in INSTANCES].count(True) == 1


@each_instance
def test_frozen(regularizer):
    before = repr(regularizer)
    for field in fields(regularizer):
        with pytest.raises(FrozenInstanceError):
            setattr(regularizer, field.name, 0.5)
    with pytest.raises(FrozenInstanceError):
        regularizer.something_new = 1
    assert repr(regularizer) == before


@each_instance
def test_repr_is_one_line(regularizer):
    assert "\n" not in repr(regularizer)
    assert repr(regularizer).startswith(type(regularizer).__name__ + "(")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DropBlock2d(0.1, (7, 7)), DropBlock2d(0.1, 7)),
        (DropBlock2d(0.1, [3, 5]), DropBlock2d(0.1, (3, 5))),
        (DropBlock1d(0.1, (3,)), DropBlock1d(0.1, 3)),
        (DropBlock2d(0.1, np.int64(3)), DropBlock2d(0.1, 3)),
        (Disout(0.1, [3, 3], 1), Disout(0.1, 3, 1.0)),
        (Dropout(np.float64(0.25)), Dropout(0.25)),
        (Dropout(1), Dropout(1.0)),
    ],
    ids=repr,
)
def test_the_same_in_other_words_is_equal(one, other):
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)


@each_class
def test_with_rates_is_a_copy(cls):
    regularizer = cls(0.1, active="always")
    changed = regularizer.with_rates(**{RATE[cls]: 0.4})
    assert changed == cls(0.4, active="always")
    assert regularizer == cls(0.1, active="always")
    with pytest.raises(ValueError, match="has no rate 'q'; its rates: " + RATE[cls]):
        regularizer.with_rates(q=0.4)
    with pytest.raises(ValueError, match=f"{RATE[cls]} must be"):
        regularizer.with_rates(**{RATE[cls]: -0.4})


@each_class
def test_rates_and_moving(cls):
    schedule = LinearSchedule(0.0, 0.5, 6)
    assert cls(0.1).rates == {RATE[cls]: 0.1, **OTHERS[cls]}
    assert not cls(0.1).moving
    assert not cls(ConstantSchedule(0.1)).moving
    assert cls(schedule).rates == {RATE[cls]: schedule, **OTHERS[cls]}
    assert cls(schedule).moving
    assert cls(lambda t: 0.1).moving
    assert [cls(schedule).values(t)[RATE[cls]] for t in (0, 5)] == [0.0, 0.5]


# Constructor errors -----------------------------------------------------------------------------

NO_RATES = [
    pytest.param(-0.1, ValueError, "must be .*got -0.1", id="below"),
    pytest.param(math.nan, ValueError, "must be .*got nan", id="nan"),
    pytest.param(math.inf, ValueError, "must be .*got inf", id="inf"),
    pytest.param("0.1", TypeError, "must be a number.*'0.1'.*write 0.1", id="text"),
    pytest.param(None, TypeError, "must be a number.*None", id="none"),
    pytest.param(True, TypeError, "must be a number.*True", id="bool"),
    pytest.param(torch.tensor(0.1), TypeError, "must be a number.*tensor", id="tensor"),
    pytest.param([0.1], TypeError, r"must be a number.*\[0.1\]", id="list"),
    pytest.param(LinearSchedule, TypeError, r"the class LinearSchedule: write", id="class"),
]


@each_class
@pytest.mark.parametrize(("rate", "error", "message"), NO_RATES)
def test_rates_are_checked(rate, error, message, cls):
    with pytest.raises(error, match=RATE[cls] + " .*" + message):
        cls(rate)


@pytest.mark.parametrize("cls", WITH_P)
@pytest.mark.parametrize("p", [1.3, 2, 1.0000001])
def test_p_above_one_is_refused(p, cls):
    with pytest.raises(ValueError, match=r"p must be in \[0, 1[])], got " + f"{p:g}"[:3]):
        cls(p)


def test_p_of_gaussian_dropout_is_below_one():
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\), got 1"):
        GaussianDropout(1.0)
    assert DropPath(1.0).p == 1.0


@pytest.mark.parametrize(("alpha", "error", "message"), NO_RATES)
def test_alpha_of_disout_is_checked(alpha, error, message):
    with pytest.raises(error, match="alpha .*" + message):
        Disout(alpha=alpha)
    assert Disout(alpha=7).alpha == 7.0


def test_words_and_numbers_of_a_class_of_ones_own_are_checked():
    @dataclass(frozen=True, repr=False)
    class Rounded(Regularizer):
        to: Literal["up", "down", None] = None
        digits: Literal[1, 2] = 1

    assert (Rounded().to, Rounded("up", 2).digits) == (None, 2)
    with pytest.raises(ValueError, match="to must be one of 'up', 'down', None, got 'dwn'.*: down"):
        Rounded("dwn")
    with pytest.raises(ValueError, match="digits must be one of 1, 2, got 3"):
        Rounded(digits=3)


def test_the_strength_in_force_is_the_one_of_now():
    x, moving = torch.randn(SHAPES[2]), Disout(0.5, 3, alpha=LinearSchedule(0.0, 2.0, epochs=3))
    torch.manual_seed(3)
    y, _ = moving.apply(x, now(**moving.values(1.0)))
    assert torch.equal(y, run(Disout(0.5, 3, alpha=1.0), x)[0])


@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
def test_disout_expects_to_distort_p_unless_its_noise_is_0(p):
    regularizer = Disout(p, alpha=LinearSchedule(0.0, 2.0, epochs=3))
    shares = [regularizer.expected_share(regularizer.values(t), (9, 9)) for t in range(3)]
    assert shares == [0.0, p, p]


OUTSIDE = [
    (LinearSchedule(0.0, 1.5, 5), "which reaches 1.5"),
    (CosineSchedule(-0.1, 0.5, 5), "which reaches -0.1"),
    (StepSchedule({0: 0.1, 9: 2.0}), "which reaches 2"),
    (WindowSchedule(0.1, 0, 5, outside=-1), "which reaches -1"),
    (ConstantSchedule(1.5), "which reaches 1.5"),
    (ByDepth(0.1, 1.5), "which reaches 1.5"),
    (ByDepth(0.1, LinearSchedule(0.1, 1.5, 5)), "which reaches 1.5"),
]


@pytest.mark.parametrize("cls", WITH_P)
@pytest.mark.parametrize(("schedule", "message"), OUTSIDE, ids=repr)
def test_a_schedule_that_reaches_outside_is_refused(schedule, message, cls):
    with pytest.raises(ValueError, match=message) as caught:
        cls(schedule)
    assert str(caught.value).startswith("p must be in [0, 1")
    assert repr(schedule) in str(caught.value)


@pytest.mark.parametrize("cls", WITH_P)
def test_a_plain_function_is_checked_when_it_is_called(cls):
    regularizer = cls(lambda t: t / 10)
    assert regularizer.values(5) == {"p": 0.5, **OTHERS[cls]}
    with pytest.raises(ValueError, match=r"p must be in \[0, 1[])], got 1.1 at t=11"):
        regularizer.values(11)


@pytest.mark.parametrize("cls", IN_BLOCKS)
@pytest.mark.parametrize(
    "block_size",
    [0, -1, 2.5, 7.0, "7", None, True, math.nan, (), (0, 3), (3, 2.5), (3, "3")],
    ids=str,
)
def test_block_size_is_checked(block_size, cls):
    with pytest.raises(ValueError, match="block_size must be an integer"):
        cls(0.1, block_size)


@pytest.mark.parametrize("cls", IN_BLOCKS)
@pytest.mark.parametrize("axes", [0, 1, 2, 3, 4])
def test_block_size_has_one_edge_per_axis(axes, cls):
    if axes == cls.spatial:
        assert cls(0.1, tuple(range(2, axes + 2))).p == 0.1
        return
    with pytest.raises(ValueError, match=f"or {cls.spatial} of them .* got ") as caught:
        cls(0.1, (3,) * axes)
    assert str((3,) * axes) in str(caught.value)


@pytest.mark.parametrize("cls", DROP_BLOCKS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "bacth"}, "normalize must be .*'batch'.*got 'bacth'"),
        ({"normalize": "none"}, "normalize must be .*None.*got 'none'"),
        ({"normalize": True}, "normalize must be .*got True"),
        ({"calibration": "exakt"}, "calibration must be .*'exact'.*got 'exakt'"),
        ({"calibration": None}, "calibration must be .*got None"),
    ],
    ids=str,
)
def test_options_of_drop_block_are_checked(options, message, cls):
    with pytest.raises(ValueError, match=message):
        cls(0.1, 3, **options)


@pytest.mark.parametrize("value", ["false", "no", None, 2, 0.5])
@pytest.mark.parametrize(
    ("cls", "name"),
    [(DropBlock2d, "share_channels"), (Disout, "share_channels"), (DropPath, "scale_by_keep")],
)
def test_switches_are_booleans(cls, name, value):
    """A text is true, whatever it says: it would switch on what was meant to be off."""
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        cls(0.1, **{name: value})


@each_class
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": "ouput"}, r"at must be one of 'output', 'input', got 'ouput' \(closest: output"),
        ({"at": None}, "at must be one of .*got None"),
        ({"active": "trian"}, r"active must be one of .*got 'trian' \(closest: train\)"),
        ({"active": "alway"}, r"active must be one of .*got 'alway' \(closest: always\)"),
        ({"active": True}, "active must be one of .*got True"),
        ({"layout": "aoto"}, r"layout must be one of .*got 'aoto' \(closest: auto\)"),
        ({"layout": 4}, "layout must be one of .*got 4"),
    ],
    ids=str,
)
def test_shared_options_are_checked(options, message, cls):
    if cls is StochasticDepth and "at" in options:
        message = "at"
    with pytest.raises(ValueError, match=message):
        cls(0.1, **options)


@pytest.mark.parametrize(
    ("cls", "layout", "closest"),
    [
        (DropBlock2d, "NHCW", "NHWC"),
        (Dropout2d, "NWC", "NHWC"),
        (DropBlock1d, "NCHW", "NCL"),
        (Dropout3d, "NDHW", "NDHWC"),
    ],
)
def test_layouts_of_another_rank_are_refused(cls, layout, closest):
    with pytest.raises(ValueError, match=rf"layout must be one of .*got '{layout}'") as caught:
        cls(0.1, layout=layout)
    assert closest in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "layouts"),
    [
        (DropBlock1d, ["auto", "NCL", "NLC"]),
        (Dropout2d, ["auto", "NCHW", "NHWC"]),
        (DropBlock3d, ["auto", "NCDHW", "NDHWC"]),
        (Dropout, ["auto", "NCL", "NLC", "NCHW", "NHWC", "NCDHW", "NDHWC"]),
    ],
)
def test_layouts_of_its_rank_are_taken(cls, layouts):
    assert [cls(0.1, layout=layout).layout for layout in layouts] == layouts


@each_class
@pytest.mark.parametrize("index", [True, 1.5, (0,), [0]], ids=str)
def test_index_is_checked(index, cls):
    with pytest.raises(TypeError, match="index must be an integer or a key, got"):
        cls(0.1, index=index)


@pytest.mark.parametrize("mode", ["rwo", None, "", 0])
def test_mode_of_stochastic_depth_is_checked(mode):
    with pytest.raises(ValueError, match="mode must be one of 'row', 'batch', got"):
        StochasticDepth(0.1, mode=mode)


def test_stochastic_depth_is_put_on_outputs():
    with pytest.raises(ValueError, match="works on the output of a block: at='output'"):
        StochasticDepth(0.1, at="input")


@pytest.mark.parametrize("cls", [DropPath, StochasticDepth, GaussianNoise, GaussianDropout])
def test_rates_without_a_default_must_be_given(cls):
    with pytest.raises(TypeError, match=RATE[cls]):
        cls()


@each_class
def test_unknown_fields_are_refused(cls):
    with pytest.raises(TypeError, match="probability"):
        cls(probability=0.1)


def test_shared_options_are_keywords_only():
    with pytest.raises(TypeError, match="positional"):
        Dropout(0.1, "input")


def test_a_regularizer_must_define_apply():
    with pytest.raises(NotImplementedError, match="Regularizer must define apply"):
        Regularizer().apply(torch.ones(3), now())


def test_rate_fields_can_not_have_a_name_that_now_has():
    @dropblock_hooks.register(name="RateNamedInput")
    class Wrong(Regularizer):
        input: Probability = 0.1

    with pytest.raises(TypeError, match="a rate can't be named 'input'"):
        Wrong()
