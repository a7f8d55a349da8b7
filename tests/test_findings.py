"""Findings: one type, reported once until it has cleared."""

import pickle
import warnings

import pytest
from torch import nn

from dropblock_hooks import (
    Dropout,
    Finding,
    HookWarning,
    Kind,
    Severity,
    SpecError,
    WatchdogError,
    attach,
)
from dropblock_hooks.findings import grouped, tell
from tests.told import ids, told


def make(*sites, kind=Kind.NEVER_CALLED, text="it was never called", cure="Call it"):
    return Finding(kind, Severity.WARNING, sites, text, cure)


def test_the_text_names_sites_and_cure():
    assert str(make("a/Dropout", "b/Dropout")) == (
        "a/Dropout, b/Dropout: it was never called. Call it."
    )
    assert str(make(cure="")) == "it was never called"
    found = [make("a/X"), make("b/X", text="it was replaced"), make("c/X")]
    assert grouped(found) == [
        "a/X, c/X: it was never called. Call it.",
        "b/X: it was replaced. Call it.",
    ]
    assert [make("a.0/Dropout").layer, make("./Dropout").layer, make().layer] == ["a.0", "", ""]


def test_each_is_told_once_until_it_has_cleared():
    first, second, known, seen = make("a/X"), make("b/X"), set(), []
    for found in ([first], [first, second], [first]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tell(found, known)
        seen.append(told(caught))
    assert seen == [ids([first]), ids([second]), []]
    known -= first.ids
    with pytest.warns(HookWarning) as caught:
        tell([first, second], known)
    assert told(caught) == ids([first])


def test_actions():
    found, seen = [make("a/X"), make("b/X", text="it was replaced")], []
    tell(found, set(), seen.append)
    assert seen == found
    with pytest.raises(WatchdogError) as raised:
        tell(found, set(), "raise")
    assert raised.value.findings == tuple(found)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.findings, str(again)) == (raised.value.findings, str(raised.value))


def test_a_spec_error_holds_findings():
    with pytest.raises(SpecError) as caught:
        attach(nn.Sequential(nn.ReLU()), {"1": Dropout(0.1), "x": Dropout(0.1)})
    found = caught.value.findings
    assert [(each.kind, each.severity) for each in found] == [("spec", "error")] * 2
    assert tuple(each.text for each in found) == caught.value.problems
