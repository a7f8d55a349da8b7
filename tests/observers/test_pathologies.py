"""Faults of training: the first alert of ``watch`` names the rule, the layer and the cause."""

import pytest
import torch

from dropblock_hooks import watch
from tests.cases import rest_slow
from tests.observers.faulty import FAULTS, batch_for


def alerts_of(fault, epochs=2, steps=12):
    """All alerts of a short training, with `watch` at its defaults."""
    torch.manual_seed(1)
    model, found = fault.model(), []
    fault.spoil(model)
    optimizer = torch.optim.SGD(model.parameters(), fault.lr)
    with watch(model, action=found.append) as attached:
        for epoch in range(epochs):
            model.train()
            for i in range(steps):
                x, target = batch_for(model)
                optimizer.zero_grad()
                fault.loss(model(fault.batch(x, epoch * steps + i)), target).backward()
                optimizer.step()
            attached.step()
    return found


MISSED = {
    "gradient times 0",  # a hook of the user, which acts behind that of the Watchdog
}
PLAIN = {
    "logarithm of 0",
    "NaN in one batch",
    "one text in the whole batch",
    "root of 0",
    "bias far below 0",
    "inputs of a wrong scale",
    "small weights",
    "detach between two blocks",
}


def case(fault):
    marks = [pytest.mark.xfail(strict=True)] if fault.name in MISSED else []
    return pytest.param(fault, id=fault.name, marks=marks)


@pytest.mark.parametrize(
    "fault",
    rest_slow(map(case, FAULTS), [case(fault) for fault in FAULTS if fault.name in PLAIN]),
)
def test_the_first_alert_names_the_cause(fault):
    found = alerts_of(fault)
    text = "\n".join(map(str, found))
    assert found, "no alert"
    assert found[0].kind == fault.kind, text
    assert found[0].layer in fault.layers.split(), text
    assert fault.says in f"{found[0].text} {found[0].cure}", text
    assert len(found) == 1 or fault.kind != "nonfinite", "NaN has one cause"
