"""Schedules against their formulas in NumPy, and what holds of all of them."""

import copy
import math
import pickle
from dataclasses import dataclass, fields

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
from dropblock_hooks.schedules import is_moving, span_of, value_at
from tests.classes import own_classes

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

# Formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [2, 3, 5, 90, 300])
@pytest.mark.parametrize(("start", "stop"), [(0.0, 0.1), (0.3, 0.1), (-1.0, 1.0), (0.1, 0.1)])
def test_ramps_are_linspace_and_half_a_cosine(start, stop, epochs):
    angle = np.linspace(0, np.pi, epochs)
    for ramp, expected in [
        (LinearSchedule, np.linspace(start, stop, epochs)),
        (CosineSchedule, start + (stop - start) * (1 - np.cos(angle)) / 2),
    ]:
        found = [ramp(start, stop, epochs)(t) for t in range(epochs)]
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


@pytest.mark.parametrize("end", ["start", "stop"])
def test_a_rate_can_not_rise_twice_with_depth(end):
    with pytest.raises(ValueError, match=f"{end} can't be a ByDepth itself"):
        ByDepth(**{"start": 0.0, "stop": 0.2, end: ByDepth(0.0, 0.2)})


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
@given(values, values, st.integers(1, 2000))
def test_a_ramp_without_delay_ends_exactly_in_its_last_epoch(start, stop, epochs):
    for ramp in (LinearSchedule(start, stop, epochs), CosineSchedule(start, stop, epochs)):
        assert ramp(epochs - 1) == stop
        assert ramp(0) == (start if epochs > 1 else stop)


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


def test_what_is_given_is_copied_and_numbers_become_floats():
    given_values = {0: 0.1, 5: 0.2}
    schedule = StepSchedule(given_values)
    given_values[0] = 0.9
    assert schedule == StepSchedule({0: 0.1, 5: 0.2})
    with pytest.raises((TypeError, AttributeError)):
        schedule.values[0] = 0.9
    ramp = LinearSchedule(np.float32(0.5), 1, np.int64(5), delay=np.float64(2))
    assert ramp == LinearSchedule(0.5, 1.0, 5, 2.0)
    assert [type(getattr(ramp, f.name)) for f in fields(ramp)] == [float, float, int, float]


def test_a_schedule_of_ones_own():
    class Square(Schedule):
        def __call__(self, t):
            return t**2

    assert Square()(3) == 9
    assert Square().span() == (-math.inf, math.inf)
    assert is_moving(Square())
    with pytest.raises(NotImplementedError, match="Schedule must define __call__"):
        Schedule()(0)


SCALED = [  # by class of the package: a schedule, and half of it
    (ConstantSchedule(0.4), ConstantSchedule(0.2)),
    (LinearSchedule(0.2, 0.4, 5, delay=1), LinearSchedule(0.1, 0.2, 5, delay=1)),
    (CosineSchedule(0.2, 0.4), CosineSchedule(0.1, 0.2)),
    (StepSchedule({0: 0.2, 5: 0.4}), StepSchedule({0: 0.1, 5: 0.2})),
    (WindowSchedule(0.2, 1, 3, outside=0.4), WindowSchedule(0.1, 1, 3, outside=0.2)),
    (
        ByDepth(0.2, LinearSchedule(0.2, 0.4, 5), share=0.5),
        ByDepth(0.1, LinearSchedule(0.1, 0.2, 5), share=0.5),
    ),
]


@pytest.mark.parametrize(("schedule", "half"), SCALED, ids=lambda case: type(case).__name__)
def test_scaled_by_a_factor(schedule, half):
    assert schedule.scaled(0.5) == half


def test_each_schedule_is_scaled():
    missing = set(own_classes(Schedule).values()) - {type(schedule) for schedule, _ in SCALED}
    assert not missing, (
        f"add a schedule and half of it to SCALED in tests/test_schedules.py: {missing}"
    )


@dataclass(frozen=True, repr=False)
class Halved(Schedule):
    start: float

    def __call__(self, t):
        return self.start / 2**t

    def scaled(self, factor):
        return Halved(self.start * factor)


def test_one_of_your_own_is_scaled_by_its_method():
    assert ByDepth(0.0, Halved(0.4)).scaled(0.5) == ByDepth(0.0, Halved(0.2))
    with pytest.raises(TypeError, match=r"Unscaled can't be scaled: define scaled\(factor\) in it"):
        ByDepth(0.0, Unscaled()).scaled(0.5)


class Unscaled(Schedule):
    def __call__(self, t):
        return 0.1


def test_the_length_that_a_training_gives_is_taken_back():
    ramp = LinearSchedule(0.0, 0.2, delay=1.5)
    for rate in (ramp, ByDepth(0.0, ramp)):
        fitted = rate.at(1, 2, 9)
        assert fitted.length == 8.5
        assert fitted.without_epochs(9).length is None
        assert fitted.without_epochs(8) == fitted
        assert fitted.without_epochs(None) == fitted


def test_an_end_without_a_share_moves_no_rate():
    ramp = LinearSchedule(0.0, 0.2, epochs=5)
    rising = ByDepth(0.1, ramp)
    falling = ByDepth(ramp, 0.1)
    assert [is_moving(rising.at(i, 3)) for i in range(3)] == [False, True, True]
    assert [is_moving(falling.at(i, 3)) for i in range(3)] == [True, True, False]
    assert not is_moving(falling.at(0, 1)), "a single site has the rate of the last one"


def test_the_span_at_a_site():
    spread = ByDepth(LinearSchedule(0.0, 0.2, 5), 0.4)
    assert spread.span() == (0.0, 0.4)
    assert spread.at(0, 3).span_here() == (0.0, 0.2)
    assert spread.at(1, 3).span_here() == pytest.approx((0.2, 0.3))
    assert spread.at(2, 3).span_here() == (0.4, 0.4)


def test_a_plain_function_is_a_schedule():
    assert value_at(lambda t: t / 10, 5) == 0.5
    assert span_of(lambda t: t) == (-math.inf, math.inf)
    assert is_moving(lambda t: t)
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="the schedule's value must be a finite number"):
            value_at(lambda t, value=value: value, 0)
    for value in ("0.1", None, True, torch.tensor(0.1)):
        with pytest.raises(TypeError, match="the schedule's value must be a number"):
            value_at(lambda t, value=value: value, 0)


# Errors ---------------------------------------------------------------------------------------

NO_NUMBERS = [
    pytest.param(math.nan, ValueError, "must be a finite number, got nan", id="nan"),
    pytest.param(math.inf, ValueError, "must be a finite number, got inf", id="inf"),
    pytest.param("0.1", TypeError, "must be a number.*'0.1'.*write 0.1", id="text"),
    pytest.param(True, TypeError, "must be a number.*True", id="bool"),
    pytest.param(torch.tensor(0.1), TypeError, "must be a number.*tensor", id="tensor"),
]
FIELDS = {
    "value of ConstantSchedule": lambda v: ConstantSchedule(v),
    "start of LinearSchedule": lambda v: LinearSchedule(v, 0.1, 5),
    "stop of LinearSchedule": lambda v: LinearSchedule(0.1, v, 5),
    "delay of LinearSchedule": lambda v: LinearSchedule(0.0, 0.1, 5, v),
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


BAD_STEPS = [0.1, None, "abc", [0.1], {"0": 0.1}, {0: "0.1"}, {True: 0.1}, {0: math.nan}]
BAD_STEPS += [{}, [], {1: 0.1}, {-1: 0.1, 5: 0.2}, {0.5: 0.1}]
NO_COUNTS = [0, -1, 2.5, 5.0, math.nan, "5", True, torch.tensor(2.0)]
REFUSED = [
    *((lambda r=r, n=n: r(0.0, 0.1, n), ValueError, "epochs must be an integer >= 1, got")
      for r in (LinearSchedule, CosineSchedule) for n in NO_COUNTS),
    (lambda: LinearSchedule(0.0, 0.1, 5, -1), ValueError, "delay must be >= 0, got -1"),
    *((lambda v=v: StepSchedule(v), ValueError, "StepSchedule takes a mapping of time to value")
      for v in BAD_STEPS),
    (lambda: StepSchedule([(0, 0.1), (5, 0.2), (5.0, 0.3)]), ValueError, "no time twice"),
    *((lambda b=b, e=e: WindowSchedule(0.1, b, e), ValueError, "begin must be before end, got")
      for b, e in [(5, 5), (6, 5), (0.1, 0.0)]),
    *((lambda s=s: ByDepth(0.1, 0.2, s), ValueError, r"share must be in \[0, 1\], got")
      for s in (-0.1, 1.1)),
    (lambda: LinearSchedule(LinearSchedule(0, 1), 1), TypeError, "start must be a number, got"),
    (lambda: Dropout(p=lambda t: t + "x"), TypeError, "^p: .* raised TypeError: .* at t=0$"),
    (lambda: Dropout(p=lambda t: {}[t]), ValueError, "^p: .* raised KeyError: 0.0 at t=0$"),
    *((lambda f=f: Dropout(p=f), TypeError, "^p: .* called with the epoch, raised .*argument")
      for f in (lambda: 0.3, lambda t, n: 0.3, ByDepth(lambda *, t: 0.3, 0.1))),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_arguments_are_checked(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make()
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_a_schedule_of_ones_own_without_register():
    class Halved(Schedule):
        start: float = 0.2

        def __call__(self, t):
            return self.start * 0.5**t

    for make in (Halved, lambda: Halved(0.1), lambda: Halved(start=0.1)):
        with pytest.raises(TypeError, match=r"Halved has fields \(start\): put @register above it"):
            make()
