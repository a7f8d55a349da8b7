"""Names of classes, and a regularizer of one's own in one file."""

import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    Dropout,
    LinearSchedule,
    Probability,
    Rate,
    Regularizer,
    Schedule,
    Spec,
    attach,
    register,
)


@register
class Fade(Regularizer):
    """Multiplies by 1 - p."""

    p: Probability = 0.5
    bias: Rate | None = None

    def apply(self, x, now):
        return x * (1 - now.p) + (0.0 if self.bias is None else now.bias), None


@register
class Saw(Schedule):
    """The fraction of the epoch."""

    top: float = 1.0

    def __call__(self, t):
        return self.top * (t % 1)


def test_one_class_is_all_it_takes():
    spec = Spec.from_yaml("'0': {Fade: {p: {Saw: {top: 0.5}}, bias: 1.0}}")
    assert spec == Spec({"0": Fade(Saw(0.5), 1.0)})
    model = nn.Sequential(nn.Identity())
    attached = attach(model, spec)
    attached.step(3.5)
    assert attached.rates == {"0/Fade": {"p": 0.25, "bias": 1.0}}
    assert (model(torch.ones(2)) == 1.75).all()
    assert pickle.loads(pickle.dumps(Fade(0.1))) == Fade(0.1)
    assert repr(Fade(Saw())) == "Fade(p=Saw(top=1.0))"


def test_a_decorator_that_was_forgotten():
    class Plain(Regularizer):
        q: Rate = 0.1

    with pytest.raises(TypeError, match="Plain has fields .q.: put @register above it"):
        Plain()


def test_a_schedule_for_what_is_no_rate():
    @register
    class Typed(Regularizer):
        q: float = 0.1

    with pytest.raises(TypeError, match="q takes no schedule.*Rate"):
        Typed(LinearSchedule(0, 1, epochs=2))


def test_register_refuses():
    with pytest.raises(ValueError, match="Dropout.*taken"):

        @register(name="Dropout")
        class Other(Regularizer):
            pass

    with pytest.raises(TypeError, match="frozen"):

        @register
        @dataclass
        class Thawed(Schedule):
            pass

    with pytest.raises(TypeError, match="subclass of Regularizer or Schedule"):
        register(dict)

    assert Spec({"a": "Dropout"}) == Spec({"a": Dropout()})


def test_a_cell_that_is_run_again_registers_again():
    for default in (0.1, 0.2):

        @register
        class Cell(Dropout):
            p: Probability = default

    assert Spec({"a": "Cell"}).entries[0].regularizers[0].p == 0.2


def test_a_reserved_name():
    @register
    class Bad(Regularizer):
        grad_scale: Rate = 0.1

    with pytest.raises(TypeError, match="'grad_scale'"):
        Bad()
