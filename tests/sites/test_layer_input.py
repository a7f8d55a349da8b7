"""Regularizers that need the input of a layer get it unchanged, or the layer is refused."""

import itertools
from typing import ClassVar

import pytest
import torch
from torch import nn

from dropblock_hooks import Dropout, Regularizer, SiteError, StochasticDepth, attach
from tests.cases import rest_slow

X = torch.linspace(-1, 1, 24).reshape(6, 4)


class Skips(Regularizer):
    """Gives the input back; a class that torch.compile does not trace."""

    needs_input: ClassVar[bool] = True

    def apply(self, x, now):
        return now.input * 1, x.numel()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, hidden_states, mask=None):
        return hidden_states + self.fc(hidden_states)


class Options(Block):
    def forward(self, *, hidden_states, mask=None):
        return hidden_states + self.fc(hidden_states)


class Anything(Block):
    def forward(self, **options):
        return options["hidden_states"] + self.fc(options["hidden_states"])


class AddsInPlace(Block):
    def forward(self, hidden_states):
        hidden_states += self.fc(hidden_states * 1)
        return hidden_states


class GivesAView(AddsInPlace):
    def forward(self, hidden_states):
        return super().forward(hidden_states)[:]


class BeginsWithRelu(Block):
    def forward(self, hidden_states):
        return self.fc(torch.relu_(hidden_states))


class AddsToRelu(Block):
    def forward(self, hidden_states):
        y = nn.functional.relu(hidden_states, inplace=True)
        return y + self.fc(y)


class OfAView(Block):
    def forward(self, hidden_states):
        hidden_states[:, :2].mul_(2.0)
        return hidden_states * 2


class BreaksTheGraph(Block):
    def forward(self, hidden_states):
        y = self.fc(torch.relu_(hidden_states))
        torch._dynamo.graph_break()
        return y


class WorksInPlaceInside(Block):
    def forward(self, hidden_states):
        return torch.relu_(hidden_states + torch.relu_(self.fc(hidden_states)))


class GivesBack(Block):
    def forward(self, hidden_states):
        return hidden_states[:]


REGULARIZERS = {"traced": StochasticDepth(1.0, mode="batch"), "an operator": Skips()}
"""One that torch.compile traces, and one that runs in an operator."""
CHANGES = [AddsInPlace, GivesAView, BeginsWithRelu, AddsToRelu, OfAView]
KEEPS = [Block, WorksInPlaceInside, GivesBack, nn.Identity]
KEPT = [*itertools.product(KEEPS, ["eager", "aot_eager"], REGULARIZERS)]
# each regularizer is compiled at one block
KEPT_SOON = [case for case in KEPT if case[0] is Block or case[1] == "eager"]
COMPILED = [*itertools.product([*CHANGES, BreaksTheGraph], REGULARIZERS)]
COMPILED_SOON = [(AddsInPlace, "an operator")]


class Net(nn.Module):
    def __init__(self, block, keyword=False):
        super().__init__()
        self.stem, self.block, self.keyword = nn.Linear(4, 4), block(), keyword

    def forward(self, x):
        y = self.stem(x)
        return self.block(hidden_states=y) if self.keyword else self.block(y)


def run(model, mode):
    torch._dynamo.reset()
    if mode == "eager":
        return model(X)
    fullgraph = not isinstance(model.block, BreaksTheGraph)
    return torch.compile(model, backend=mode, fullgraph=fullgraph)(X)


@pytest.mark.parametrize(("block", "mode", "kind"), rest_slow(KEPT, KEPT_SOON))
def test_a_block_that_keeps_its_input(block, mode, kind):
    model = Net(block)
    with attach(model, {"block": REGULARIZERS[kind]}) as attached:
        y = run(model, mode)
        assert attached.verify() == []
        y.sum().backward()
    assert torch.equal(y, model.stem(X))
    assert torch.equal(model.stem.bias.grad, torch.full((4,), 6.0))


@pytest.mark.parametrize("regularizer", [StochasticDepth(0.5), Skips()], ids=repr)
@pytest.mark.parametrize("block", [*CHANGES, BreaksTheGraph])
def test_a_block_that_changes_its_input_in_place_is_refused(block, regularizer):
    model = Net(block)
    with attach(model, {"block": regularizer}), pytest.raises(SiteError, match="has changed its"):
        model(X)
    assert not model.block._forward_hooks
    assert not model.block._forward_pre_hooks


@pytest.mark.parametrize("block", [AddsInPlace, GivesAView])
def test_it_is_refused_in_inference_mode_too(block):
    model = Net(block).eval()
    attach(model, {"block": StochasticDepth(0.5, active="always")})
    with torch.inference_mode(), pytest.raises(SiteError, match="has changed its input"):
        model(X)


@pytest.mark.parametrize(("block", "kind"), rest_slow(COMPILED, COMPILED_SOON))
def test_compiled_code_keeps_the_input(block, kind):
    model = Net(block)
    with attach(model, {"block": REGULARIZERS[kind]}) as attached:
        y = run(model, "aot_eager")
        assert attached.verify() == []
        y.sum().backward()
    assert torch.equal(y, model.stem(X))
    assert torch.equal(model.stem.bias.grad, torch.full((4,), 6.0))


@pytest.mark.parametrize("regularizer", [StochasticDepth(1.0, mode="batch"), Skips()], ids=repr)
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
@pytest.mark.parametrize("block", rest_slow([Block, Options]))
def test_a_layer_that_is_called_by_keyword(block, mode, regularizer):
    model = Net(block, keyword=True)
    with attach(model, {"block": regularizer}) as attached:
        y = run(model, mode)
        assert attached.sites[0].active_calls == 1
        assert attached.verify() == []
    assert torch.equal(y, model.stem(X))


@pytest.mark.parametrize("regularizer", [StochasticDepth(0.5), Skips()], ids=repr)
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_a_layer_whose_first_argument_is_not_known_is_refused(mode, regularizer):
    model = Net(Anything, keyword=True)
    attached = attach(model, {"block": regularizer})
    with pytest.raises(Exception, match=r"without its first argument|Observed exception"):
        run(model, mode)
    attached.remove()


@pytest.mark.parametrize("order", rest_slow(["before", "after"]))
def test_the_input_is_the_one_that_regularizers_of_the_input_made(order):
    model = Net(Block)
    first, second = {"block": Dropout(1.0, at="input")}, {"block": Skips()}
    for spec in (first, second) if order == "before" else (second, first):
        attach(model, spec)
    assert not model(X).any()
    assert not run(model, "aot_eager").any()


def test_no_tensor_is_kept_between_calls():
    model = Net(Block)
    attached = attach(model, {"block": StochasticDepth(0.5)})
    for mode in ("eager", "aot_eager"):
        run(model, mode)
        assert attached._hooks[0].noted is None
        assert attached._hooks[0].copied is None


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_that_changes_the_shape_is_named(compiled):
    model = Net(lambda: nn.Linear(4, 3))
    attach(model, {"block": StochasticDepth(0.5)})
    call = torch.compile(model, backend="aot_eager") if compiled else model
    with pytest.raises(SiteError, match="block/StochasticDepth.*needs a residual block that keeps"):
        call(X)
