"""Findings: one type, reported once until it has cleared."""

import pickle
import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ClipGradNorm,
    Dropout,
    Finding,
    HookWarning,
    Kind,
    Severity,
    SpecError,
    WatchdogError,
    attach,
    watch,
)
from dropblock_hooks.findings import merged, tell
from tests.told import ids, told


def make(*sites, kind=Kind.NEVER_CALLED, text="it was never called", cure="Call it"):
    return Finding(kind, Severity.WARNING, sites, text, cure)


def test_the_text_names_sites_and_cure():
    assert str(make("a/Dropout", "b/Dropout")) == (
        "a/Dropout, b/Dropout: it was never called. Call it."
    )
    assert str(make(cure="")) == "it was never called"
    found = [make("a/X"), make("b/X", text="it was replaced"), make("c/X")]
    assert list(map(str, merged(found))) == [
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


def test_an_action_gets_the_sites_of_one_fault_together():
    seen = []
    tell([make("a/X"), make("b/X"), make("c/X")], {("b/X", "never_called")}, seen.append)
    assert [finding.sites for finding in seen] == [("a/X", "c/X")]


def train(model, steps=1):
    for _ in range(steps):
        model(torch.randn(5, 3)).sum().backward()


def test_verify_has_one_finding_for_a_fault_of_many_parameters():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    attached = attach(model, {"param:**": ClipGradNorm(1.0, group=True)})
    with pytest.warns(HookWarning) as caught:
        train(model)
    (finding,) = [each for each in attached.verify() if each.kind == Kind.NO_OPTIMIZER]
    assert finding.sites == tuple(site.key for site in attached)
    assert len(finding.sites) == 4
    (warned,) = caught[0].message.findings
    assert warned.sites == finding.sites
    rows = attached.history
    assert [row.site for row in rows if "no_optimizer" in row.findings] == list(finding.sites)


def test_alerts_and_warnings_have_one_finding_for_a_fault_of_many_layers():
    model = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(4)], nn.Linear(3, 3))
    attached = watch(model, "eval_norm", every=1, min_calls=2)
    for norm in model[:4]:
        norm.eval()
    with pytest.warns(HookWarning) as caught:
        train(model, steps=8)
    sites = tuple(f"{i}/Watchdog" for i in range(4))
    assert [finding.sites for finding in attached.alerts] == [sites]
    assert [finding.sites for finding in attached.verify()] == [sites]
    warned = [finding for warning in caught for finding in warning.message.findings]
    assert [finding.sites for finding in warned] == [sites]


def test_a_spec_error_holds_findings():
    with pytest.raises(SpecError) as caught:
        attach(nn.Sequential(nn.ReLU()), {"1": Dropout(0.1), "x": Dropout(0.1)})
    found = caught.value.findings
    assert [(each.kind, each.severity) for each in found] == [("spec", "error")] * 2
    assert tuple(each.text for each in found) == caught.value.problems
