"""`Attachment.same_masks`: the first call of a site in the block draws, the others use its mask.

The references are computed by hand from the mask that a dropout of ones shows.
"""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    ActivationStats,
    ClipGradNorm,
    Disout,
    DropBlock2d,
    DropGrad2d,
    Dropout,
    Dropout2d,
    DropPath,
    Foreign,
    GaussianDropout,
    GaussianNoise,
    LinearSchedule,
    Regularizer,
    Retune,
    SiteError,
    StochasticDepth,
    attach,
    attachments,
    sample,
)
from tests.classes import make, own_regularizers
from tests.stacks import OF_SOME_LAYERS

RANDOM = [
    cls
    for name, cls in own_regularizers().items()
    if name not in OF_SOME_LAYERS and cls.random is True and cls.acts_on == "activation"
]
SHAPES = {None: (8, 6, 7, 7), 1: (8, 6, 7), 2: (8, 6, 7, 7), 3: (8, 6, 5, 5, 5)}


class Double(nn.Module):
    def forward(self, x):
        return x * 2.0


def images(shape=SHAPES[2], seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def host(*regularizers, layers=1):
    model = nn.Sequential(*[Double() for _ in range(layers)])
    return model, attach(model, {"*": list(regularizers)})


@pytest.mark.parametrize("cls", RANDOM)
def test_every_random_class_draws_the_same_again(cls):
    model, attached = host(make(cls, 0.5))
    x = images(SHAPES[cls.spatial])
    with attached.same_masks():
        first, second, third = model(x), model(x), model(x)
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert not torch.equal(first, model(x))
    with attached.same_masks():
        assert not torch.equal(first, model(x)), "another block, another mask"


@pytest.mark.parametrize("module", [nn.Dropout(0.5), nn.Dropout2d(0.5), nn.RReLU()])
def test_modules_of_other_libraries(module):
    model, attached = host(Foreign(type(module)))
    with attached.same_masks():
        x = images() - 1
        assert torch.equal(model(x), model(x))
        assert attached.sites[0].active_calls == 2


class Noisy(Regularizer):
    """A class of somebody else's, which draws by torch's own functions."""

    def apply(self, x, now):
        return x + torch.randn_like(x), None


def test_a_class_of_your_own(own_registry):
    model, attached = host(Noisy())
    with attached.same_masks():
        assert torch.equal(model(images()), model(images()))


def test_the_mask_is_applied_to_other_values_with_its_gradient():
    """y = 2 x m / (1 - p): m is read from a call on ones, and the others are computed by hand."""
    model, attached = host(Dropout(0.3))
    with attached.same_masks():
        mask = model(torch.ones(SHAPES[2])) / 2
        assert sorted(mask.unique().tolist()) == pytest.approx([0.0, 1 / 0.7])
        for seed in range(3):
            x = images(seed=seed).requires_grad_()
            y = model(x)
            torch.testing.assert_close(y, x * 2 * mask, rtol=1e-6, atol=0.0)
            weights = images(seed=seed + 10)
            (grad,) = torch.autograd.grad((y * weights).sum(), x)
            torch.testing.assert_close(grad, weights * 2 * mask, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("when", ["inside", "outside"])
def test_the_steps_of_a_recurrent_network_have_the_gradient_of_a_loop_by_hand(when):
    """Variational dropout: one mask on the state of all steps."""
    torch.manual_seed(0)
    steps, units = 5, 40
    cell = nn.RNNCell(6, units).double()
    attached = attach(cell, {".": Dropout(0.4)})
    x = torch.rand(steps, 3, 6).double()
    with attached.same_masks():
        state = torch.zeros(3, units).double()
        states = [state := cell(x[i], state) for i in range(steps)]
        loss = torch.stack(states).square().sum()
        if when == "inside":
            loss.backward()
    if when == "outside":
        loss.backward()
    grads = [p.grad.clone() for p in cell.parameters()]
    attached.remove()

    mask = (states[0] != 0).double() / 0.6
    assert 0.2 < (mask == 0).double().mean() < 0.6
    state, by_hand = torch.zeros(3, units).double(), []
    for i in range(steps):
        state = cell(x[i], state) * mask
        by_hand.append(state)
    cell.zero_grad()
    torch.stack(by_hand).square().sum().backward()
    torch.testing.assert_close(torch.stack(states), torch.stack(by_hand))
    for grad, parameter in zip(grads, cell.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


def test_each_site_has_its_own_mask():
    model, attached = host(Dropout(0.5), layers=2)
    seen = [[], []]
    for place in (0, 1):
        model[place].register_forward_hook(lambda m, a, y, place=place: seen[place].append(y))
    with attached.same_masks():
        for _ in range(2):
            model(torch.ones(4, 64))
    (first, again), (second, again2) = seen
    assert torch.equal(first, again)
    assert torch.equal(second, again2)
    alive = first != 0
    assert not torch.equal(second[alive] == 0, torch.zeros_like(second[alive], dtype=torch.bool))


def test_two_regularizers_on_a_layer_differ():
    model, attached = host(Dropout(0.5))
    attached.remove()
    attached = attach(model, {"0": [Dropout(0.5), GaussianNoise(0.5)], "**": Dropout2d(0.2)})
    with attached.same_masks():
        assert torch.equal(model(images()), model(images()))


def test_numbers_outside_of_the_sites_are_drawn_as_always():
    model, attached = host(Dropout(0.5))
    with attached.same_masks():
        model(images())
        others = [torch.rand(()) for _ in range(3) if model(images()) is not None]
    assert len({float(number) for number in others}) == 3


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (images((4, 6, 7, 7)), r"shape \(4, 6, 7, 7\), .* first .* had \(8, 6, 7, 7\)"),
        (images().double(), "dtype torch.float64, .* torch.float32"),
        (images().to(memory_format=torch.channels_last), "strides"),
    ],
)
def test_another_tensor_is_refused(x, said):
    model, attached = host(Dropout2d(0.5))
    with attached.same_masks():
        first = model(images())
        with pytest.raises(SiteError, match=rf"0/Dropout2d on Double '0': same_masks\(\) .*{said}"):
            model(x)
        assert torch.equal(model(images()), first), "the block goes on"
    model(x)


def test_another_rate_is_refused():
    model, attached = host(Dropout(p=LinearSchedule(0.1, 0.3, epochs=3)))
    with attached.same_masks():
        model(images())
        attached.step(1)
        with pytest.raises(SiteError, match=re.escape("rates {'p': 0.2}, and the first")):
            model(images())


def test_a_block_in_a_block_begins_anew():
    model, attached = host(Dropout(0.5))
    x = images()
    with attached.same_masks():
        first = model(x)
        with attached.same_masks():
            inside = model(x)
            assert torch.equal(model(x), inside)
        assert torch.equal(model(x), first)
    assert not torch.equal(first, inside)


def test_an_error_ends_the_block():
    model, attached = host(Dropout(0.5))
    with pytest.raises(ValueError, match="mine"), attached.same_masks():
        raise ValueError("mine")
    assert not torch.equal(model(images()), model(images()))


def test_a_rate_of_zero_and_evaluation_draw_nothing():
    model, attached = host(Dropout(0.0))
    model2, attached2 = host(Dropout(0.5))
    model2.eval()
    with attached.same_masks(), attached2.same_masks():
        before = torch.get_rng_state()
        for shape in (SHAPES[1], SHAPES[2]):
            model(images(shape))
            model2(images(shape))
        assert torch.equal(torch.get_rng_state(), before)


def test_gradients_are_regularized_as_always():
    model, attached = host(DropGrad2d(0.5), ClipGradNorm(1.0))
    grads = []
    with attached.same_masks():
        for _ in range(2):
            x = images().requires_grad_()
            model(x).sum().backward()
            grads.append(x.grad)
    assert not torch.equal(*grads)


def test_observers_and_counts_are_as_always():
    model, attached = host(Dropout(0.5), ActivationStats(every=1))
    with attached.same_masks():
        for shape in [SHAPES[2]] * 3:
            y = model(images(shape))
    row, stats = attached.report()
    assert (row.calls, row.active_calls, stats.observed.calls) == (3, 3, 3)
    assert row.realized_rate == pytest.approx(float((y == 0).float().mean()))


def test_samples_of_monte_carlo_dropout_that_are_compared():
    model, attached = host(Dropout(0.5))
    model.eval()
    x = images()
    with attached.always():
        with attached.same_masks():
            assert torch.equal(model(x), model(x))
            with pytest.raises(RuntimeError, match="all samples would be equal.*same_masks"):
                sample(model, x)
        assert not torch.equal(model(x), model(x))


class Checkpointed(nn.Module):
    """Two layers in a checkpoint, and other random numbers in it."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.own = nn.Dropout(0.5)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(lambda x: self.own(self.inner(x)), x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_a_checkpoint_draws_the_same_again(reentrant, inside):
    """The gradient of the sum is linear in the mask, so that a wrong one shows."""

    def grads(checkpointed):
        torch.manual_seed(0)
        model = Checkpointed(reentrant).double()
        attached = attach(model, {"inner.[02]": Dropout(0.5)})
        run = model if checkpointed else lambda x: model.own(model.inner(x))
        x = torch.rand(7, 6).double().requires_grad_()
        plain = run(x).sum()
        torch.manual_seed(1)
        with attached.same_masks():
            losses = [run(x).square().sum(), run(x * 2).sum(), run(x + 1).square().sum()]
            if inside:
                sum(losses).backward()
        with attached.same_masks():
            losses += [run(x * 3).square().sum(), run(x).sum()]
        if inside:
            sum(losses[3:], plain).backward()
        else:
            sum(losses, plain).backward()
        assert attached.sites[0].calls == 6
        return [x.grad, *(p.grad for p in model.parameters())]

    for one, other in zip(grads(True), grads(False), strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(one, other)


def test_noted_calls_are_bounded(monkeypatch):
    monkeypatch.setattr("dropblock_hooks.sites.seeds._MOST_NOTED", 5)
    model, attached = host(Dropout(0.5))
    with attached.same_masks():
        for _ in range(20):
            model(images())
    assert len(attached._run.seeds._noted) == 5


def test_a_copy_is_outside_of_the_block():
    model, attached = host(Dropout(0.5))
    with attached.same_masks():
        model(images())
        copied = copy.deepcopy(model)
        assert not torch.equal(copied(images()), copied(images()))
        (other,) = attachments(copied)
        with other.same_masks():
            assert torch.equal(copied(images()), copied(images()))


def test_a_layer_that_drops_by_itself_is_refused():
    model = nn.ModuleDict({"rnn": nn.LSTM(3, 3, 2, dropout=0.2), "own": nn.Dropout(0.1)})
    attached = attach(model, {"attr:rnn.dropout": Retune(0.4), "own": Retune(0.5)})
    with pytest.raises(RuntimeError, match=r"rnn.dropout/Retune: the layer itself drops"):
        attached.same_masks().__enter__()
    attached.remove()
    attached = attach(model, {"own": Retune(0.5)})
    with attached.same_masks():
        assert torch.equal(model["own"](images()), model["own"](images()))


@pytest.mark.slow
def test_compiled_code_runs_in_eager_mode_in_a_block():
    torch._dynamo.reset()
    model, attached = host(Dropout(0.5), Foreign(nn.Dropout))
    call = torch.compile(model, backend="aot_eager")
    x = images()
    assert not torch.equal(call(x), call(x))
    with attached.same_masks():
        assert torch.equal(call(x), call(x))
    assert not torch.equal(call(x), call(x))


@pytest.mark.slow
@pytest.mark.parametrize("regularizer", [Dropout(0.5), Foreign(nn.Dropout)])
def test_code_that_is_compiled_in_a_block_is_refused(regularizer):
    torch._dynamo.reset()
    model, attached = host(regularizer)
    call = torch.compile(model, backend="aot_eager")
    said = r"without torch.compile in a block of same_masks\(\)"
    with (
        attached.same_masks(),
        torch.compiler.set_stance("default"),
        pytest.raises(Exception, match=said),
    ):
        call(images())

    def whole(x):
        with attached.same_masks():
            return model(x)

    with pytest.raises(Exception, match="same_masks"):
        torch.compile(whole, backend="aot_eager", fullgraph=True)(images())


@pytest.mark.parametrize("cls", [DropBlock2d, Disout, GaussianDropout, DropPath, StochasticDepth])
def test_a_block_costs_nothing_before_and_after(cls):
    """Without a block the masks of a seed are the same as ever."""
    model, attached = host(make(cls, 0.5))
    x = images()
    torch.manual_seed(3)
    before = model(x)
    with attached.same_masks():
        model(x)
    torch.manual_seed(3)
    assert torch.equal(model(x), before)
