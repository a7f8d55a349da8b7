"""Mistakes with the rate of a class of one's own, and what the error says to write."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from dropblock_hooks import LinearSchedule, Probability, Regularizer, SiteError, attach

X = torch.ones(2, 3)


class WithoutAnnotation(Regularizer):
    p = 0.1

    def apply(self, x, now):
        return x * now.p, None


@dataclass(frozen=True)
class AnnotatedAsNumber(Regularizer):
    p: float = 0.1

    def apply(self, x, now):
        return x * now.p, None


@pytest.mark.parametrize("cls", [WithoutAnnotation, AnnotatedAsNumber])
def test_a_rate_that_is_not_annotated_as_one(cls):
    model = nn.Sequential(nn.Linear(3, 3))
    attach(model, {"0": cls()})
    with pytest.raises(AttributeError, match=re.escape("as one: `p: Probability = 0.1`")):
        model(X)


@dataclass(frozen=True)
class ReadsItself(Regularizer):
    p: Probability = 0.1

    def apply(self, x, now):
        return OPERATIONS[now.input.shape[0]](x, self.p), None


OPERATIONS = {
    1: lambda x, p: x * (1 - p),
    2: lambda x, p: x * (torch.rand_like(x) < p),
    3: nn.functional.dropout,
    4: torch.full_like,
}


@pytest.mark.parametrize("samples", OPERATIONS)
@pytest.mark.parametrize("rate", [LinearSchedule(0.0, 0.5, 3), lambda t: 0.1], ids=["ramp", "own"])
def test_a_schedule_that_apply_reads_from_itself(samples, rate):
    model = nn.Sequential(nn.Linear(3, 3))
    attach(model, {"0": ReadsItself(rate)})
    with pytest.raises(SiteError, match=r"0/ReadsItself .*: read now\.p in apply, not self\.p$"):
        model(torch.ones(samples, 3))


def test_another_error_has_no_advice_about_rates():
    model = nn.Sequential(nn.Linear(3, 3))
    attach(model, {"0": ReadsItself(0.5)})
    with pytest.raises(KeyError, match="5"):
        model(torch.ones(5, 3))
