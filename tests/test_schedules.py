"""Schedules against their formulas in NumPy, and what holds of all of them."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dropblock_hooks
from dropblock_hooks import (
    ByDepth,
    ConstantSchedule,
    CosineSchedule,
    Dropout,
    LinearSchedule,
    Schedule,
    StepSchedule,
    WindowSchedule,
)
from dropblock_hooks.checks import as_count, as_number
from dropblock_hooks.schedules.base import is_moving, span_of, value_at

properties = settings(derandomize=True, deadline=None, max_examples=100)
values = st.floats(-1e6, 1e6)
times = st.floats(0, 1e4)

ramps = st.builds(
    lambda cls, *arguments: cls(*arguments),
    st.sampled_from([LinearSchedule, CosineSchedule]),
    values,
    values,
    st.integers(1, 1000),
    st.floats(0, 1000),
)
steps = st.builds(
    lambda first, later: StepSchedule({0: first} | later),
    values,
    st.dictionaries(st.floats(0.5, 1e4), values, max_size=5),
)
windows = st.builds(
    lambda value, begin, width, outside: WindowSchedule(value, begin, begin + width, outside),
    values,
    st.floats(0, 1e3),
    st.floats(0.5, 1e3),
    values,
)
simple = st.one_of(st.builds(ConstantSchedule, values), ramps, steps, windows)
by_depth = st.builds(ByDepth, values | simple, values | simple, st.floats(0, 1))
schedules = simple | by_depth

EXAMPLES = [
    ConstantSchedule(0.1),
    LinearSchedule(0.0, 0.2, epochs=5),
    LinearSchedule(0.3, 0.1, epochs=90, delay=10),
    CosineSchedule(0.0, 0.2, epochs=5, delay=0.5),
    StepSchedule({0: 0.0, 30: 0.1, 60: 0.2}),
    WindowSchedule(0.1, begin=0, end=50),
    WindowSchedule(0.1, begin=5, end=50, outside=0.3),
    ByDepth(0.0, 0.2),
    ByDepth(LinearSchedule(0.0, 0.1, epochs=5), 0.2, share=0.25),
]
each_example = pytest.mark.parametrize("schedule", EXAMPLES, ids=repr)


# Formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [2, 3, 5, 90, 300])
@pytest.mark.parametrize(("start", "stop"), [(0.0, 0.1), (0.3, 0.1), (-1.0, 1.0), (0.1, 0.1)])
def test_linear_is_linspace(start, stop, epochs):
    schedule = LinearSchedule(start, stop, epochs)
    found = [schedule(t) for t in range(epochs)]
    np.testing.assert_allclose(found, np.linspace(start, stop, epochs), rtol=0, atol=1e-15)


@pytest.mark.parametrize("epochs", [2, 3, 5, 90, 300])
@pytest.mark.parametrize(("start", "stop"), [(0.0, 0.1), (0.3, 0.1), (-1.0, 1.0), (0.1, 0.1)])
def test_cosine_is_half_a_cosine(start, stop, epochs):
    schedule = CosineSchedule(start, stop, epochs)
    found = [schedule(t) for t in range(epochs)]
    angle = np.linspace(0, np.pi, epochs)
    expected = start + (stop - start) * (1 - np.cos(angle)) / 2
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("ramp", "share"),
    [(LinearSchedule, lambda s: s), (CosineSchedule, lambda s: s**2 * (3 - 2 * s))],
)
@pytest.mark.parametrize("delay", [0, 2, 0.75])
def test_a_ramp_between_epochs_and_after_a_delay(ramp, share, delay):
    """Half-way it is in the middle; 3 s² - 2 s³ is within .02 of the cosine ramp."""
    schedule = ramp(1.0, 3.0, 11, delay)
    for t in np.linspace(-2, 16, 181):
        s = np.clip((t - delay) / 10, 0, 1)
        assert schedule(t) == pytest.approx(1 + 2 * share(s), abs=0.04)
    assert schedule(delay + 5) == pytest.approx(2.0, abs=1e-12)
    assert [schedule(t) for t in (0, delay, delay + 10, delay + 10.01, 1e9)] == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("ramp", [LinearSchedule, CosineSchedule])
@pytest.mark.parametrize("delay", [0, 3, 0.5])
def test_a_ramp_of_one_epoch_is_its_stop(ramp, delay):
    schedule = ramp(0.1, 0.7, 1, delay)
    assert [schedule(t) for t in (delay, delay + 0.5, 100)] == [0.7, 0.7, 0.7]
    assert delay == 0 or schedule(delay - 0.01) == 0.1


def test_linear_of_the_readme():
    """0 to 0.1 in 90 epochs: 0 in the first, 0.1 in the last, 0.05 on average."""
    rates = [LinearSchedule(0.0, 0.1, epochs=90)(t) for t in range(90)]
    assert rates[0] == 0.0
    assert rates[-1] == 0.1
    assert np.mean(rates) == pytest.approx(0.05)


def test_steps_hold_until_the_next():
    schedule = StepSchedule({60: 0.2, 0: 0.0, 30.5: 0.1})
    found = [schedule(t) for t in (0, 30, 30.5, 59.999, 60, 1e9)]
    assert found == [0.0, 0.0, 0.1, 0.1, 0.2, 0.2]


def test_a_window_is_open_at_its_end():
    early, late = WindowSchedule(0.1, 0, 50), WindowSchedule(0.1, 50, 1e9, outside=0.02)
    assert [early(t) for t in (0, 49.999, 50, 51)] == [0.1, 0.1, 0.0, 0.0]
    assert [late(t) for t in (0, 49.999, 50, 51)] == [0.02, 0.02, 0.1, 0.1]


@pytest.mark.parametrize("n", [2, 3, 16])
def test_by_depth_is_linspace_over_the_sites(n):
    found = [ByDepth(0.0, 0.2).at(i, n)(7) for i in range(n)]
    np.testing.assert_allclose(found, np.linspace(0.0, 0.2, n), rtol=0, atol=1e-15)


def test_by_depth_gives_a_single_site_its_stop():
    assert ByDepth(0.0, 0.2).at(0, 1)(0) == 0.2


def test_the_ends_of_by_depth_may_be_schedules():
    schedule = ByDepth(LinearSchedule(0.0, 0.1, 11), StepSchedule({0: 0.2, 5: 0.4}))
    assert schedule.at(0, 3)(10) == 0.1
    assert schedule.at(1, 3)(4) == pytest.approx((0.04 + 0.2) / 2)
    assert schedule.at(2, 3)(5) == 0.4


# What holds of all ------------------------------------------------------------------------------


@properties
@given(schedules, times)
def test_a_value_is_a_float_within_the_span(schedule, t):
    low, high = schedule.span()
    value = schedule(t)
    assert type(value) is float
    assert low <= value <= high
    assert span_of(schedule) == (low, high)
    assert value_at(schedule, t) == value


@properties
@given(ramps, st.lists(times, min_size=2))
def test_a_ramp_is_monotone(ramp, ts):
    found = np.array([ramp(t) for t in sorted(ts)])
    change = np.diff(found) * (1 if ramp.stop >= ramp.start else -1)
    # neighbouring times may differ by the rounding of a float
    assert (change >= -4e-16 * max(abs(ramp.start), abs(ramp.stop))).all()


@properties
@given(ramps)
def test_a_ramp_has_its_exact_ends(ramp):
    assert ramp(ramp.delay + ramp.epochs - 1) == pytest.approx(ramp.stop, rel=1e-9, abs=1e-6)
    assert ramp(ramp.delay + ramp.epochs) == ramp.stop
    assert ramp(0) == (ramp.stop if ramp.epochs == 1 and ramp.delay == 0 else ramp.start)


@properties
@given(values, values, st.integers(1, 2000))
def test_a_ramp_without_delay_ends_exactly_in_its_last_epoch(start, stop, epochs):
    for ramp in (LinearSchedule(start, stop, epochs), CosineSchedule(start, stop, epochs)):
        assert ramp(epochs - 1) == stop
        assert ramp(0) == (start if epochs > 1 else stop)


@properties
@given(schedules, st.lists(times, min_size=1, max_size=5))
def test_pure(schedule, ts):
    """In any order, any number of times, the same values; nothing in it changes."""
    before = copy.deepcopy(schedule)
    found = [schedule(t) for t in ts]
    assert [schedule(t) for t in reversed(ts)] == found[::-1]
    assert schedule == before


@properties
@given(schedules)
def test_equal_hashable_picklable_and_shown(schedule):
    for other in (
        copy.deepcopy(schedule),
        pickle.loads(pickle.dumps(schedule)),
        eval(repr(schedule), vars(dropblock_hooks).copy()),
    ):
        assert other == schedule
        assert hash(other) == hash(schedule)
        assert repr(other) == repr(schedule)
        assert type(other) is type(schedule)


@properties
@given(schedules, st.lists(times, min_size=1))
def test_constant_means_constant(schedule, ts):
    if schedule.constant:
        assert len({schedule(t) for t in ts}) == 1
    assert is_moving(schedule) is not schedule.constant


@pytest.mark.parametrize(
    ("schedule", "constant"),
    [
        (ConstantSchedule(0.3), True),
        (LinearSchedule(0.1, 0.1, 5), True),
        (LinearSchedule(0.1, 0.2, 5), False),
        (StepSchedule({0: 0.1, 5: 0.1}), True),
        (StepSchedule({0: 0.1, 5: 0.2}), False),
        (WindowSchedule(0.1, 0, 5, outside=0.1), True),
        (WindowSchedule(0.1, 0, 5), False),
        (ByDepth(0.1, 0.3), True),
        (ByDepth(0.1, LinearSchedule(0.0, 0.3, 5)), False),
    ],
    ids=repr,
)
def test_constant(schedule, constant):
    assert schedule.constant is constant
    assert is_moving(schedule) is not constant


@each_example
def test_frozen(schedule):
    for field in fields(schedule):
        with pytest.raises(FrozenInstanceError):
            setattr(schedule, field.name, 0.5)


@each_example
def test_different_ones_are_not_equal(schedule):
    assert [schedule == other for other in EXAMPLES].count(True) == 1
    assert schedule != 0.1


def test_the_values_of_a_step_schedule_can_not_be_changed():
    given_values = {0: 0.1, 5: 0.2}
    schedule = StepSchedule(given_values)
    code = hash(schedule)
    given_values[0] = 0.9
    assert schedule(0) == 0.1
    with pytest.raises((TypeError, AttributeError)):
        schedule.values[0] = 0.9
    assert hash(schedule) == code


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (
            LinearSchedule(0, 0.2, epochs=5),
            "LinearSchedule(start=0.0, stop=0.2, epochs=5, delay=0.0)",
        ),
        (ConstantSchedule(1), "ConstantSchedule(value=1.0)"),
    ],
    ids=repr,
)
def test_repr_is_one_line_of_the_fields(schedule, text):
    """Whether fields at their default are said is left open."""
    assert repr(schedule) in (text, text.replace(", delay=0.0", ""))


@each_example
@pytest.mark.parametrize("t", [-1, -0.5, -1e9])
def test_before_the_beginning_is_as_at_the_beginning(schedule, t):
    """`step` refuses a negative time; a plain call must still not fail in some other way."""
    windowed = isinstance(schedule, WindowSchedule)
    assert schedule(t) == (schedule.outside if windowed else schedule(0))


def test_numbers_of_other_types_become_floats():
    schedule = LinearSchedule(np.float32(0.5), 1, np.int64(5), delay=np.float64(2))
    assert schedule == LinearSchedule(0.5, 1.0, 5, 2.0)
    assert [type(getattr(schedule, f.name)) for f in fields(schedule)] == [float, float, int, float]


def test_a_schedule_of_ones_own():
    class Square(Schedule):
        def __call__(self, t):
            return t**2

    assert Square()(3) == 9
    assert Square().span() == (-math.inf, math.inf)
    assert not Square().constant
    with pytest.raises(NotImplementedError, match="Schedule must define __call__"):
        Schedule()(0)


@pytest.mark.parametrize("rate", [0.3, 1, np.float64(0.5)])
def test_a_bare_number_is_constant(rate):
    assert value_at(rate, 17) == rate
    assert span_of(rate) == (rate, rate)
    assert not is_moving(rate)


def test_a_plain_function_is_a_schedule():
    assert value_at(lambda t: t / 10, 5) == 0.5
    assert span_of(lambda t: t) == (-math.inf, math.inf)
    assert is_moving(lambda t: t)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_plain_function_must_give_a_finite_number(value):
    with pytest.raises(ValueError, match="the schedule's value must be a finite number"):
        value_at(lambda t: value, 0)


@pytest.mark.parametrize("value", ["0.1", None, True, torch.tensor(0.1)], ids=str)
def test_a_plain_function_must_give_a_number(value):
    with pytest.raises(TypeError, match="the schedule's value must be a number"):
        value_at(lambda t: value, 0)


# Errors ---------------------------------------------------------------------------------------

NO_NUMBERS = [
    pytest.param(math.nan, ValueError, "must be a finite number, got nan", id="nan"),
    pytest.param(math.inf, ValueError, "must be a finite number, got inf", id="inf"),
    pytest.param("0.1", TypeError, "must be a number.*'0.1'.*write 0.1", id="text"),
    pytest.param("fast", TypeError, "must be a number.*'fast'", id="word"),
    pytest.param(None, TypeError, "must be a number.*None", id="none"),
    pytest.param(True, TypeError, "must be a number.*True", id="bool"),
    pytest.param(1j, TypeError, "must be a number", id="complex"),
    pytest.param(torch.tensor(0.1), TypeError, "must be a number.*tensor", id="tensor"),
    pytest.param([0.1], TypeError, "must be a number", id="list"),
]
FIELDS = {
    "value of ConstantSchedule": lambda v: ConstantSchedule(v),
    "start of LinearSchedule": lambda v: LinearSchedule(v, 0.1, 5),
    "stop of LinearSchedule": lambda v: LinearSchedule(0.1, v, 5),
    "delay of LinearSchedule": lambda v: LinearSchedule(0.0, 0.1, 5, v),
    "start of CosineSchedule": lambda v: CosineSchedule(v, 0.1, 5),
    "stop of CosineSchedule": lambda v: CosineSchedule(0.1, v, 5),
    "delay of CosineSchedule": lambda v: CosineSchedule(0.0, 0.1, 5, v),
    "value of WindowSchedule": lambda v: WindowSchedule(v, 0, 5),
    "begin of WindowSchedule": lambda v: WindowSchedule(0.1, v, 5),
    "end of WindowSchedule": lambda v: WindowSchedule(0.1, 0, v),
    "outside of WindowSchedule": lambda v: WindowSchedule(0.1, 0, 5, v),
    "start of ByDepth": lambda v: ByDepth(v, 0.1),
    "stop of ByDepth": lambda v: ByDepth(0.1, v),
    "share of ByDepth": lambda v: ByDepth(0.1, 0.2, v),
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(("value", "error", "message"), NO_NUMBERS)
def test_numbers_are_checked(value, error, message, field):
    with pytest.raises(error, match=field.split()[0] + " " + message):
        FIELDS[field](value)


@pytest.mark.parametrize("ramp", [LinearSchedule, CosineSchedule])
@pytest.mark.parametrize(
    "epochs", [0, -1, 2.5, 5.0, math.nan, "5", True, torch.tensor(2.0)], ids=str
)
def test_epochs_are_checked(ramp, epochs):
    with pytest.raises(ValueError, match="epochs must be an integer >= 1, got"):
        ramp(0.0, 0.1, epochs)


@pytest.mark.parametrize("ramp", [LinearSchedule, CosineSchedule])
def test_delay_is_not_negative(ramp):
    with pytest.raises(ValueError, match="delay must be >= 0, got -1"):
        ramp(0.0, 0.1, 5, -1)


@pytest.mark.parametrize("given_values", [{}, {1: 0.1}, {-1: 0.1, 5: 0.2}, {0.5: 0.1}, []], ids=str)
def test_steps_begin_at_time_0(given_values):
    with pytest.raises(ValueError, match="StepSchedule must begin with the value at time 0"):
        StepSchedule(given_values)


@pytest.mark.parametrize(
    "given_values",
    [
        0.1,
        None,
        "abc",
        [0.1],
        {"0": 0.1},
        {0: "0.1"},
        {0: None},
        {0: True},
        {True: 0.1},
        {0: math.nan},
        {0: 0.1, math.inf: 0.2},
    ],
    ids=str,
)
def test_steps_are_checked(given_values):
    with pytest.raises(ValueError, match="StepSchedule takes a mapping of time to value"):
        StepSchedule(given_values)


def test_a_time_stands_once():
    with pytest.raises(ValueError, match="a time twice"):
        StepSchedule([(0, 0.1), (5, 0.2), (5.0, 0.3)])


@pytest.mark.parametrize(("begin", "end"), [(5, 5), (6, 5), (0.1, 0.0)])
def test_a_window_has_a_width(begin, end):
    with pytest.raises(ValueError, match=f"begin must be before end, got begin={float(begin)}"):
        WindowSchedule(0.1, begin, end)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_share_is_checked(share):
    with pytest.raises(ValueError, match=r"share must be in \[0, 1\], got"):
        ByDepth(0.1, 0.2, share)


def test_by_depth_does_not_nest():
    with pytest.raises(TypeError, match="start of ByDepth can't itself be a ByDepth"):
        ByDepth(ByDepth(0.0, 0.1), 0.2)


@pytest.mark.parametrize("value", [1, 2, np.int32(3), 10**20])
def test_as_count_takes_integers(value):
    assert as_count("n", value) == value
    assert type(as_count("n", value)) is int


@pytest.mark.parametrize(("minimum", "value"), [(0, -1), (1, 0), (3, 2)])
def test_as_count_has_a_minimum(minimum, value):
    assert as_count("n", minimum, minimum) == minimum
    with pytest.raises(ValueError, match=f"n must be an integer >= {minimum}, got {value}"):
        as_count("n", value, minimum)


def test_a_number_too_large_for_a_float_is_not_finite():
    with pytest.raises(ValueError, match="p must be a finite number"):
        as_number("p", 10**400)


def test_where_no_schedule_is_taken_the_message_does_not_ask_for_one():
    with pytest.raises(TypeError, match="start must be a number") as caught:
        LinearSchedule(CosineSchedule(0.0, 0.1, 5), 0.2, 5)
    assert "or a schedule" not in str(caught.value)


def test_messages_are_short():
    with pytest.raises(TypeError, match="p must be a number") as caught:
        as_number("p", "x" * 10_000)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_a_schedule_of_ones_own_without_register():
    class Halved(Schedule):
        start: float = 0.2

        def __call__(self, t):
            return self.start * 0.5**t

    for make in (Halved, lambda: Halved(0.1), lambda: Halved(start=0.1)):
        with pytest.raises(TypeError, match=r"Halved has fields \(start\): put @register above it"):
            make()

    class Fixed(Schedule):
        def __call__(self, t):
            return 0.1

    assert Dropout(Fixed()).values(3.0) == {"p": 0.1}


@pytest.mark.parametrize("schedule", [lambda: 0.3, lambda t, n: 0.3, lambda *, t: 0.3], ids="abc")
def test_a_function_of_another_signature_is_told(schedule):
    for build in (lambda: Dropout(p=schedule), lambda: Dropout(p=ByDepth(schedule, 0.1))):
        with pytest.raises(
            TypeError, match=r"^p: .*is called with one number, the epoch"
        ) as caught:
            build()
        assert "argument" in str(caught.value)


def test_what_a_schedule_raises_is_told_with_its_field():
    with pytest.raises(TypeError, match="^p: its schedule raised TypeError: .* at t=0$"):
        Dropout(p=lambda t: t + "x")
    with pytest.raises(ValueError, match="^p: its schedule raised KeyError: 0.0 at t=0$"):
        Dropout(p=lambda t: {}[t])
