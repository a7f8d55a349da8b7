"""Errors survive what trainers, loggers and process pools do with them."""

import copy
import pickle
import traceback

import pytest
from torch import nn

from dropblock_hooks import (
    Dropout,
    Finding,
    HookWarning,
    Kind,
    Retune,
    Severity,
    SiteError,
    SpecError,
    WatchdogError,
    attach,
)

FINDING = Finding(Kind.NONFINITE, Severity.ERROR, ("0/Watchdog",), "its output held NaN")
ERRORS = [
    SpecError(["first", "second"], "spec.yaml"),
    SpecError(["first"]),
    SpecError("one text"),
    WatchdogError([FINDING]),
    SiteError("0/Dropout: no"),
    HookWarning("text", [FINDING]),
]
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


@each_error
@pytest.mark.parametrize("args", [("in my trainer: {}",), (), ("a", "b", "c"), (3,)], ids=str)
def test_other_arguments(error, args):
    changed = copy.copy(error)
    text = str(error)
    changed.args = tuple(a.format(text) if isinstance(a, str) else a for a in args)
    shown = traceback.format_exception_only(changed)[-1]
    assert "str() failed" not in shown
    assert str(changed) == str(Exception(*changed.args))
    assert str(error) == text


@each_error
@pytest.mark.parametrize("replaced", [False, True], ids=["own arguments", "other arguments"])
def test_copies_and_pickles(error, replaced):
    original = copy.copy(error)
    if replaced:
        original.args = (f"in my trainer: {error}",)
    unpickled = pickle.loads(pickle.dumps(original))
    for again in (copy.copy(original), copy.deepcopy(original), unpickled):
        assert type(again) is type(error)
        assert str(again) == str(original)
        assert getattr(again, "problems", ()) == getattr(error, "problems", ())
        assert getattr(again, "findings", ()) == getattr(error, "findings", ())


@pytest.mark.parametrize(
    "words",
    [
        "a Linear",
        "a ReLU",
        "a UNet",
        "an Identity",
        "an AdaptiveAvgPool2d",
        "an LSTM",
        "an Upsample",
    ],
)
def test_a_class_has_the_article_of_its_sound(words):
    _, name = words.split()
    layer = type(name, (nn.Module,), {"forward": lambda self, x: x})()
    with pytest.raises(SpecError, match=f": {words} has no p or drop_prob"):
        attach(nn.Sequential(layer), {"0": Retune(0.1)})


def test_one_text_is_one_problem():
    assert SpecError("one text").problems == ("one text",)
    assert str(SpecError("one text")) == "1 problem in the spec:\n  - one text"


def test_a_typo_is_told_under_a_trainer_that_rewrites_arguments():
    with pytest.raises(SpecError) as caught:
        attach(nn.Sequential(nn.Linear(2, 2)), {"7": Dropout(0.1)})
    error = caught.value
    error.args = (f"in before_fit: {error}",)
    assert "'7' matches nothing" in "".join(traceback.format_exception_only(error))
