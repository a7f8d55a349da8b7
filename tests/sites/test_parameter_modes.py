"""Which gradients a ``param:`` site acts on, where forwards of both modes precede a backward."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import ScaleGrad, SiteError, attach
from tests.cases import rest_slow

TRAIN, EVAL, QUIET = "train", "eval", "eval without gradients"
BACK = "backward"


def model_with(active="train", checkpointing=None):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)

        def forward(self, x):
            if checkpointing is None:
                return self.layer(x)
            return checkpoint(self.layer, x, use_reentrant=checkpointing == "reentrant")

    model = Model()
    attach(model, {"param:layer.weight": ScaleGrad(10.0, active=active)})
    return model


def run(model, call, events):
    """The gradient that each backward adds, of the forwards since the last one."""
    pending, found = [], []
    x = torch.ones(1, 1, requires_grad=True)
    for event in events:
        if event == BACK:
            model.zero_grad()
            sum(pending).sum().backward()
            found.append(model.layer.weight.grad.item() / len(pending))
            pending = []
            continue
        model.train(event == TRAIN)
        with torch.no_grad() if event == QUIET else contextlib.nullcontext():
            y = call(x)
        if event == TRAIN or (event == EVAL and EVAL in alone(events)):
            pending.append(y)
        model.train()
    return found


def alone(events):
    """What is evaluated with gradients and no training forward before the same backward."""
    return [EVAL] if TRAIN not in events else []


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_on_where_any_forward_since_the_last_gradient_was_in_training(n, checkpointing):
    for events in itertools.product([TRAIN, EVAL, QUIET], repeat=n):
        if TRAIN in events:
            model = model_with(checkpointing=checkpointing)
            assert run(model, model, [*events, BACK]) == [10.0], events


@pytest.mark.parametrize("before", [[], [TRAIN, BACK], [TRAIN, TRAIN, BACK]], ids=str)
def test_off_in_evaluation(before):
    model = model_with()
    run(model, model, before)
    for events in ([EVAL, BACK], [QUIET, EVAL, BACK], [EVAL, QUIET, EVAL, BACK]):
        assert run(model, model, events) == [1.0], events
    assert run(model, model, [TRAIN, BACK]) == [10.0]


def test_always_active():
    model = model_with(active="always")
    assert run(model, model, [EVAL, BACK]) == [10.0]


def test_two_backwards_of_one_forward():
    model = model_with()
    loss = model(torch.ones(1, 1)).sum()
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert model.layer.weight.grad == 10.0


@pytest.mark.parametrize("checkpointing", rest_slow([None, "not reentrant"]))
def test_compiled(checkpointing):
    """One graph for each mode, also where the owner is inside a checkpoint in the graph."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = model_with(checkpointing=checkpointing)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert run(model, call, [TRAIN, BACK]) == [10.0]
        assert run(model, call, [TRAIN, EVAL, BACK]) == [10.0]
        assert run(model, call, [TRAIN, TRAIN, BACK]) == [10.0]
        assert run(model, call, [EVAL, BACK]) == [1.0]
    assert counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


def test_a_function_without_a_gradient_for_the_parameter():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.clone()

        @staticmethod
        def backward(ctx, g):
            return None

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return Nothing.apply(self.w) * x

    model = Uses()
    attached = attach(model, {"param:w": ScaleGrad(10.0)})
    model(torch.ones(2, requires_grad=True)).sum().backward()
    assert attached.sites[0].active_calls == 0
    assert model.w.grad is None or not model.w.grad.any()


def test_a_stacked_parameter_is_refused_where_it_would_get_a_gradient():
    model = model_with()
    stacked = {"layer.weight": torch.ones(3, 1, 1, requires_grad=True)}

    def each(parameters):
        return torch.func.functional_call(model, parameters, (torch.ones(1, 1),)).sum()

    with pytest.raises(SiteError, match=r"layer.weight/ScaleGrad.*torch.func.vmap has stacked"):
        torch.func.vmap(each)(stacked)
    with torch.no_grad():
        torch.func.vmap(each)(stacked)
    torch.func.vmap(each)({"layer.weight": torch.ones(3, 1, 1)})
    found = torch.func.vmap(torch.func.grad(each))(stacked)
    assert (found["layer.weight"] == 10.0).all()
