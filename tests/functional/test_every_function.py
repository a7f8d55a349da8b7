"""What holds of every random function: when it is off, of memory, of generators, and of errors.

Inputs have no zeros, so a zero of a result is a dropped element.
"""

import inspect
import math

import pytest
import torch

from dropblock_hooks import functional as f

pytestmark = [pytest.mark.usefixtures("form"), pytest.mark.pairwise]  # on every form of the mask

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def drop_block(function, **defaults):
    return lambda x, p, **options: function(x, p, 3, **defaults, **options)


def of_a_block(x, p, **options):
    """Stochastic depth of a whole residual block that is not far from its shortcut."""
    return f.stochastic_depth(x, p, shortcut=x / 2, **options)


DROPS = {  # the function, its number of spatial axes where these are checked
    "drop_block1d": (drop_block(f.drop_block1d), 1),
    "drop_block2d": (drop_block(f.drop_block2d), 2),
    "drop_block2d, sample": (drop_block(f.drop_block2d, normalize="sample"), 2),
    "drop_block2d, expected": (drop_block(f.drop_block2d, normalize="expected"), 2),
    "drop_block2d, unscaled": (drop_block(f.drop_block2d, normalize=None), 2),
    "drop_block2d, shared": (drop_block(f.drop_block2d, share_channels=True), 2),
    "drop_block3d": (drop_block(f.drop_block3d), 3),
    "dropout": (f.dropout, None),
    "dropout1d": (f.dropout1d, 1),
    "dropout2d": (f.dropout2d, 2),
    "dropout3d": (f.dropout3d, 3),
    "drop_path": (f.drop_path, None),
    "drop_path, unscaled": (lambda x, p, **o: f.drop_path(x, p, scale_by_keep=False, **o), None),
    "stochastic_depth": (f.stochastic_depth, None),
}
OTHERS = {
    "stochastic_depth of a block": (of_a_block, None),
    "disout": (drop_block(f.disout), 2),
    "disout, shared": (drop_block(f.disout, share_channels=True), 2),
    "gaussian_noise": (f.gaussian_noise, None),
    "gaussian_dropout": (f.gaussian_dropout, None),
}
FUNCTIONS = DROPS | OTHERS
ELSEWHERE = {"neftune"}  # tests/regularizers/test_neftune.py
SHAPES = {1: (40, 5, 20), 2: (40, 5, 9, 14), 3: (40, 5, 4, 6, 5)}
each_drop = pytest.mark.parametrize("name", DROPS)
each_function = pytest.mark.parametrize("name", FUNCTIONS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def nonzero(name, dtype=torch.float32, shape=None):
    """Normal numbers for a function, pushed away from 0 so that scaling can't round them to it."""
    x = torch.randn(shape or SHAPES[FUNCTIONS[name][1] or 2])
    return (x + 0.01 * x.sign() + (x == 0)).to(dtype)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_every_random_function_is_here():
    functions = {name: getattr(f, name) for name in f.__all__}
    random = {n for n, v in functions.items() if "generator" in inspect.signature(v).parameters}
    tested = {name.partition(",")[0] for name in FUNCTIONS}
    missing = random - tested - ELSEWHERE
    assert not missing, f"add {missing} to DROPS or OTHERS in this file"


# Off, all, nothing --------------------------------------------------------------------------------


OFF = [
    (name, p, training)
    for name in FUNCTIONS
    for p, training in ((0.0, True), (0, True), (0.5, False), (1.0, False))
    if (name, p) != ("gaussian_dropout", 1.0)  # its p is below 1
]


@pytest.mark.parametrize(("name", "p", "training"), OFF)
def test_off_returns_the_same_object_and_draws_nothing(name, p, training):
    x = nonzero(name)
    before, state = x.clone(), torch.get_rng_state()
    assert FUNCTIONS[name][0](x, p, training=training) is x
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


@each_drop
@each_dtype
@pytest.mark.parametrize("p", [1.0, 1])
def test_p_of_one_gives_zeros(p, dtype, name):
    x = nonzero(name, dtype)
    x.view(-1)[:3] = torch.tensor([math.inf, -math.inf, math.nan])
    x.requires_grad_()
    y = DROPS[name][0](x, p)
    y.backward(nonzero(name, dtype))
    assert torch.equal(y, torch.zeros_like(x))
    assert torch.equal(x.grad, torch.zeros_like(x))


@each_drop
@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_gone_where_dropped(bad, dtype, name):
    function = DROPS[name][0]
    clean = nonzero(name, dtype)
    mask = function(clean, 0.5, generator=seeded()) == 0
    x = torch.full_like(clean, bad).requires_grad_()
    y = function(x, 0.5, generator=seeded())
    y.backward(torch.full_like(y, bad))
    assert mask.any()
    for values in (y, x.grad):
        assert (values[mask] == 0).all()
        assert not values[~mask].isfinite().any()


@each_function
@pytest.mark.parametrize("p", [0.5, 0.99])
def test_zero_size_batches(p, name):
    shape = SHAPES[FUNCTIONS[name][1] or 2]
    for empty in ((0, *shape[1:]), (shape[0], 0, *shape[2:]), (*shape[:-1], 0)):
        x = torch.empty(empty, requires_grad=True)
        y = FUNCTIONS[name][0](x, p)
        y.sum().backward()
        assert y.shape == x.grad.shape == x.shape


# Memory, gradients and random numbers -------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name in DROPS if name.startswith(("drop_block", "dropout"))]
)
@each_dtype
def test_inplace_writes_into_the_input(dtype, name):
    """Also into what autograd records, with the same gradients."""
    function, x, grads = DROPS[name][0], nonzero(name, dtype), []
    expected = function(x, 0.5, generator=seeded())
    leaf, g = x.clone().requires_grad_(), nonzero(name, dtype)
    for inplace in (False, True):
        y = function(leaf * 1, 0.5, inplace=inplace, generator=seeded())
        grads += torch.autograd.grad(y, leaf, g)
    assert torch.equal(*grads)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        function(leaf, 0.5, inplace=True)
    address = x.data_ptr()
    y = function(x, 0.5, inplace=True, generator=seeded())
    assert y is x
    assert y.data_ptr() == address
    assert torch.equal(x, expected)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "disout" not in name])
def test_gradients_of_both_orders_are_right(name):
    shape = {1: (2, 2, 3), 2: (2, 1, 3, 3), 3: (2, 1, 2, 2, 2)}[FUNCTIONS[name][1] or 2]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def function(x):
        return FUNCTIONS[name][0](x, 0.4, generator=seeded(3))

    assert not torch.equal(function(x), x)
    # scales of drops are rounded to float32: they are linear to the bit, and differences agree
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


@each_function
def test_a_generator_is_reproducible_and_leaves_the_global_one_alone(name):
    function, x = FUNCTIONS[name][0], nonzero(name)
    state = torch.get_rng_state()
    first, again, other = (function(x, 0.5, generator=seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@each_function
def test_the_global_generator_is_followed(name):
    function, x = FUNCTIONS[name][0], nonzero(name)
    state, before = torch.get_rng_state(), x.clone()
    first, second = function(x, 0.5), function(x, 0.5)
    assert torch.equal(x, before)
    assert not torch.equal(first, before)
    torch.set_rng_state(state)
    assert torch.equal(function(x, 0.5), first)
    assert not torch.equal(first, second)


@each_drop
def test_the_mask_does_not_depend_on_values_or_dtype(name):
    one = nonzero(name)
    masks = [
        DROPS[name][0](x, 0.3, generator=seeded()) == 0
        for x in (one, torch.ones_like(one, dtype=torch.bfloat16))
    ]
    assert torch.equal(*masks)


# Errors -------------------------------------------------------------------------------------------

NO_RATES = [
    pytest.param(1.3, ValueError, r"must be in \[0, 1\], got 1.3", id="above"),
    pytest.param(-1e-9, ValueError, "must be .*got -1e-09", id="below"),
    pytest.param(math.nan, ValueError, "must be .*got nan", id="nan"),
    pytest.param("0.1", TypeError, "must be a number.*'0.1'", id="text"),
    pytest.param(True, TypeError, "must be a number.*True", id="bool"),
    pytest.param(torch.tensor(0.1), TypeError, "must be a number.*tensor", id="tensor"),
]
RATES_ABOVE_0 = {"gaussian_noise": NO_RATES[1:]}  # its std has no upper bound
RATE_CASES = [
    pytest.param(name, *case.values, id=f"{name}-{case.id}")
    for name in FUNCTIONS
    for case in RATES_ABOVE_0.get(name, NO_RATES)
]
in_both_modes = pytest.mark.parametrize("training", [True, False])


@pytest.mark.parametrize(("name", "p", "error", "message"), RATE_CASES)
@in_both_modes
def test_the_rate_is_checked(name, p, error, message, training):
    rate = "std" if name == "gaussian_noise" else "p"
    with pytest.raises(error, match=f"{rate} {message}"):
        FUNCTIONS[name][0](nonzero(name), p, training=training)


@pytest.mark.parametrize(("value", "error", "message"), NO_RATES[1:])
def test_alpha_and_the_rate_of_gamma_are_checked(value, error, message):
    for training in (True, False):
        with pytest.raises(error, match=f"alpha {message}"):
            f.disout(torch.ones(1, 1, 4, 4), 0.1, 3, value, training)
    with pytest.raises(error, match=f"p {message}"):
        f.block_gamma(value, (14, 14), 7)


@in_both_modes
def test_gaussian_dropout_refuses_p_of_one(training):
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\), got 1"):
        f.gaussian_dropout(torch.ones(3), 1.0, training)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if FUNCTIONS[name][1]])
@in_both_modes
def test_the_number_of_axes_is_checked(training, name):
    function, spatial = FUNCTIONS[name]
    axes = {1: "N, C, L", 2: "N, C, H, W", 3: "N, C, D, H, W"}[spatial]
    for rank in set(range(1, 7)) - {spatial + 2}:
        with pytest.raises(ValueError, match=rf"{spatial + 2}-D tensor \({axes}\), got shape"):
            function(torch.ones([2] * rank), 0.5, training=training)


@pytest.mark.parametrize("name", [*DROPS, "disout", "gaussian_noise", "gaussian_dropout"])
@pytest.mark.parametrize("value", [[1.0], "abc", None], ids=repr)
@in_both_modes
def test_what_is_no_tensor_is_refused(training, value, name):
    with pytest.raises(TypeError, match="input must be a tensor, got"):
        FUNCTIONS[name][0](value, 0.5, training=training)


@pytest.mark.parametrize("function", [f.gaussian_noise, f.neftune], ids=lambda f: f.__name__)
def test_torch_fx_traces_noise_in_evaluation(function):
    traced = torch.fx.symbolic_trace(lambda x: function(x, 0.1, training=False) + 1)
    assert torch.equal(traced(torch.ones(3)), torch.full((3,), 2.0))


@each_function
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_integers_are_refused(dtype, name):
    """Their scaled values would silently be cut to integers."""
    shape = SHAPES[FUNCTIONS[name][1] or 2]
    with pytest.raises((TypeError, RuntimeError), match="float|bool"):
        FUNCTIONS[name][0](torch.ones(shape, dtype=dtype), 0.3)


@pytest.mark.parametrize(
    "block", [0, -1, 2.5, "3", None, True, (3,), (3, 3, 3), (3, 0), (3, 2.5), ()], ids=repr
)
@in_both_modes
def test_block_size_is_checked(training, block):
    refused = pytest.raises(ValueError, match="block_size must be an integer")
    for function in (f.drop_block2d, f.disout):
        with refused:
            function(torch.ones(1, 1, 4, 4), 0.1, block, training=training)
    with refused:
        f.block_gamma(0.1, (14, 14), block)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "bacth"}, "normalize must be .*'batch'.*got 'bacth'"),
        ({"calibration": "exakt"}, "calibration must be .*'exact'.*got 'exakt'"),
    ],
    ids=["normalize", "calibration"],
)
@pytest.mark.parametrize("p", [0.0, 0.1])
@in_both_modes
def test_options_of_drop_block_are_checked(training, p, options, message):
    with pytest.raises(ValueError, match=message):
        f.drop_block2d(torch.ones(1, 1, 4, 4), p, 3, training=training, **options)
    if "calibration" in options:
        with pytest.raises(ValueError, match=message):
            f.block_gamma(p, (14, 14), 7, **options)


@pytest.mark.parametrize("p", [0.0, 0.5])
@in_both_modes
def test_stochastic_depth_is_checked(training, p):
    x = torch.ones(2, 3)
    for shortcut in (None, x):
        with pytest.raises(ValueError, match="mode must be one of 'row', 'batch', got 'rwo'"):
            f.stochastic_depth(x, p, "rwo", training, shortcut=shortcut)
    message = r"keeps its shape, got input \(2, 4\) and output \(2, 3\)"
    with pytest.raises(ValueError, match=message):
        f.stochastic_depth(x, p, training=training, shortcut=torch.ones(2, 4))
